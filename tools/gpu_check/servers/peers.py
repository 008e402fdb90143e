"""Measures transformers on the same shapes in the same run: `generate` with a batch of equal lengths, and continuous
batching.

Weights are random, like ours. The figure is the decode rate: tokens per second between the first token and the last,
without prefill. No flash-attention package is requested, since transformers would download one. The notes name the
attention implementation.
"""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from pipeline.runtime.model.model_config import ModelConfig
from tools.gpu_check import gpu
from tools.gpu_check.child import Context, Item
from tools.gpu_check.models import transformers_sizes
from tools.gpu_check.readings import Reading
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B, SMOLLM2_135M, TINY

CONTEXT = 1024
"""Tokens of a prompt, as in our steps."""


def items(context: Context) -> list[Item]:
    return [
        Item("transformers 135M", partial(_model, config=SMOLLM2_135M, name="135M", batches=(1, 32)), needs_s=15),
        Item("transformers 1B", partial(_model, config=LLAMA_1B, name="1B", batches=(1, 32)), needs_s=15),
        Item("transformers 8B", partial(_model, config=LLAMA_8B, name="8B", batches=(1,)), needs_s=15),
    ]


def _model(context: Context, config: ModelConfig, name: str, batches: tuple[int, ...]) -> Iterator[Reading]:
    num_prompt, num_new = (512 if name == "135M" else CONTEXT), (24 if context.small else 64)
    if context.interpreted:
        config, num_prompt, num_new, batches = TINY, 8, 3, batches[:1]
    model = _make(config, num_prompt + num_new)
    try:
        for batch in batches:
            prompts = torch.randint(3, config.vocab_size, (batch, num_prompt))
            per_s = _generate(model, prompts, num_new)
            yield _reading(f"transformers generate, {name}, batch {batch}", per_s, batch, "eager, sdpa")
        for batch in batches:
            prompts = torch.randint(3, config.vocab_size, (batch, num_prompt))
            per_s = _continuous(model, prompts, num_new, context.interpreted)
            note = "paged sdpa; the rate while all sequences ran"
            yield _reading(f"transformers continuous batching, {name}, batch {batch}", per_s, batch, note)
    finally:
        del model
        gpu.free_memory()


def _reading(case: str, per_s: float, batch: int, note: str) -> Reading:
    return Reading(case, per_s, "tok/s", note=note, numbers={"ms_per_step": batch / per_s * 1e3})


def _make(config: ModelConfig, num_positions: int) -> Any:
    """The model on the device, with transformers' random initialization."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = msgspec.structs.replace(config, max_position=max(2048, num_positions))
    shape = LlamaConfig(**transformers_sizes(config), pad_token_id=0, attn_implementation="sdpa")
    with gpu.device():
        return AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16).eval()


def _generate(model: Any, prompts: torch.Tensor, num_new: int) -> float:
    """Tokens per second of `generate`: the time for many tokens minus the time for one."""
    prompts = prompts.to(gpu.device())
    options = {"do_sample": False, "use_cache": True, "attention_mask": torch.ones_like(prompts)}
    seconds: dict[int, float] = {}
    with torch.inference_mode():
        for num in (2, 1, 1 + num_new):
            gpu.synchronize()
            began_s = time.perf_counter()
            ids = model.generate(prompts, max_new_tokens=num, min_new_tokens=num, **options)
            gpu.synchronize()
            seconds[num] = time.perf_counter() - began_s
            assert ids.shape == (len(prompts), prompts.shape[1] + num), ids.shape
    return len(prompts) * num_new / (seconds[1 + num_new] - seconds[1])


def _continuous(model: Any, prompts: torch.Tensor, num_new: int, interpreted: bool) -> float:
    """Tokens per second of `generate_batch` while all sequences decode: between the last sequence's first token and the
    first sequence's last token."""
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    # No id ends a sequence.
    generation = GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    size = (prompts.shape[1] + num_new) * len(prompts)
    blocks: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 64, "block_size": 16} if interpreted else {}
    batching = ContinuousBatchingConfig(max_memory_percent=0.5, **blocks)
    before = model.config._attn_implementation
    model.set_attn_implementation("paged|sdpa")
    try:
        outputs = model.generate_batch(
            prompts.tolist(),
            generation_config=generation,
            continuous_batching_config=batching,
            record_timestamps=True,
            progress_bar=False,
        )
    finally:
        model.set_attn_implementation(before)
    stamps = [output.timestamps for output in outputs.values()]
    problems = [output.error for output in outputs.values() if output.error]
    if problems or len(stamps) != len(prompts) or any(len(each or ()) != num_new for each in stamps):
        raise RuntimeError(
            f"generate_batch finished {len(stamps)} of {len(prompts)} sequences of {size} tokens: {problems[:1]}"
        )
    begin_s, end_s = max(each[0] for each in stamps), min(each[-1] for each in stamps)
    inside = sum(begin_s < stamp <= end_s for each in stamps for stamp in each)
    if inside < len(stamps):
        raise RuntimeError("not all sequences of generate_batch ran at once")
    return float(inside / (end_s - begin_s))
