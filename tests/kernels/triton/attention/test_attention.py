"""Attention against its formula in float64: every mixture of rows, chunks, windows and splits."""

import dataclasses
import random

import pytest
import torch

from pipeline.kernels.attention.paged_attention import ScoreOptions
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.prefill import attend
from pipeline.kernels.triton.attention.tasks import NO_CHUNKS, AttentionTasks, Scratch, Tile, Tiles
from tests.kernels.triton.steps import MadeStep, attention_reference, in_8_bits, make_step

CPU = torch.device("cpu")
NARROW = Tile(16, 16, 4, 2, 1, 2, 1, 512)
SMALL = Tiles(NARROW, NARROW, Tile(32, 32, 4, 2, 1, 2, 1, 512), Tile(64, 32, 4, 2, 1, 2, 1, 512))
"""Small, so that short units are split."""
POISON = -7.0


FORMS = {
    "scale, cap": ScoreOptions(scale=0.4, softcap=1.5),
    "slopes": ScoreOptions(slopes=torch.tensor([0.5, 0.05, 0.2, 0.01, 0.3, 0.1])),
    "sinks": ScoreOptions(has_sinks=True),
    "all": ScoreOptions(0.3, 2.0, torch.tensor([0.5, 0.05, 0.2, 0.01, 0.3, 0.1]), has_sinks=True),
}
SINKS = torch.tensor([1.0, -2.0, 3.0, 0.0, 6.0, -0.5])
"""Of the six heads of `FORMS`."""


def tasks_for(
    heads: tuple[int, int, int],
    window: int | None,
    tiles: Tiles | None = SMALL,
    dtype: torch.dtype = torch.float32,
    form: ScoreOptions | None = None,
    window_after: int | None = None,
) -> AttentionTasks:
    return AttentionTasks(32, 4096, *heads, dtype, CPU, window, tiles=tiles, form=form, window_after=window_after)


def num_inner_cuts(tasks: AttentionTasks) -> list[int]:
    return [int((one.cuts[:, 5] >= 0).sum()) for one in tasks.lists]


def check(
    made: MadeStep,
    tasks: AttentionTasks,
    *,
    tolerance: float = 2e-6,
    num_launches: int = 2,
    plan: bool = True,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Twice, as for two layers: the second launch finds the scratch memory of the first."""
    step = made.step
    queries = torch.randn(step.num_tokens, tasks.num_heads * tasks.head_dim).to(dtype or made.keys.dtype)
    queries[~made.live] = torch.nan
    if plan:
        tasks.plan(step, one_each=int(step.counts.max()) <= 1)
    sinks = SINKS if tasks.form.has_sinks else None
    form = tasks.window, tasks.form, sinks, tasks.window_after
    expected = attention_reference(queries, made.keys, made.values, step, tasks.num_heads, *form)
    outs = []
    for _ in range(num_launches):
        out = torch.full_like(queries, POISON)
        attend(out, queries, made.keys, made.values, step, tasks, sinks)
        assert (out[~made.live] == POISON).all()
        error = out[made.live].double() - expected.flatten(1)[made.live]
        assert error.abs().max() <= tolerance if made.live.any() else True
        outs.append(out)
    assert all(torch.equal(out, outs[0]) for out in outs)
    return outs[0]


@pytest.mark.parametrize(
    ("heads", "window", "entries", "num_entries", "num_tokens"),
    [
        ((4, 2, 16), None, [(0, 1)], 1, 1),
        ((4, 2, 16), None, [(300, 1), (0, 1), (31, 0), (16, 1)], 8, 8),
        ((9, 3, 16), 20, [(150, 1), (0, 1), (20, 1), (31, 0)], 4, 4),
        ((9, 3, 16), None, [(100, 1), (60, 8), (31, 0), (15, 50)], 6, 70),
        ((4, 2, 16), 33, [(100, 5), (0, 40), (31, 1), (32, 0)], 4, 47),
        ((16, 1, 16), None, [(50, 3), (0, 2)], 2, 5),
        ((20, 1, 16), None, [(50, 3), (0, 2), (90, 1)], 3, 3 + 2 + 1),
        ((2, 2, 24), 1, [(50, 20), (0, 1)], 2, 24),
        # A tile of 32 keys that all queries see except the first token, and one that all see except the last.
        ((4, 2, 16), None, [(30, 16), (62, 16)], 2, 32),
        ((4, 2, 16), 47, [(64, 16)], 1, 16),
    ],
)
def test_ragged_steps(
    heads: tuple[int, int, int],
    window: int | None,
    entries: list[tuple[int, int]],
    num_entries: int,
    num_tokens: int,
) -> None:
    made = make_step(
        entries, heads[1], heads[2], torch.float32, num_entries=num_entries, num_tokens=num_tokens, window=window
    )
    check(made, tasks_for(heads, window, SMALL if heads[0] // heads[1] <= 16 else None), num_launches=1)


def test_a_step_of_padding() -> None:
    tasks = tasks_for((4, 2, 16), None)
    check(make_step([], 2, 16, torch.float32, num_entries=3, num_tokens=3), tasks, num_launches=1)
    check(make_step([(70, 0), (3, 0)], 2, 16, torch.float32, num_entries=3, num_tokens=9), tasks, num_launches=1)


def test_one_long_row_is_split_over_all_programs() -> None:
    tasks = tasks_for((2, 1, 16), None)
    made = make_step([(500, 1)], 1, 16, torch.float32)
    check(made, tasks)
    assert num_inner_cuts(tasks) == [tasks.lists[0].num_programs - 1]


def test_one_long_chunk_is_split() -> None:
    tasks = tasks_for((4, 1, 16), None)
    made = make_step([(100, 24)], 1, 16, torch.float32)
    check(made, tasks)
    assert sum(num_inner_cuts(tasks)) > 0


@pytest.mark.parametrize("window", [None, 50])
def test_short_and_long_chunks_have_separate_lists(window: int | None) -> None:
    tasks = tasks_for((4, 2, 16), window)
    made = make_step(
        [(40, 70), (3, 1), (20, 20), (7, 8)], 2, 16, torch.float32, num_tokens=NO_CHUNKS + 1, window=window
    )
    check(made, tasks, num_launches=1)
    counts = [one.entries[: one.cuts[-1, 0], 2].tolist() for one in tasks.lists]
    assert counts == [[1, 8], [20], [70]]


def test_many_equal_rows_are_not_split() -> None:
    tasks = tasks_for((2, 1, 16), None)
    made = make_step([(40, 1)] * 12, 1, 16, torch.float32)
    check(made, tasks, num_launches=1)
    assert num_inner_cuts(tasks) == [0]
    units = tasks.lists[0].cuts[:, 4]
    assert units.diff().max() == 2, "12 units, 6 programs"


def test_each_short_unit_has_its_own_program() -> None:
    """One short row of a small model: processing its heads one after the other would take several times as long."""
    tasks = tasks_for((6, 3, 16), None, None)
    check(make_step([(40, 1)], 3, 16, torch.float32), tasks, num_launches=1)
    assert tasks.lists[0].cuts[:, 4].diff().max() == 1
    check(make_step([(2, 1), (0, 1), (30, 1)], 1, 16, torch.float32), tasks_for((2, 1, 16), None, None), num_launches=1)


def test_every_step_has_a_new_plan() -> None:
    """The arrival counts of a shared unit continue from layer to layer, and restart with the next plan."""
    tasks = tasks_for((2, 1, 16), None)
    for start in (200, 70):
        made = make_step([(start, 1), (start // 3, 1)], 1, 16, torch.float32)
        tasks.lists[0].arrivals.fill_(1)  # a plan with other splits may leave these
        check(made, tasks)
        assert sum(num_inner_cuts(tasks)) > 0


def test_windows_share_scratch() -> None:
    scratch = Scratch(SMALL, 16, CPU)
    made = make_step([(150, 1), (50, 1)], 1, 16, torch.float32)
    both = [
        AttentionTasks(4, 4096, 2, 1, 16, torch.float32, CPU, window, scratch=scratch, tiles=SMALL)
        for window in (None, 90)
    ]
    for tasks in both:
        tasks.plan(made.step, one_each=True)
    for tasks in both:
        check(made, tasks, plan=False, num_launches=1)
        assert sum(num_inner_cuts(tasks)) > 0


@pytest.mark.parametrize("num_tokens", [3, 5])
def test_a_few_query_tokens(num_tokens: int) -> None:
    made = make_step([(120, num_tokens), (70, num_tokens)], 1, 16, torch.float32)
    check(made, tasks_for((4, 1, 16), None), num_launches=1)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 64), (torch.float16, 80)])
def test_half_precision_with_tiles_of_a_gpu(dtype: torch.dtype, head_dim: int) -> None:
    made = make_step([(600, 1), (5, 1), (50, 20)], 1, head_dim, dtype)
    # The interpreter truncates, a GPU rounds.
    check(made, tasks_for((3, 1, head_dim), None, None, dtype), tolerance=0.02, num_launches=1)


@pytest.mark.parametrize("window", [None, 33])
def test_keys_and_values_in_8_bits(window: int | None) -> None:
    for heads, tiles, dtype in (((6, 2, 24), SMALL, torch.float32), ((3, 1, 64), None, torch.bfloat16)):
        entries = [(300, 1), (16, 1), (100, 5), (15, 50), (31, 0)]
        made = make_step(entries, heads[1], heads[2], dtype, num_entries=6, num_tokens=70, window=window)
        made.keys, made.values = in_8_bits(made.keys), in_8_bits(made.values)
        tolerance = 2e-6 if dtype == torch.float32 else 0.02
        check(made, tasks_for(heads, window, tiles, dtype), tolerance=tolerance, num_launches=1, dtype=dtype)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("name", FORMS)
def test_other_scores(name: str, window: int | None) -> None:
    """Rows that are split too, in tiles with and without a mask."""
    tasks = tasks_for((6, 2, 16), window, form=FORMS[name])
    made = make_step([(200, 1), (31, 0), (90, 3), (15, 40), (0, 1)], 2, 16, torch.float32, num_tokens=60, window=window)
    check(made, tasks, tolerance=5e-6, num_launches=1)
    assert sum(num_inner_cuts(tasks)) > 0


@pytest.mark.parametrize("seed", range(2))
def test_random_steps(seed: int) -> None:
    check_random(random.Random(seed))


def check_random(chance: random.Random) -> None:
    num_kv_heads = chance.choice([1, 2, 3])
    heads = (num_kv_heads * chance.choice([1, 2, 3, 4, 7]), num_kv_heads, chance.choice([16, 24, 32]))
    window = chance.choice([None, None, 1, 5, 16, 40, 100])
    single = chance.random() < 0.4
    entries = []
    for _ in range(chance.randint(1, 6)):
        count = 1 if single else chance.choice([0, 1, 1, 2, 5, 8, 17, chance.randint(1, 70)])
        entries.append((chance.choice([0, 15, 16, chance.randint(0, 60), chance.randint(0, 300)]), count))
    tokens = sum(max(count, 1) for _, count in entries)
    narrow = dataclasses.replace(
        SMALL.narrow,
        programs=chance.choice([1, 2, 4]),
        min_tiles=chance.choice([2, 3]),
        least_part=chance.choice([1, 2]),
    )
    tiles = dataclasses.replace(
        SMALL,
        few=narrow,
        narrow=narrow,
        middle=dataclasses.replace(SMALL.middle, least_part=chance.choice([1, 2]), keys=chance.choice([16, 32])),
    )
    padding = chance.choice([0, 0, 1, 5])
    made = make_step(
        entries,
        heads[1],
        heads[2],
        torch.float32,
        num_entries=len(entries) + padding,
        num_tokens=tokens + max(padding, 0 if single else chance.choice([0, 3, 500])),
        window=window,
        seed=chance.randint(0, 2**30),
    )
    if chance.random() < 0.3:
        made.keys, made.values = in_8_bits(made.keys), in_8_bits(made.values)
    check(made, tasks_for(heads, window, tiles), num_launches=1, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter multiplies in NumPy
@pytest.mark.parametrize("eight_bits", [False, True])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.3e38])
@pytest.mark.parametrize(
    ("heads", "window", "entries"),
    [
        ((4, 2, 16), None, [(3, 3), (60, 20), (100, 40)]),
        ((4, 2, 16), 21, [(3, 3), (60, 20), (100, 40)]),
        ((2, 1, 24), 40, [(30, 60)]),
    ],
)
def test_a_token_that_is_not_finite_reaches_only_those_that_see_it(
    heads: tuple[int, int, int], window: int | None, entries: list[tuple[int, int]], value: float, eight_bits: bool
) -> None:
    """Not the tokens before it in the same tile: others may share their blocks."""
    made, tasks = make_step(entries, heads[1], heads[2], torch.float32, window=window), tasks_for(heads, window)
    step = made.step
    tasks.plan(step, one_each=False)
    queries, outs = torch.randn(step.num_tokens, heads[0] * heads[2]), []
    bad = [int(step.offsets[entry]) + 2 * count // 3 for entry, (_, count) in enumerate(entries)]
    for is_spoilt in (False, True):
        keys, values = made.keys.clone(), made.values.clone()
        for token in bad if is_spoilt else []:
            slot = int(step.slots[token])
            values[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, 5] = value
            if value != 3.3e38:
                keys[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, 3] = value
        if eight_bits:
            keys, values = in_8_bits(keys), in_8_bits(values)
        out = torch.full_like(queries, POISON)
        attend(out, queries, keys, values, step, tasks)
        outs.append(out)
    for entry, (start, count) in enumerate(entries):
        begin = int(step.offsets[entry])
        for token in range(begin, begin + count):
            sees = token >= bad[entry] and (window is None or token - bad[entry] < window)
            if not sees:
                assert torch.equal(outs[1][token], outs[0][token]), (start, token)
            elif value != 3.3e38:
                assert outs[1][token].isnan().any()
            else:
                assert not torch.equal(outs[1][token], outs[0][token])
