"""The launch for decode-only steps, against the two launches that it replaces."""

import random

import pytest
import torch

from pipeline.kernels.attention.hadamard import hadamard_reference
from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.decode import attend_decode
from pipeline.kernels.triton.rotary import NO_GROWTH, QueryGrowth
from tests.kernels.triton.attention.test_attention import FORMS, POISON, SINKS, SMALL, tasks_for
from tests.kernels.triton.attention.test_rotary import EPS, angles, growth_of, heads_reference
from tests.kernels.triton.steps import attention_reference, dequantized, in_8_bits, make_step


def check(
    entries: list[tuple[int, int]],
    heads: tuple[int, int, int],
    window: int | None = None,
    *,
    num_split_k_partials: int = 1,
    normed: bool = False,
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    small: bool = True,
    tolerance: float = 5e-5,
    seed: int = 0,
    quantized: bool = False,
    form: ScoreOptions | None = None,
    growth: QueryGrowth = NO_GROWTH,
) -> int:
    """Returns the number of splits inside of units."""
    num_heads, num_kv_heads, head_dim = heads
    num = len(entries) + padding
    made = make_step(entries, num_kv_heads, head_dim, dtype, num_entries=num, num_tokens=num, window=window, seed=seed)
    step, live = made.step, made.live
    frequencies, cos, sin = angles(head_dim, 2000)
    split_k_partials = torch.randn(num_split_k_partials, num, (num_heads + 2 * num_kv_heads) * head_dim)
    split_k_partials = split_k_partials.to(dtype) if num_split_k_partials == 1 else split_k_partials
    split_k_partials[:, ~live] = torch.nan
    norms = (1 + 0.1 * torch.randn(head_dim), 1 + 0.1 * torch.randn(head_dim), EPS) if normed else None
    queries, new_keys, new_values = heads_reference(split_k_partials, step.positions, frequencies, num_kv_heads, norms)
    queries *= growth_of(step.positions, growth)
    blocks, offsets = step.slots[live] // BLOCK_SIZE, step.slots[live] % BLOCK_SIZE

    center = None
    if quantized:
        center = None if normed else 5 * torch.randn(num_kv_heads, head_dim)
        matrix = hadamard_reference(head_dim)
        queries = queries @ matrix
        new_keys = (new_keys - (0 if center is None else center.double())) @ matrix

    # The slots of the new tokens are NaN until the launch has written them.
    made.keys[blocks, :, offsets] = made.values[blocks, :, offsets] = torch.nan
    expected_keys, expected_values = made.keys.double(), made.values.double()
    expected_keys[blocks, :, offsets], expected_values[blocks, :, offsets] = new_keys[live], new_values[live]
    if quantized:
        made.keys, made.values = in_8_bits(made.keys), in_8_bits(made.values)
        expected_keys, expected_values = (
            dequantized(in_8_bits(each.float())).double() for each in (expected_keys, expected_values)
        )
    sinks = SINKS if form is not None and form.has_sinks else None
    expected = attention_reference(
        queries.flatten(1).nan_to_num(), expected_keys, expected_values, step, num_heads, window, form, sinks
    )

    tasks = tasks_for(heads, window, SMALL if small else None, dtype, form)
    tasks.plan(step, one_each=True)
    out = torch.full((num, num_heads * head_dim), POISON, dtype=dtype)
    attend_decode(out, split_k_partials, cos, sin, step, made.keys, made.values, tasks, norms, center, sinks, growth)

    assert (out[~live] == POISON).all()
    assert torch.allclose(out[live].double(), expected.flatten(1)[live], rtol=tolerance, atol=tolerance)
    for ours, reference in ((made.keys, expected_keys), (made.values, expected_values)):
        # A number at the border of two codes may get either.
        code = reference.abs().amax(-1, keepdim=True) / 127 * 1.01 if quantized else torch.zeros(1)
        off = (dequantized(ours).double() - reference).abs()
        assert (off.isnan() == reference.isnan()).all()
        assert (off <= tolerance * (1 + reference.abs()) + code)[~off.isnan()].all()
        assert off[~off.isnan()].gt(tolerance * (1 + reference.abs()[~off.isnan()])).double().mean() < 0.001
    return int((tasks.lists[0].cuts[:, 5] >= 0).sum())


def test_short_rows() -> None:
    assert check([(0, 1), (15, 1), (16, 1), (33, 0), (17, 1)], (4, 2, 16), padding=2) == 0


def test_long_rows_are_split() -> None:
    assert check([(200, 1), (0, 1)], (3, 1, 16), num_split_k_partials=3, normed=True, padding=1) > 0


def test_windows() -> None:
    check([(100, 1), (0, 1), (19, 1), (20, 1)], (2, 1, 24), 20, num_split_k_partials=2)
    assert check([(300, 1), (1, 1)], (2, 1, 16), 150) > 0


def test_a_split_before_the_last_token() -> None:
    """The tile of the last program holds only the new token."""
    for start in (79, 80):
        check([(start, 1)], (2, 1, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_with_tiles_of_a_gpu(dtype: torch.dtype) -> None:
    check([(500, 1)], (3, 1, 80), dtype=dtype, num_split_k_partials=2, small=False, tolerance=0.03)


def test_keys_and_values_in_8_bits() -> None:
    entries = [(200, 1), (0, 1), (15, 1), (16, 1), (33, 0)]
    check(entries, (6, 2, 24), padding=2, quantized=True, normed=True, num_split_k_partials=2, tolerance=2e-4)
    check([(300, 1), (1, 1)], (2, 1, 16), 150, quantized=True, tolerance=2e-4)
    check([(500, 1)], (3, 1, 80), dtype=torch.bfloat16, small=False, tolerance=0.03, quantized=True)


@pytest.mark.parametrize("name", FORMS)
def test_other_scores(name: str) -> None:
    assert check([(200, 1), (0, 1), (33, 0), (40, 1)], (6, 2, 16), padding=1, form=FORMS[name]) > 0
    check([(90, 1), (10, 1)], (6, 2, 16), 33, form=FORMS[name])


def test_queries_that_grow_with_their_positions() -> None:
    check([(100, 1), (15, 1), (16, 1), (0, 1)], (4, 2, 16), growth=(0.3, 16))
    check([(100, 1), (15, 1)], (4, 2, 16), growth=(0.3, 16), quantized=True, tolerance=2e-4)


@pytest.mark.parametrize("seed", range(2))
def test_random_steps(seed: int) -> None:
    check_random(random.Random(seed))


def check_random(chance: random.Random) -> None:
    num_kv_heads = chance.choice([1, 2, 3])
    check(
        [
            (chance.choice([0, 15, 16, chance.randint(0, 60), chance.randint(0, 250)]), chance.choice([0, 1, 1, 1]))
            for _ in range(chance.randint(1, 6))
        ],
        (num_kv_heads * chance.choice([1, 2, 3, 7]), num_kv_heads, chance.choice([16, 24, 32])),
        chance.choice([None, None, 1, 16, 40, 300]),
        num_split_k_partials=chance.choice([1, 2, 4]),
        normed=chance.random() < 0.5,
        padding=chance.choice([0, 1, 5]),
        seed=chance.randint(0, 2**30),
    )
