"""Steps for kernels at the sizes of a server: rows with shuffled blocks, decode and prefill entries, rows that have
ended, padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.rows import StepArrays
from tools.gpu_check import gpu

Entry = tuple[int, int]
"""Start and count. A count of 0 is a row that has ended, which still occupies a token of the batch."""


@dataclass(frozen=True, slots=True)
class RandomStep:
    """A step on the device."""

    arrays: StepArrays
    entries: tuple[Entry, ...]
    keys: Tensor
    """[num_blocks, K, BLOCK_SIZE, D]; NaN outside of cached positions"""
    values: Tensor
    live: Tensor
    """[T] bool; False for padding and for rows that have ended"""

    def cached(self, entry: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, K, D] that an entry attends to, including its own."""
        start, count = self.entries[entry]
        positions = torch.arange(start + count, device=gpu.device())
        blocks = self.arrays.blocks[int(self.arrays.rows[entry])].long()[positions // BLOCK_SIZE]
        return self.keys[blocks, :, positions % BLOCK_SIZE], self.values[blocks, :, positions % BLOCK_SIZE]


def make(
    entries: Sequence[Entry], num_kv_heads: int, head_dim: int, dtype: torch.dtype, *, padding: int = 0, seed: int = 0
) -> RandomStep:
    """Make a step with random keys and values, and with `padding` additional entries and tokens."""
    device = gpu.device()
    generator = torch.Generator().manual_seed(seed)
    spans = [max(1, count) for _, count in entries]
    num_entries, num_tokens = len(entries) + padding, sum(spans) + padding
    most = max(-(-(start + count) // BLOCK_SIZE) for start, count in entries) + 1
    num_rows = len(entries) + 2
    padding_row = num_rows - 1
    blocks = torch.randperm(num_rows * most, generator=generator).view(num_rows, most).to(device, torch.int32)
    rows = torch.randperm(padding_row, generator=generator)[: len(entries)].to(device, torch.int32)

    def ints(num: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.full((num,), value, dtype=dtype, device=device)

    arrays = StepArrays(
        rows=ints(num_entries, padding_row),
        starts=ints(num_entries),
        counts=ints(num_entries),
        offsets=ints(num_entries),
        ids=ints(num_tokens),
        positions=ints(num_tokens),
        slots=ints(num_tokens, -1, torch.int64),
        sampled=ints(num_entries),
        sample_rows=ints(num_entries, padding_row),
        num_known=ints(num_entries),
        blocks=blocks,
    )
    keys = torch.full((num_rows * most, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype, device=device)
    values = keys.clone()
    live = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    offset = 0
    for i, ((start, count), span) in enumerate(zip(entries, spans, strict=True)):
        arrays.rows[i], arrays.starts[i], arrays.counts[i], arrays.offsets[i] = rows[i], start, count, offset
        length = start + count
        positions = torch.arange(length, device=device)
        theirs = blocks[int(rows[i])].long()[positions // BLOCK_SIZE]
        shape = (length, num_kv_heads, head_dim)
        keys[theirs, :, positions % BLOCK_SIZE] = gpu.random(seed + 2 * i + 1, *shape, dtype=dtype)
        values[theirs, :, positions % BLOCK_SIZE] = gpu.random(seed + 2 * i + 2, *shape, dtype=dtype)
        own = slice(offset, offset + count)
        arrays.positions[own] = positions[start:].to(torch.int32)
        arrays.slots[own] = theirs[start:] * BLOCK_SIZE + positions[start:] % BLOCK_SIZE
        live[own] = True
        offset += span
    return RandomStep(arrays, tuple(entries), keys, values, live)


def attention(queries: Tensor, made: RandomStep, num_heads: int, window: int | None) -> Tensor:
    """Reference attention in float64, one entry at a time. queries [T, Q * D]; returns [T, Q, D], NaN for tokens that
    are not live."""
    num_kv_heads, head_dim = made.keys.shape[1], made.keys.shape[3]
    wide = queries.double().view(len(queries), num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = torch.full(wide.shape, torch.nan, dtype=torch.float64, device=queries.device)
    for i, (start, count) in enumerate(made.entries):
        if not count:
            continue
        offset = int(made.arrays.offsets[i])
        keys, values = (each.double() for each in made.cached(i))
        own = slice(offset, offset + count)
        scores = torch.einsum("tkgd,lkd->kgtl", wide[own], keys) / head_dim**0.5
        at, seen = torch.arange(start, start + count), torch.arange(start + count)
        hidden = seen[None] > at[:, None]
        if window is not None:
            hidden |= seen[None] <= at[:, None] - window
        scores.masked_fill_(hidden.to(scores.device), -torch.inf)
        out[own] = torch.einsum("kgtl,lkd->tkgd", torch.softmax(scores, -1), values)
    return out.view(len(queries), num_heads, head_dim)
