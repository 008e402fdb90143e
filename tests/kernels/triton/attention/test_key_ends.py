"""Attention of tokens that see the keys before an end of their own, against the formula in float64: whole texts, spans
in causal text, and ends anywhere. Keys that no token of a row sees are NaN."""

import random

import pytest
import torch

from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.kernels.triton.attention.prefill import attend
from tests.kernels.triton.attention.test_attention import POISON, check, num_inner_cuts, tasks_for
from tests.kernels.triton.steps import MadeStep, in_8_bits, make_step

Entries = list[tuple[int, int]]


def whole(entries: Entries, window: int | None, chance: random.Random) -> list[int]:
    return [start + count for start, count in entries for _ in range(count)]


def spans(entries: Entries, window: int | None, chance: random.Random) -> list[int]:
    """The tokens of a span see all of it."""
    ends: list[int] = []
    for start, count in entries:
        first, last = sorted(chance.randint(0, count) for _ in range(2))
        ends += [start + (last if first <= i < last else i + 1) for i in range(count)]
    return ends


def anywhere(entries: Entries, window: int | None, chance: random.Random) -> list[int]:
    """Behind the first key of a token's window."""
    return [
        chance.randint(max(0, position - (window or 2**30) + 1) + 1, start + count)
        for start, count in entries
        for position in range(start, start + count)
    ]


KINDS = [whole, spans, anywhere]


def spoil_unseen(made: MadeStep, window: int | None, window_after: int | None) -> None:
    step = made.step
    unseen = torch.ones(made.keys.shape[0], BLOCK_SIZE, dtype=torch.bool)
    assert step.key_ends is not None
    for entry in range(step.num_entries):
        for token in range(int(step.offsets[entry]), int(step.offsets[entry]) + int(step.counts[entry])):
            position, end = int(step.positions[token]), int(step.key_ends[token])
            first = 0 if window is None else max(0, position - window + 1)
            at = torch.arange(first, end if window_after is None else min(end, position + 1 + window_after))
            unseen[step.blocks[int(step.rows[entry]), at // BLOCK_SIZE].long(), at % BLOCK_SIZE] = False
    for memory in (made.keys, made.values):
        memory.transpose(1, 2)[unseen] = torch.nan


def made_with(
    kind: object, entries: Entries, heads: tuple[int, int, int], window: int | None, after: int | None, **how: int
) -> MadeStep:
    assert callable(kind)
    ends = torch.tensor(kind(entries, window, random.Random(7)))
    made = make_step(entries, *heads[1:], torch.float32, window=window, key_ends=ends, **how)
    spoil_unseen(made, window, after)
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "window", "after", "entries", "padding"),
    [
        ((4, 2, 16), None, None, [(0, 1), (0, 17), (0, 5), (0, 70)], 3),
        ((4, 2, 16), None, None, [(300, 1), (31, 0), (100, 20), (15, 50)], 0),
        ((9, 3, 16), 20, 19, [(0, 60), (150, 3), (40, 33)], 0),
        ((9, 3, 16), 33, None, [(0, 60), (150, 3), (40, 33)], 2),
        ((2, 1, 24), 40, 3, [(30, 60), (0, 100)], 0),
        ((2, 2, 24), 1, 0, [(50, 20), (0, 1)], 2),
    ],
)
def test_ragged_steps(
    kind: object, heads: tuple[int, int, int], window: int | None, after: int | None, entries: Entries, padding: int
) -> None:
    tokens = sum(max(count, 1) for _, count in entries)
    sizes = {"num_entries": len(entries) + padding, "num_tokens": tokens + 2 * padding}
    made = made_with(kind, entries, heads, window, after, **sizes)
    check(made, tasks_for(heads, window, window_after=after), num_launches=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("window", "after"), [(None, None), (60, 59), (200, None)])
def test_long_texts_are_split(kind: object, window: int | None, after: int | None) -> None:
    """Cuts behind the keys of a query block leave programs without tiles."""
    tasks = tasks_for((4, 1, 16), window, window_after=after)
    made = made_with(kind, [(0, 24), (100, 24), (400, 9)], (4, 1, 16), window, after)
    check(made, tasks)
    assert sum(num_inner_cuts(tasks)) > 0


def test_ends_of_causal_text_give_the_same_numbers() -> None:
    for window in (None, 40):
        entries, outs = [(0, 60), (150, 3), (40, 33)], []
        own = torch.tensor([start + i + 1 for start, count in entries for i in range(count)])
        queries = torch.randn(96, 64)
        for ends in (None, own):
            made = make_step(entries, 2, 16, torch.float32, window=window, key_ends=ends)
            tasks = tasks_for((4, 2, 16), window)
            tasks.plan(made.step)
            out = torch.full_like(queries, POISON)
            attend(out, queries, made.keys, made.values, made.step, tasks)
            outs.append(out)
        torch.testing.assert_close(*outs, rtol=1e-5, atol=2e-6)  # programs may share other units


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_in_8_bits(kind: object) -> None:
    entries = [(0, 70), (100, 20), (31, 0), (15, 5)]
    made = made_with(kind, entries, (6, 2, 24), 33, 20)
    made.keys, made.values = in_8_bits(made.keys), in_8_bits(made.values)
    check(made, tasks_for((6, 2, 24), 33, window_after=20), num_launches=1, dtype=torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # the interpreter multiplies in NumPy
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_is_not_finite_reaches_only_those_that_see_it(value: float) -> None:
    entries, heads = [(0, 60), (60, 20), (100, 40)], (4, 2, 16)
    made, tasks = made_with(anywhere, entries, heads, 50, 30), tasks_for(heads, 50, window_after=30)
    step = made.step
    assert step.key_ends is not None
    tasks.plan(step)
    bad = [int(step.offsets[entry]) + count // 2 for entry, (_, count) in enumerate(entries)]
    queries, outs = torch.randn(step.num_tokens, heads[0] * heads[2]), []
    for is_spoilt in (False, True):
        for token in bad if is_spoilt else []:
            slot = int(step.slots[token])
            made.values[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, 5] = value
            made.keys[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE, 3] = value
        out = torch.full_like(queries, POISON)
        attend(out, queries, made.keys, made.values, step, tasks)
        outs.append(out)
    num_seen = 0
    for entry, (_, count) in enumerate(entries):
        begin, position = int(step.offsets[entry]), int(step.positions[bad[entry]])
        for token in range(begin, begin + count):
            own = int(step.positions[token])
            end = min(int(step.key_ends[token]), own + 31)
            if position < end and position > own - 50:
                assert outs[1][token].isnan().any()
                num_seen += 1
            else:
                assert torch.equal(outs[1][token], outs[0][token])
    assert num_seen
