"""Hand-made steps for kernel tests: rows with shuffled blocks, entries of any length, and padding."""

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.attention.kv_layout import dequantize_heads, quantize_heads
from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.kv_cache import codes_and_scales, is_quantized, shape_of
from pipeline.kernels.triton.rows import StepArrays

PADDING_ROW = -1
"""Initial content of `out`, to detect unexpected writes."""


@dataclass
class MadeStep:
    step: StepArrays
    keys: Tensor
    """[num_blocks, K, BLOCK_SIZE, D]: NaN wherever no entry of the step has a key. Or in 8 bits, with NaN scales."""
    values: Tensor
    live: Tensor
    """[T] bool; tokens that are neither padding nor of a row that has ended"""


def make_step(
    entries: list[tuple[int, int]],
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    num_entries: int | None = None,
    num_tokens: int | None = None,
    window: int | None = None,
    seed: int = 0,
    key_ends: Tensor | None = None,
) -> MadeStep:
    """A step of `entries` (start, count), padded to `num_entries` and `num_tokens`. A count of 0 is a row that has
    ended: as in production, it still has a start and one token, whose result is unused. Keys before the `window` of an
    entry's first token do not exist. `key_ends` are those of live tokens, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    spans = [max(count, 1) for _, count in entries]
    num_entries = len(entries) if num_entries is None else num_entries
    num_tokens = sum(spans) if num_tokens is None else num_tokens
    assert num_entries >= len(entries) and num_tokens >= sum(spans)

    lengths = [start + count for start, count in entries]
    most = max([-(-length // BLOCK_SIZE) for length in lengths] + [1]) + 1
    num_rows = len(entries) + 2
    num_blocks = num_rows * most
    blocks = torch.randperm(num_blocks, generator=generator).reshape(num_rows, most).to(torch.int32)
    rows = torch.randperm(num_rows - 1, generator=generator).to(torch.int32)[: len(entries)]

    keys = torch.full((num_blocks, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype)
    values = keys.clone()
    step = StepArrays(
        rows=torch.full((num_entries,), num_rows - 1, dtype=torch.int32),
        starts=torch.zeros(num_entries, dtype=torch.int32),
        counts=torch.zeros(num_entries, dtype=torch.int32),
        offsets=torch.zeros(num_entries, dtype=torch.int32),
        ids=torch.zeros(num_tokens, dtype=torch.int32),
        positions=torch.zeros(num_tokens, dtype=torch.int32),
        slots=torch.full((num_tokens,), -1, dtype=torch.int64),
        sampled=torch.zeros(num_entries, dtype=torch.int32),
        sample_rows=torch.full((num_entries,), num_rows - 1, dtype=torch.int32),
        num_known=torch.zeros(num_entries, dtype=torch.int32),
        blocks=blocks,
    )
    live = torch.zeros(num_tokens, dtype=torch.bool)
    offset = 0
    for index, ((start, count), span) in enumerate(zip(entries, spans, strict=True)):
        row = int(rows[index])
        step.rows[index], step.starts[index], step.counts[index] = row, start, count
        step.offsets[index] = offset
        first_key = 0 if window is None else max(0, start - window + 1)
        for position in range(first_key, start + count):
            block = int(blocks[row, position // BLOCK_SIZE])
            shape = (2, num_kv_heads, head_dim)
            keys[block, :, position % BLOCK_SIZE], values[block, :, position % BLOCK_SIZE] = torch.randn(
                shape, generator=generator
            ).to(dtype)
            if position >= start:
                token = offset + position - start
                step.positions[token] = position
                step.slots[token] = block * BLOCK_SIZE + position % BLOCK_SIZE
                live[token] = True
        offset += span
    if key_ends is not None:
        padded = torch.full((num_tokens,), 2**30, dtype=torch.int32)
        padded[live] = key_ends.to(torch.int32)
        step = dataclasses.replace(step, key_ends=padded)
    return MadeStep(step, keys, values, live)


def in_8_bits(numbers: Tensor) -> Tensor:
    """Keys or values [num_blocks, K, BLOCK_SIZE, D] in 8 bits. NaN has a NaN scale."""
    num_blocks, num_kv_heads, _, head_dim = numbers.shape
    cache = torch.full(shape_of(num_blocks, num_kv_heads, head_dim, torch.int8), 99, dtype=torch.int8)
    for part, quantized in zip(codes_and_scales(cache), quantize_heads(numbers), strict=True):
        part.copy_(quantized)
    return cache


def dequantized(cache: Tensor) -> Tensor:
    """The numbers of keys or values, [num_blocks, K, BLOCK_SIZE, D] float32 if they have 8 bits."""
    return dequantize_heads(*codes_and_scales(cache)) if is_quantized(cache) else cache


def attention_reference(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    step: StepArrays,
    num_heads: int,
    window: int | None,
    form: ScoreOptions | None = None,
    sinks: Tensor | None = None,
    window_after: int | None = None,
) -> Tensor:
    """The formula in float64, one token at a time. queries [T, Q * D]; returns [T, Q, D], NaN for padding."""
    form = form or ScoreOptions()
    keys, values = dequantized(keys), dequantized(values)
    _, num_kv_heads, _, head_dim = keys.shape
    wide = queries.double().view(len(queries), num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.full(wide.shape, torch.nan, dtype=torch.float64)
    for entry in range(step.num_entries):
        start, count = int(step.starts[entry]), int(step.counts[entry])
        table = step.blocks[int(step.rows[entry])].long()
        for index in range(count):
            position, token = start + index, int(step.offsets[entry]) + index
            first = 0 if window is None else max(0, position - window + 1)
            end = position + 1
            if step.key_ends is not None:
                end = min(int(step.key_ends[token]), end + (2**31 if window_after is None else window_after))
            keys_at = torch.arange(first, end)
            blocks = table[keys_at // BLOCK_SIZE]
            seen_keys = keys[blocks, :, keys_at % BLOCK_SIZE].double()
            seen_values = values[blocks, :, keys_at % BLOCK_SIZE].double()
            scores = torch.einsum("hgd,khd->hgk", wide[token], seen_keys) * (form.scale or head_dim**-0.5)
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            if form.slopes is not None:
                scores -= form.slopes.double().view(num_kv_heads, -1, 1) * (position - keys_at).abs()
            if sinks is not None:
                scores = torch.cat([scores, sinks.double().view(num_kv_heads, -1, 1)], -1)
            weights = torch.softmax(scores, -1)[..., : len(keys_at)]
            out[token] = torch.einsum("hgk,khd->hgd", weights, seen_values)
    return out.view(len(queries), num_heads, head_dim)
