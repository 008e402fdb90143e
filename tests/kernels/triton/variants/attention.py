"""Launches of attention to compile."""

import torch

from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.triton.attention.decode import attend_decode
from pipeline.kernels.triton.attention.prefill import attend
from pipeline.kernels.triton.attention.tasks import AttentionTasks
from pipeline.kernels.triton.kv_cache import shape_of
from pipeline.kernels.triton.rotary import rotary_write
from pipeline.kernels.triton.rows import StepArrays
from tests.slices import ALL_CASES

LLAMA_8B = (32, 8, 128)
LLAMA_1B = (32, 8, 64)
SMOLLM2_135M = (9, 3, 64)


QWEN3_8B = (32, 4, 128)
PHI_2 = (32, 32, 80)
GEMMA = (8, 4, 256)
MQA = (32, 1, 96)
GEMMA_2_9B = (16, 8, 256)
GPT_OSS = (64, 8, 64)
BERT_BASE = (12, 12, 64)
CAPPED = ScoreOptions(scale=1 / 16, softcap=50.0)


def _launch(
    shape: tuple[int, int, int],
    num_entries: int,
    num_tokens: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    normed: bool = False,
    fused: bool = True,
    pdl: bool = False,
    quantized: bool = False,
    form: ScoreOptions | None = None,
    has_ends: bool = False,
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    device = torch.device("cpu")
    how = {"quantized": quantized, "form": form, "window_after": window - 1 if window and has_ends else None}
    tasks = AttentionTasks(32, 2048, num_heads, num_kv_heads, head_dim, dtype, device, window, **how)  # type: ignore[arg-type]
    ints = torch.zeros(num_tokens, dtype=torch.int32)
    of_entries = torch.zeros(num_entries, dtype=torch.int32)
    step = StepArrays(
        of_entries, of_entries, of_entries, of_entries, ints, ints, ints.long(), of_entries, of_entries, of_entries,
        torch.zeros((4, 64), dtype=torch.int32), key_ends=ints if has_ends else None,
    )  # fmt: skip
    queries = torch.zeros((num_tokens, num_heads * head_dim), dtype=dtype)
    cache_dtype = torch.int8 if quantized else dtype
    keys = torch.zeros(shape_of(4, num_kv_heads, head_dim, cache_dtype), dtype=cache_dtype)
    values = keys.clone()
    angles = torch.zeros((64, head_dim // 2))
    num_split_k_partials = 4 if num_tokens <= 16 else 1
    split_k_partials = torch.zeros((num_split_k_partials, num_tokens, (num_heads + 2 * num_kv_heads) * head_dim))
    split_k_partials = split_k_partials if num_split_k_partials > 1 else split_k_partials.to(dtype)
    norms = (torch.zeros(head_dim), torch.zeros(head_dim), 1e-6) if normed else None
    decodes = num_tokens == num_entries and not has_ends
    sinks = torch.zeros(num_heads) if tasks.form.has_sinks else None
    growth = (0.0, 1) if form is None else (0.1, 8192)
    tasks.plan(step, one_each=decodes)
    if decodes and fused:
        more = norms, None, sinks, growth
        attend_decode(queries, split_k_partials, angles, angles, step, keys, values, tasks, *more, pdl=pdl)
    else:
        rotary_write(queries, split_k_partials, angles, angles, step, keys, values, norms, None, growth)
        attend(queries.clone(), queries, keys, values, step, tasks, sinks)


def launches() -> None:
    _launch(LLAMA_8B, 4, 4)
    _launch(LLAMA_8B, 4, 1024)
    _launch(LLAMA_8B, 4, 4, quantized=True)
    _launch(LLAMA_8B, 4, 1024, quantized=True)
    _launch(GEMMA_2_9B, 4, 4, window=4096, form=CAPPED)
    _launch(GEMMA_2_9B, 4, 1024, window=4096, form=CAPPED)
    sinks = ScoreOptions(has_sinks=True)
    _launch(BERT_BASE, 4, 1024, window=65, has_ends=True, form=sinks)  # more branches than any model has
    if ALL_CASES:
        _launch(BERT_BASE, 4, 1024, window=65, has_ends=True)
        _launch(SMOLLM2_135M, 4, 4)
        _launch(GPT_OSS, 4, 1024, window=128, form=sinks)
        _launch(BERT_BASE, 4, 1024, has_ends=True)


def all_launches() -> None:
    """Too slow for CI."""
    launches()
    _launch(SMOLLM2_135M, 4, 4, pdl=True)
    for shape in (LLAMA_8B, LLAMA_1B, SMOLLM2_135M, QWEN3_8B, PHI_2, GEMMA, MQA):
        for dtype in (torch.bfloat16, torch.float32):
            for window in (None, 1024):
                _launch(shape, 4, 1024, dtype=dtype, window=window, normed=window is not None)
                _launch(shape, 4, 4, dtype=dtype, window=window, normed=window is not None)
            _launch(shape, 4, 1024, dtype=dtype, quantized=True)
            _launch(shape, 4, 4, dtype=dtype, quantized=True)
            for form in (CAPPED, ScoreOptions(has_sinks=True), ScoreOptions(slopes=torch.zeros(shape[0]))):
                _launch(shape, 4, 1024, dtype=dtype, form=form)
                _launch(shape, 4, 4, dtype=dtype, form=form)
