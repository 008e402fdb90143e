"""What a row may not see does not reach it, whatever bits are there: the rest of a block, keys before the window, later
tokens of its own step, and a row that is NaN beside it."""

import ctypes
import math

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
    Attention,
    Case,
    case_of,
)
from tests.kernels.cpu.quantized import bf16_bits, random
from tests.kernels.cpu.recording import Recording, recording

ANYTHING = (math.nan, math.inf, -math.inf, 3.3e38)
SOME_SHAPES = [SHAPES[i] for i in (1, 2, 4, 6, 8, 9, 11)]
"""One query a head and more than one pass takes, dimensions that fill no tile, windows that begin within a block."""


def same_bits(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def form_of(r: Recording, case: Case) -> native.NativeScoreOptions:
    """Everything that can change scores."""
    heads = case.kv_heads * case.group
    slopes, sinks = (r.floats(random(seed, heads, scale=0.1)).ctypes.data for seed in (7, 8))
    return native.NativeScoreOptions(3.0, slopes, sinks)


@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("shape", SOME_SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_memory_behind_a_row_and_before_its_window_does_not_count(
    library: ctypes.CDLL, is_emulated: bool, shape: tuple[int, int, int, int], kv_type: KVType
) -> None:
    """In steps of decoding and prompt rows, and of one row alone; scores as they are, and in every form."""
    case = case_of(*shape, kv_type)
    alone = [[EVERYTHING[i]] for i in (0, 1, 4, 10)]
    for has_form in (False, True):
        results = []
        for stale in ((0.0,), *(() if is_emulated else ((value,) for value in ANYTHING)), ANYTHING):
            with recording(library, threads=2, tokens=NUM_TOKENS) as r:
                form = form_of(r, case) if has_form else None
                attention = Attention(r, case, True, stale, form)
                results.append([out for entries in (EVERYTHING, *alone) for out in attention.run(entries)])
        assert all(np.isfinite(out).all() for out in results[0])
        for found in results[1:]:
            same_bits(found, results[0])


@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("shape", SOME_SHAPES[:5], ids=lambda shape: "-".join(map(str, shape)))
@pytest.mark.parametrize("what", ["keys", "values", "both"])
def test_a_token_that_is_not_finite_reaches_only_those_that_see_it(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], kv_type: KVType, what: str
) -> None:
    """Not the tokens before it in its own step, whose blocks others may share, nor those whose window has left it."""
    case = case_of(*shape, kv_type)
    bad = {5: 90, 6: 37, 7: 41, 8: 128, 9: 63}  # the place of the token in the sequence of an entry
    entries = [{5: (5, 140, 61), 7: (7, 30, 43)}.get(entry[0], entry) for entry in EVERYTHING]
    with recording(library, threads=2, tokens=256) as r:
        attention = Attention(r, case, True)
        expected = attention.run(entries)
        for entry, position in bad.items():
            block, at = attention.tables[entry, [position // BLOCK_SIZE]], np.array([position % BLOCK_SIZE])
            keys, values = (one[entry][[position]].copy() for one in (case.keys, case.values))
            for one in [keys] * (what != "values") + [values] * (what != "keys"):
                one[..., 3] = np.nan
            with np.errstate(invalid="ignore"):  # 8 bits get a scale that is NaN
                attention.kv.write(block, at, keys, values)
        found = attention.run(entries)
    for (entry, start, count), one, other in zip(entries, found, expected, strict=True):
        positions = np.arange(start, start + count)
        position = bad.get(entry, start + count)
        sees = (positions >= position) & ((positions < position + case.window) if case.window else True)
        assert one[~sees].tobytes() == other[~sees].tobytes()
        assert np.isnan(one[sees]).any(-1).all()


@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_changes_no_other_row(library: ctypes.CDLL, value: float, kv_type: KVType) -> None:
    """Its queries are not: those of others in the same work item, and in the same tile, are computed as before."""
    case = case_of(1, 3, 64, 0, kv_type)
    with recording(library, threads=2, tokens=NUM_TOKENS) as r:
        attention = Attention(r, case, True)
        expected = attention.run(EVERYTHING)
        for entry, token in ((5, 200), (6, 20), (8, 128), (14, 2)):
            case.queries[entry][token, 1] = value
        found = attention.run(EVERYTHING)
    for (entry, start, _), one, other in zip(EVERYTHING, found, expected, strict=True):
        bad = {5: 200, 6: 20, 8: 128, 14: 2}.get(entry)
        for i, (row, before) in enumerate(zip(one, other, strict=True)):
            if bad is None or start + i != bad:
                assert row.tobytes() == before.tobytes()
            else:
                assert np.isnan(row[case.head_dim : 2 * case.head_dim]).any()
                assert row[: case.head_dim].tobytes() == before[: case.head_dim].tobytes()


@pytest.mark.parametrize("shape", [shared.SHAPES[i] for i in (0, 3, 5, 8, 10)], ids=str)
def test_rows_that_share_blocks_see_nothing_else(
    library: ctypes.CDLL, is_emulated: bool, shape: tuple[int, int, int, int]
) -> None:
    """All blocks hold NaN but for the places that some row sees."""
    memory, queries = shared.memory_of(shape, 1), shared.queries_of(shape, 2)
    kv_heads, _, head_dim, window = shape
    for seed in range(1 if is_emulated else 3):
        tree = shared.grow(seed + 1000 * (1 + shared.SHAPES.index(shape)))
        seen = np.zeros((shared.NUM_BLOCKS, BLOCK_SIZE), np.bool_)
        for i, (start, count) in enumerate(tree.entries):
            positions = np.arange(max(0, start - window + 1) if window else 0, start + count)
            seen[tree.tables[i, positions // BLOCK_SIZE], positions % BLOCK_SIZE] = True
        spoilt = memory.copy()
        (nan,) = bf16_bits(np.array([np.nan], np.float32))
        keys, values = np.split(spoilt, 2, axis=1)
        keys.reshape(-1, kv_heads, head_dim // 2, BLOCK_SIZE, 2).transpose(0, 3, 1, 2, 4)[~seen] = nan
        pairs = values.reshape(-1, kv_heads * head_dim // 16, BLOCK_SIZE // 2, 16, 2)
        for token in range(BLOCK_SIZE):
            pairs[~seen[:, token], :, token // 2, :, token % 2] = nan
        results = []
        for content in (memory, spoilt):
            with recording(
                library, threads=2, tokens=shared.NUM_TOKENS, rows=shared.NUM_ROWS, blocks=shared.MOST_BLOCKS
            ) as r:
                attention = shared.Attention(r, shape, content, queries)
                results.append(attention.run(tree, tree.tables, range(len(tree.starts))))
        shared.assert_same(results[1], results[0])


def test_the_entries_end_within_blocks() -> None:
    """The places behind them are what the tests above fill."""
    assert sum((start + count) % BLOCK_SIZE != 0 for start, count in ENTRIES) > len(ENTRIES) // 2
