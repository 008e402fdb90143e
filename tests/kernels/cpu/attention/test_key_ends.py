"""Tokens of the CPU library that see the keys before an end of their own: whole texts, spans inside causal text, and
ends anywhere."""

import ctypes

import numpy as np
import pytest

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import KVType
from pipeline.kernels.step_inputs import BLOCK_SIZE
from tests.kernels.cpu.attention import test_shared_prefixes as shared
from tests.kernels.cpu.attention.test_native_attention import (
    ENTRIES,
    EVERYTHING,
    NUM_TOKENS,
    SHAPES,
    SHAPES_8,
    Attention,
    Case,
    assert_attends,
    case_of,
    reference,
)
from tests.kernels.cpu.attention.test_unseen_memory import SOME_SHAPES, form_of, same_bits
from tests.kernels.cpu.quantized import random
from tests.kernels.cpu.recording import recording

Ends = list[np.ndarray]
"""Of each entry, the key ends of its tokens [count]."""


def whole() -> Ends:
    """As an encoder has it."""
    return [np.full(count, start + count) for _, start, count in EVERYTHING]


def spans(seed: int) -> Ends:
    """Causal text with spans whose tokens see all of the span, as images have it."""
    rng, ends = np.random.default_rng(seed), []
    for _, start, count in EVERYTHING:
        own = np.arange(start, start + count) + 1
        first, last = np.sort(rng.integers(0, count + 1, 2))
        own[first:last] = start + last
        ends.append(own)
    return ends


def anywhere(case: Case, seed: int) -> Ends:
    """Any key after the first one of the window, before the token's own too."""
    rng, ends = np.random.default_rng(seed), []
    for _, start, count in EVERYTHING:
        positions = np.arange(start, start + count)
        firsts = np.maximum(positions - case.window + 1, 0) if case.window else 0 * positions
        ends.append(rng.integers(firsts + 1, start + count + 1))
    return ends


def kinds(case: Case) -> list[Ends]:
    return [whole(), spans(1), anywhere(case, 2), anywhere(case, 3)]


def limited(ends: Ends, window_after: int) -> Ends:
    """What the window leaves of them."""
    if window_after < 0:
        return ends
    positions = [np.arange(start, start + count) for _, start, count in EVERYTHING]
    return [np.minimum(end, at + 1 + window_after) for end, at in zip(ends, positions, strict=True)]


@pytest.fixture(
    scope="module",
    params=[*(shape for shape in SHAPES), *((*shape, KVType.INT8) for shape in SHAPES_8)],
    ids=lambda shape: "-".join(map(str, shape)),
)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


def test_a_token_sees_the_keys_before_its_end(library: ctypes.CDLL, is_emulated: bool, case: Case) -> None:
    """With symmetric windows, and with some that see fewer keys after a token than before it."""
    for window_after in (-1, case.window - 1, 3) if case.window else (-1,):
        with recording(library, threads=2, tokens=NUM_TOKENS, is_causal=False) as r:
            attention = Attention(r, case, True, window_after=window_after)
            before = attention.memory.copy()
            for ends in kinds(case)[: 2 if is_emulated else None]:
                made = attention.run(EVERYTHING, np.concatenate(ends))
                np.testing.assert_array_equal(attention.memory, before)
                for entry, out, seen in zip(EVERYTHING, made, limited(ends, window_after), strict=True):
                    assert_attends(r, case, out, *reference(case, *entry, r, seen), floats=True)


def test_a_token_has_the_same_bits_in_every_batch(library: ctypes.CDLL, is_emulated: bool, case: Case) -> None:
    """Alone and in a batch, on one to three threads, a text as a whole and token by token."""
    for ends in (whole(), anywhere(case, 4)):
        results = []
        for threads in (2,) if is_emulated else (1, 2, 3):
            with recording(library, threads=threads, tokens=NUM_TOKENS, is_causal=False) as r:
                attention = Attention(r, case)
                results.append(attention.run(EVERYTHING, np.concatenate(ends)))
                results.append(attention.run(EVERYTHING[::-1], np.concatenate(ends[::-1]))[::-1])
                results.append([attention.run([one], end)[0] for one, end in zip(EVERYTHING, ends, strict=True)])
                entry, start, count = EVERYTHING[6]
                tokens = [attention.run([(entry, start + i, 1)], ends[6][i : i + 1])[0] for i in range(count)]
                np.testing.assert_array_equal(np.concatenate(tokens), results[0][6])
        for result in results[1:]:
            same_bits(result, results[0])


def test_ends_of_causal_text_change_no_bit(library: ctypes.CDLL, case: Case) -> None:
    """Nor does the text around a span."""
    with recording(library, threads=2, tokens=NUM_TOKENS) as r:
        expected = Attention(r, case).run(EVERYTHING)
    with recording(library, threads=2, tokens=NUM_TOKENS, is_causal=False) as r:
        attention = Attention(r, case)
        own = [np.arange(start, start + count) + 1 for _, start, count in EVERYTHING]
        same_bits(attention.run(EVERYTHING, np.concatenate(own)), expected)
        some = spans(5)
        found = attention.run(EVERYTHING, np.concatenate(some))
    assert any((end != mine).any() for end, mine in zip(some, own, strict=True))
    for one, other, end, mine in zip(found, expected, some, own, strict=True):
        assert one[end == mine].tobytes() == other[end == mine].tobytes()
        assert (one[end != mine] != other[end != mine]).any(-1).all()


@pytest.mark.parametrize("shape", [shared.SHAPES[i] for i in (0, 3, 5)], ids=str)
def test_rows_that_share_blocks_see_the_keys_before_their_ends(
    library: ctypes.CDLL, is_emulated: bool, shape: tuple[int, int, int, int]
) -> None:
    """Ends are inside the blocks that they share, too."""
    memory, queries = shared.memory_of(shape, 1), shared.queries_of(shape, 2)
    window = shape[3]
    for seed in range(1 if is_emulated else 4):
        tree = shared.grow(seed + 70)
        rng = np.random.default_rng(seed)
        ends = []
        for start, count in tree.entries:
            positions = np.arange(start, start + count)
            ends.append(rng.integers(np.maximum(positions - window + 2, 1) if window else 1, start + count + 1, count))
        sizes = {"threads": 2, "tokens": shared.NUM_TOKENS, "rows": shared.NUM_ROWS, "blocks": shared.MOST_BLOCKS}
        with recording(library, is_causal=False, **sizes) as r:
            attention = shared.Attention(r, shape, memory, queries)
            every = range(len(tree.starts))
            together = attention.run(tree, tree.tables, every, np.concatenate(ends))
            alone = [attention.run(tree, tree.tables, [i], ends[i])[0] for i in every]
        shared.assert_same(together, alone)


@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("shape", SOME_SHAPES[:5], ids=lambda shape: "-".join(map(str, shape)))
def test_what_a_token_does_not_see_does_not_reach_it(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], kv_type: KVType
) -> None:
    """A later or an earlier token of its own text that is not finite, and memory behind its text."""
    case = case_of(*shape, kv_type)
    ends = anywhere(case, 6)
    bad = {5: 90, 6: 37, 7: 41, 8: 128, 9: 63}  # the place of the token in the sequence of an entry
    results = []
    for stale in ((0.0,), (np.nan,)):
        with recording(library, threads=2, tokens=NUM_TOKENS, is_causal=False) as r:
            attention = Attention(r, case, True, stale, form_of(r, case))
            results.append(attention.run(EVERYTHING, np.concatenate(ends)))
            for entry, position in bad.items() if stale != (0.0,) else ():
                block, at = attention.tables[entry, [position // BLOCK_SIZE]], np.array([position % BLOCK_SIZE])
                keys, values = (one[entry][[position]].copy() for one in (case.keys, case.values))
                keys[..., 3], values[..., 3] = np.nan, np.nan
                with np.errstate(invalid="ignore"):  # 8 bits get a scale that is NaN
                    attention.kv.write(block, at, keys, values)
            results.append(attention.run(EVERYTHING, np.concatenate(ends)))
    assert all(np.isfinite(out).all() for out in results[0])
    same_bits(results[2], results[0])
    num_seen = 0
    for (entry, start, count), one, other, end in zip(EVERYTHING, results[3], results[0], ends, strict=True):
        positions, position = np.arange(start, start + count), bad.get(entry, 2**30)
        sees = (position < end) & ((position > positions - case.window) if case.window else True)
        assert one[~sees].tobytes() == other[~sees].tobytes()
        assert np.isnan(one[sees]).any(-1).all()
        num_seen += sees.sum()
    assert num_seen


@pytest.mark.parametrize("shape", [SHAPES[i] for i in (1, 2, 9)], ids=lambda shape: "-".join(map(str, shape)))
def test_scores_are_biased_by_the_distance_of_keys(library: ctypes.CDLL, shape: tuple[int, int, int, int]) -> None:
    """Slopes are such biases. Distances beyond the table have its last ones, and the sign counts."""
    case, reach = case_of(*shape), 210
    heads = case.kv_heads * case.group
    distances = np.arange(-reach, reach + 1)
    slopes = np.float32(2.0) ** -np.arange(heads)
    of_slopes = -slopes[:, None] * np.abs(distances)
    table = random(9, heads, 2 * 5 + 1, scale=2)
    far = table[:, distances.clip(-5, 5) + 5]
    future = np.where(distances > 0, np.float32(-1e9), np.float32(0))[None].repeat(heads, 0)

    def run(biases: np.ndarray | None, slopes: np.ndarray | None = None, *, is_causal: bool = False) -> Ends:
        with recording(library, threads=2, tokens=NUM_TOKENS, is_causal=is_causal) as r:
            form = native.NativeScoreOptions()
            if biases is not None:
                form.biases, form.reach = r.floats(biases.astype(np.float32)).ctypes.data, biases.shape[1] // 2
            if slopes is not None:
                form.slopes = r.floats(slopes).ctypes.data
            return Attention(r, case, True, (0.0,), form).run(EVERYTHING)

    same_bits(run(of_slopes), run(None, slopes))
    same_bits(run(table), run(far))
    same_bits(run(future), run(None, is_causal=True))
    plain = run(None)
    assert all((one != other).any() for one, other in zip(run(table), plain, strict=True) if len(one) > 1)


def test_the_entries_have_spans_and_ends_before_their_tokens() -> None:
    case = case_of(*SHAPES[0])
    positions = [np.arange(start, start + count) for start, count in ENTRIES]
    assert any((end <= at).any() for end, at in zip(anywhere(case, 2), positions, strict=True))
    assert any((end > at + 1).any() for end, at in zip(spans(1), positions, strict=True))
