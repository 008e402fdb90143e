"""Rotated queries, and keys and values in the cache, against the formulas in float64."""

import pytest
import torch
from torch import Tensor

from pipeline.kernels.attention.hadamard import hadamard_reference
from pipeline.kernels.attention.rotary import rotary_reference
from pipeline.kernels.rms_norm import rms_norm_reference
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.kv_cache import codes_and_scales
from pipeline.kernels.triton.rotary import HeadNorms, QueryGrowth, rotary_write
from pipeline.kernels.triton.rows import StepArrays
from tests.kernels.triton.steps import in_8_bits, make_step

EPS = 1e-5
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""The interpreter truncates to bfloat16, a GPU rounds."""


def angles(head_dim: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Frequencies [D/2], and tables of cosines and sines [L, D/2]."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    turns = torch.outer(torch.arange(length).double(), frequencies.double())
    return frequencies, turns.cos().float(), turns.sin().float()


def heads_reference(
    split_k_partials: Tensor, positions: Tensor, frequencies: Tensor, num_kv_heads: int, head_norms: HeadNorms | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The queries, keys and values that attention uses, [T, heads, D] float64 each."""
    num_tokens, head_dim = split_k_partials.shape[1], 2 * len(frequencies)
    heads = split_k_partials.double().sum(0).view(num_tokens, -1, head_dim)
    queries, keys, values = heads.split([heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
    if head_norms is not None:
        queries = rms_norm_reference(queries, head_norms[0], head_norms[2])
        keys = rms_norm_reference(keys, head_norms[1], head_norms[2])
    return rotary_reference(queries, positions, frequencies), rotary_reference(keys, positions, frequencies), values


def growth_of(positions: Tensor, growth: QueryGrowth) -> Tensor:
    """The factors of queries, [T, 1, 1] float64."""
    return (1 + growth[0] * torch.log1p((positions // growth[1]).double()))[:, None, None]


def test_queries_grow_with_their_positions() -> None:
    made = make_step([(30, 1), (0, 3), (15, 0), (100, 2)], 2, 16, torch.float32, num_tokens=8)
    frequencies, cos, sin = angles(16, 200)
    live, growth = made.live, (0.3, 16)
    split_k_partials = torch.randn(2, 8, 8 * 16)
    queries = torch.full((8, 4 * 16), -7.0)
    rotary_write(
        *(queries, split_k_partials, cos, sin, made.step, made.keys, made.values, None, None, growth),
    )
    positions = made.step.positions[live]
    right, right_keys, _ = heads_reference(split_k_partials[:, live], positions, frequencies, 2, None)
    assert (queries[live].view(-1, 4, 16) - right * growth_of(positions, growth)).abs().max() < 1e-5
    slots = made.step.slots[live]
    assert (made.keys[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] - right_keys).abs().max() < 1e-5


@pytest.mark.parametrize("quantized", [False, True], ids=["", "8 bits"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "num_split_k_partials", "normed", "dtype"),
    [
        (4, 2, 16, 1, False, torch.float32),
        (9, 3, 64, 3, False, torch.float32),
        (4, 4, 80, 2, True, torch.float32),
        (32, 8, 128, 1, True, torch.bfloat16),
        (3, 1, 48, 2, True, torch.float16),
    ],
)
def test_rotary_write(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_split_k_partials: int,
    normed: bool,
    dtype: torch.dtype,
    quantized: bool,
) -> None:
    entries = [(30, 1), (0, 3), (15, 0), (100, 2)]
    made = make_step(entries, num_kv_heads, head_dim, dtype, num_entries=6, num_tokens=9)
    step = made.step
    frequencies, cos, sin = angles(head_dim, 200)
    width = (num_heads + 2 * num_kv_heads) * head_dim
    split_k_partials = torch.randn(num_split_k_partials, step.num_tokens, width).to(
        dtype if num_split_k_partials == 1 else torch.float32
    )
    split_k_partials[:, ~made.live] = torch.nan
    norms = (1 + 0.1 * torch.randn(head_dim), 1 + 0.1 * torch.randn(head_dim), EPS) if normed else None
    queries = torch.full((step.num_tokens, num_heads * head_dim), -7.0, dtype=dtype)
    if quantized:
        written = in_8_bits(made.keys), in_8_bits(made.values)
        before = [cache.clone() for cache in written]
        center = None if normed else 20 * torch.randn(num_kv_heads, head_dim)
        rotary_write(queries, split_k_partials, cos, sin, step, *written, norms, center)
        check_codes(written, before, split_k_partials, step, made.live, frequencies, norms, center)
        turned, *_ = heads_reference(
            split_k_partials[:, made.live], step.positions[made.live], frequencies, num_kv_heads, norms
        )
        spread = turned @ hadamard_reference(head_dim)
        off = (queries[made.live].view(spread.shape).double() - spread).abs()
        assert off.le(TOLERANCES[dtype] * (1e-2 + spread.abs()) + 1e-5).all()
        assert (queries[~made.live] == -7).all()
        return
    keys, values = torch.full_like(made.keys, -7.0), torch.full_like(made.values, -7.0)

    rotary_write(queries, split_k_partials, cos, sin, step, keys, values, norms)

    live = made.live
    expected = heads_reference(split_k_partials[:, live], step.positions[live], frequencies, num_kv_heads, norms)
    blocks, offsets = step.slots[live] // BLOCK_SIZE, step.slots[live] % BLOCK_SIZE
    got = queries[live].view(int(live.sum()), num_heads, head_dim), keys[blocks, :, offsets], values[blocks, :, offsets]
    tolerance = TOLERANCES[dtype]
    for ours, reference in zip(got, expected, strict=True):
        assert (ours.double() - reference).abs().le(tolerance * (1e-2 + reference.abs()) + 1e-5).all()
    assert (queries[~live] == -7).all()
    for cache in (keys, values):
        cache[blocks, :, offsets] = -7
        assert (cache == -7).all(), "a slot without a token was written"


def check_codes(
    written: tuple[Tensor, Tensor],
    before: list[Tensor],
    split_k_partials: Tensor,
    step: StepArrays,
    live: Tensor,
    frequencies: Tensor,
    norms: HeadNorms | None,
    center: Tensor | None,
) -> None:
    """Codes and scales of the live tokens are those of the formula in float64, and nothing else was written. Keys have
    gone through the Hadamard transform."""
    num_kv_heads = written[0].shape[1]
    _, *expected = heads_reference(split_k_partials[:, live], step.positions[live], frequencies, num_kv_heads, norms)
    if center is not None:
        expected[0] = expected[0] - center.double()
    expected[0] = expected[0] @ hadamard_reference(2 * len(frequencies))
    blocks, offsets = step.slots[live] // BLOCK_SIZE, step.slots[live] % BLOCK_SIZE
    for cache, old, numbers in zip(written, before, expected, strict=True):
        (codes, scales), (old_codes, old_scales) = codes_and_scales(cache), codes_and_scales(old)
        made = codes[blocks, :, offsets].double(), scales[blocks, :, offsets].double()
        tops = numbers.abs().amax(-1) / 127
        assert (made[1] >= tops * (1 - 1e-6)).all() and (made[1] <= tops * (1 + 2**-7 + 1e-6)).all()
        assert (made[0] * made[1][..., None] - numbers).abs().le(made[1][..., None] * 0.501).all()
        codes[blocks, :, offsets], scales[blocks, :, offsets] = (
            old_codes[blocks, :, offsets],
            old_scales[blocks, :, offsets],
        )
        assert torch.equal(cache, old), "a slot without a token was written"
