"""Attention of the CPU library: decode and prefill in one call, over scattered blocks among stale ones, in bfloat16 and
in 8 bits."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.step_inputs import BLOCK_SIZE
from tests.kernels.cpu.kv_memory import KVMemory, dequantized, hadamard, quantize_heads
from tests.kernels.cpu.quantized import EPS, TINY, bf16_bits, random, read_floats, to_bf16
from tests.kernels.cpu.recording import Recording, assert_kept, assert_near, recording, sampled_tables

STRETCH = 64
"""Keys between two updates of the running maximum."""
EXP_ERROR = 2.5e-7
"""Relative error of exp_of_negative in vec.h, but for the rounding of a larger argument."""
SCORE_ROUNDING = 6
"""Of a sum of n random terms, in EPS sqrt(n) times the root of their squares: the walk that its n roundings make has a
third of that for its deviation (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis")."""
LARGEST_CODE = 32767
"""Of queries and weights, where keys and values have 8 bits."""
NUM_BLOCKS = 128
STALE = (3.3e38, -3.3e38, 1.0, -1e-38, np.nan, np.inf, -np.inf, 0.0)
"""Content of blocks that no row may see: anything that another request's overflow leaves there."""

ENTRIES = [
    (0, 1),
    (15, 1),
    (16, 1),
    (63, 1),
    (64, 1),
    (200, 1),
    (0, 70),
    (40, 33),
    (127, 2),
    (59, 6),
    (0, 16),
    (129, 1),
    (100, 1),
    (31, 1),
    (2, 1),
    (77, 1),
]
"""(start, count): contexts that end at, before and after the borders of blocks and stretches."""

SHAPES = [  # key-value heads, queries a head, head_dim, window
    (2, 1, 32, 0),
    (2, 3, 64, 0),
    (1, 3, 64, 100),
    (2, 7, 64, 64),
    (1, 7, 80, 0),
    (1, 16, 32, 5),
    (2, 1, 96, 21),
    (1, 3, 128, 1),
    (1, 1, 256, 0),
    (2, 3, 16, 0),
    (1, 71, 32, 0),
    (9, 16, 16, 64),
    (1, 2, 512, 0),
]
"""The two before the last have more queries than one pass over a stretch takes, and than one decoding row stores."""
SHAPES_8 = [SHAPES[i] for i in (1, 3, 4, 5, 8, 9, 11, 12)]
"""Of keys and values in 8 bits."""


@dataclass
class Case:
    """Rows with their whole history; a step computes their last tokens. Arrays are float32."""

    kv_type: KVType
    kv_heads: int
    group: int
    head_dim: int
    window: int
    keys: list[np.ndarray]
    """[context, kv_heads, head_dim] of each entry, before they are rounded"""
    values: list[np.ndarray]
    queries: list[np.ndarray]
    """[context, heads, head_dim], scaled"""

    def kept(self, values: np.ndarray) -> np.ndarray:
        """What is left of keys or values in the KV memory: float64."""
        return (dequantized if self.kv_type is KVType.INT8 else to_bf16)(values).astype(np.float64)

    @property
    def width(self) -> int:
        return self.kv_heads * self.group * self.head_dim


def case_of(kv_heads: int, group: int, head_dim: int, window: int, kv_type: KVType = KVType.BF16) -> Case:
    keys, values, queries = [], [], []
    for i, (start, count) in enumerate(ENTRIES):
        context = start + count
        # Scores spread widely, so that maxima move between stretches and some weights vanish.
        keys.append(random(3 * i, context, kv_heads, head_dim))
        values.append(random(3 * i + 1, context, kv_heads, head_dim))
        queries.append(random(3 * i + 2, context, kv_heads * group, head_dim, scale=2.5 / head_dim**0.5))
    return Case(kv_type, kv_heads, group, head_dim, window, keys, values, queries)


class Attention:
    """One attention op. Its KV memory is stale except for the histories of `case`: numbers, or scales, of `stale`."""

    def __init__(
        self,
        r: Recording,
        case: Case,
        floats: bool = False,
        stale: Sequence[float] = STALE,
        form: native.NativeScoreOptions | None = None,
        window_after: int = -1,
    ) -> None:
        self.r, self.case, self.floats = r, case, floats
        most = r.inputs.max_num_tokens
        rng = np.random.default_rng(99)
        self.tables = sampled_tables(1, [len(keys) for keys in case.keys], NUM_BLOCKS)
        self.kv = kv = KVMemory(r, NUM_BLOCKS, case.kv_heads, case.head_dim, case.kv_type)
        self.memory = kv.bytes
        words = bf16_bits(np.array(stale, np.float32))
        if case.kv_type is KVType.BF16:
            self.memory.view(np.uint16)[:] = rng.choice(words, len(self.memory) // 2)
        else:
            self.memory[:] = rng.integers(0, 256, len(self.memory))
            kv.scales[:] = rng.choice(words, kv.scales.shape)
        for i in range(len(ENTRIES)):
            at = np.arange(len(case.keys[i]))
            kv.write(self.tables[i, at // BLOCK_SIZE], at % BLOCK_SIZE, case.keys[i], case.values[i])
        self.queries = r.rows(most, case.width)
        self.out = r.wide_rows(most, case.width * 4) if floats else r.rows(most, case.width)
        sizes = case.kv_heads * case.group, case.kv_heads, case.window, window_after
        plan = r.library.program_attention_plan(r.program, *sizes)
        reference = None if form is None else ctypes.byref(r.kept(form))
        r.library.program_attention(r.program, self.out, floats, self.queries, kv.layer, plan, reference)

    def run(self, entries: list[tuple[int, int, int]], key_ends: np.ndarray | None = None) -> list[np.ndarray]:
        """(entry, start, count) of each row of a step, and the key ends of all tokens. Returns [count, width] of
        each."""
        case, r = self.case, self.r
        steps = [(start, count) for _, start, count in entries]
        r.fill(steps, tables=self.tables[[entry for entry, _, _ in entries]], key_ends=key_ends)
        queries = [case.queries[entry][start : start + count] for entry, start, count in entries]
        num = sum(count for _, count in steps)
        r.put(self.queries, np.concatenate(queries).reshape(num, case.width), ActivationForm.PLAIN)
        assert r.run() == 0
        out = read_floats(self.out, num, case.width) if self.floats else r.read_plain(self.out, num, case.width)
        return np.split(out.copy(), np.cumsum([count for _, count in steps])[:-1])


def reference(
    case: Case, entry: int, start: int, count: int, r: Recording, ends: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """[count, heads x head_dim] float64 and its bound, computed stretch by stretch as attention.h describes. `ends`
    [count] are the first keys that the tokens do not see, by default their positions + 1.

    If activations are bfloat16, so are queries and weights. A weight is rounded relative to the maximum so far. If
    float32 may have rounded it to its neighbour, the bound includes the distance to that neighbour.

    Over 8 bits, a weight is multiplied with its value's scale first. Without tile registers, queries and these products
    are 16-bit integers then. The result is the one before the Hadamard transform at the end.
    """
    wide, in_8_bits = r.wide, case.kv_type is KVType.INT8
    integers = in_8_bits and not r.has_tiles
    scales = np.ones((1, 1, 1))
    if in_8_bits:  # [1, heads, context]
        scales = quantize_heads(case.values[entry])[1].astype(np.float64).repeat(case.group, 1).T[None].swapaxes(0, 1)
    keys = case.kept(case.keys[entry]).repeat(case.group, 1)
    values = case.kept(case.values[entry]).repeat(case.group, 1)
    queries = case.queries[entry][start : start + count]
    queries = queries if wide else to_bf16(queries)
    if integers:
        tops = np.abs(queries).max(-1, keepdims=True)
        queries = np.rint(queries * (np.float32(LARGEST_CODE) / tops)) * (tops.astype(np.float64) / LARGEST_CODE)
    queries = queries.astype(np.float64)
    positions = np.arange(start, start + count)[:, None]
    ends = positions + 1 if ends is None else ends[:, None]
    num_keys = int(ends.max())
    heads, dim = queries.shape[1:]
    queries, keys, values = (array.transpose(1, 0, 2) for array in (queries, keys, values))
    out, spread = np.zeros((2, heads, count, dim))
    magnitude = np.zeros((heads, count, dim))
    total, off, top_error = np.zeros((3, heads, count, 1))
    top = np.full((heads, count, 1), -np.inf)
    for begin in range(0, num_keys, STRETCH):
        part = slice(begin, min(begin + STRETCH, num_keys))
        at = np.arange(num_keys)[part]
        seen = (at < ends) & ((at > positions - case.window) if case.window else True)
        scores = np.where(seen, queries @ keys[:, part].swapaxes(1, 2), -np.inf)
        size = np.sqrt(queries**2 @ (keys[:, part] ** 2).swapaxes(1, 2))
        error = np.where(seen, SCORE_ROUNDING * dim**0.5 * EPS * size, 0)
        top_error = np.maximum(top_error, error.max(-1, keepdims=True))
        new_top = np.maximum(top, scores.max(-1, keepdims=True))
        met = np.isfinite(new_top)
        # Before the first key there is nothing to rescale, and the sums are zero.
        shrink = np.exp(np.where(met, top, 0) - np.where(met, new_top, 0))
        weights = np.where(seen, np.exp(scores - np.where(met, new_top, 0)), 0)
        # The running maximum is a score too, so a weight has the errors of two scores.
        relative = error + top_error + EXP_ERROR + EPS * np.abs(np.where(seen, scores - np.where(met, new_top, 0), 0))
        low, high = weights * (1 - relative), weights * (1 + relative)
        part_scales = scales[..., part] if in_8_bits else scales
        low, high = low * part_scales, high * part_scales
        if integers:
            # Half a code, and the rounding of the code of the largest.
            step = high.max(-1, keepdims=True) / LARGEST_CODE * (0.5 + 4 * LARGEST_CODE * EPS)
            low, high = np.where(low > 0, low - step, 0), np.where(high > 0, high + step, 0)
        elif not wide:
            low, high = to_bf16(low).astype(np.float64), to_bf16(high).astype(np.float64)
        low, high = (np.divide(w, part_scales, out=np.zeros_like(w), where=part_scales > 0) for w in (low, high))
        out = out * shrink + (low + high) / 2 @ values[:, part]
        spread = spread * shrink + (high - low) / 2 @ np.abs(values[:, part])
        magnitude = magnitude * shrink + high @ np.abs(values[:, part])
        total = total * shrink + weights.sum(-1, keepdims=True)
        off = off * shrink + (weights * relative).sum(-1, keepdims=True)
        top = new_top
    # Sums over the context, rescaled once per stretch, each with the error of exp. Errors of the maxima cancel out.
    rounding = (num_keys + 4) * EPS + (num_keys // STRETCH + 1) * EXP_ERROR
    result = out / total
    bound = (spread + rounding * magnitude) / total + np.abs(result) * (off / total + rounding)
    result, bound = (array.transpose(1, 0, 2).reshape(count, -1) for array in (result, bound + TINY))
    return result, bound


TRANSFORM_ERROR = 32 * EPS
"""Of a Hadamard transform of up to 512 numbers, relative to the largest of a step."""


def transformed(case: Case, out: np.ndarray) -> np.ndarray:
    """The Hadamard transform of each head of attention's output [count, width], which undoes that of values in 8 bits:
    float64."""
    return hadamard(out.astype(np.float64).reshape(len(out), -1, case.head_dim)).reshape(out.shape)


def assert_attends(
    r: Recording, case: Case, out: np.ndarray, expected: np.ndarray, bound: np.ndarray, *, floats: bool
) -> None:
    # The bound must be tight: rounded queries would be a hundred times as far off.
    # Of 64 weights, of which one may be as large as all others, each has half a code.
    integers = case.kv_type is KVType.INT8
    # It grows with the numbers of a sum.
    most = 0.005 if not r.wide else 0.002 if integers else 3e-4
    assert bound.max() < most * max(1.0, case.head_dim / 256)
    if not integers:
        (assert_near(out, expected, bound) if floats else assert_kept(r, out, expected, bound))
    elif floats:
        found = transformed(case, out)
        assert_near(found, expected, bound + TRANSFORM_ERROR * np.abs(found).max())
    else:
        matrix = np.abs(hadamard(np.eye(case.head_dim)))
        spread = (bound.reshape(-1, case.head_dim) @ matrix).reshape(bound.shape)
        expected = transformed(case, expected)
        assert_kept(r, out, expected, spread + TRANSFORM_ERROR * np.abs(expected).max())


EVERYTHING = [(i, start, count) for i, (start, count) in enumerate(ENTRIES)]
NUM_TOKENS = sum(count for _, count in ENTRIES)


@pytest.fixture(
    scope="module",
    params=[*(shape for shape in SHAPES), *((*shape, KVType.INT8) for shape in SHAPES_8)],
    ids=lambda shape: "-".join(map(str, shape)),
)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(*request.param)


@pytest.mark.parametrize("floats", [False, True], ids=["plain", "floats"])
def test_rows_of_all_kinds_attend_to_their_visible_keys(library: ctypes.CDLL, case: Case, floats: bool) -> None:
    with recording(library, threads=2, tokens=NUM_TOKENS) as r:
        attention = Attention(r, case, floats)
        before = attention.memory.copy()
        made = attention.run(EVERYTHING)
        np.testing.assert_array_equal(attention.memory, before)
        for entry, out in zip(EVERYTHING, made, strict=True):
            assert_attends(r, case, out, *reference(case, *entry, r), floats=floats)


def test_a_row_has_the_same_bits_in_every_batch(library: ctypes.CDLL, case: Case) -> None:
    """Alone and in a batch, on one to three threads: the heads of a row in one work item, or in several."""
    results = []
    for threads in (1, 2, 3):
        with recording(library, threads=threads, tokens=NUM_TOKENS) as r:
            attention = Attention(r, case)
            results.append(attention.run(EVERYTHING))
            results.append(attention.run(EVERYTHING[::-1])[::-1])
            results.append([attention.run([entry])[0] for entry in EVERYTHING])
    for result in results[1:]:
        for out, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("kv_type", list(KVType))
@pytest.mark.parametrize("shape", [SHAPES[i] for i in (2, 3, 5, 6, 7)], ids=lambda shape: "-".join(map(str, shape)))
def test_blocks_that_the_window_has_left_are_not_read(
    library: ctypes.CDLL, shape: tuple[int, int, int, int], kv_type: KVType
) -> None:
    """They belong to other sequences, whose numbers may be anything."""
    case = case_of(*shape, kv_type)
    with recording(library, threads=2, tokens=NUM_TOKENS) as r:
        attention = Attention(r, case)
        entries = [(i, start, count) for i, (start, count) in enumerate(ENTRIES)]
        expected = attention.run(entries)
        (foreign, *_) = set(range(NUM_BLOCKS)) - set(attention.tables.ravel().tolist())
        nans = np.full((BLOCK_SIZE, case.kv_heads, case.head_dim), np.nan, np.float32)
        with np.errstate(invalid="ignore"):  # 8 bits get a scale that is NaN
            attention.kv.write(np.full(BLOCK_SIZE, foreign), np.arange(BLOCK_SIZE), nans, nans)
        for entry, start, _ in entries:
            attention.tables[entry, : max(0, start - case.window + 1) // BLOCK_SIZE] = foreign
        for found, values in zip(attention.run(entries), expected, strict=True):
            assert found.tobytes() == values.tobytes()


@pytest.mark.parametrize("chunk", [1, 16, 47])
def test_a_prompt_has_the_same_bits_for_every_chunk_size(library: ctypes.CDLL, case: Case, chunk: int) -> None:
    whole = {5: (0, 201), 6: (0, 70), 7: (0, 73)}
    with recording(library, threads=2, tokens=400) as r:
        attention = Attention(r, case)
        at_once = attention.run([(entry, *span) for entry, span in whole.items()])
        parts: dict[int, list[np.ndarray]] = {entry: [] for entry in whole}
        for begin in range(0, 201, chunk):
            entries = [
                (entry, begin, min(chunk, count - begin)) for entry, (_, count) in whole.items() if begin < count
            ]
            for (entry, _, _), out in zip(entries, attention.run(entries), strict=True):
                parts[entry].append(out)
    for out, cut in zip(at_once, parts.values(), strict=True):
        np.testing.assert_array_equal(np.concatenate(cut), out)


@pytest.mark.parametrize("kv_type", KVType)
@pytest.mark.parametrize("offset", [-1e4, 80.0, 1e4])
def test_softmax_of_scores_of_any_size(library: ctypes.CDLL, offset: float, kv_type: KVType) -> None:
    """One key is far above or below all others, in each stretch: weights are one, or vanish, but never NaN."""
    case = case_of(1, 3, 32, 0, kv_type)
    for keys, queries in zip(case.keys, case.queries, strict=True):
        queries[..., 0] = 1
        keys[::40, :, 0] = np.float32(offset) * np.arange(1, len(keys[::40]) + 1)[:, None]
    with recording(library, tokens=NUM_TOKENS) as r:
        for entry, out in zip(EVERYTHING, Attention(r, case, True).run(EVERYTHING), strict=True):
            expected, _ = reference(case, *entry, r)
            # Scores of 1e4 have an error of 1e-3 in float32, and so do weights.
            found = transformed(case, out) if kv_type is KVType.INT8 else out
            assert_near(found, expected, 1e-4 if r.wide and abs(offset) < 100 else 0.02)


@pytest.mark.parametrize("kv_type", KVType)
def test_cost_counts_only_the_keys_inside_the_window(library: ctypes.CDLL, kv_type: KVType) -> None:
    case = case_of(2, 3, 32, 21, kv_type)
    with recording(library, tokens=NUM_TOKENS) as r:
        attention = Attention(r, case)
        attention.run([(5, 200, 1), (6, 0, 70)])
        cost = (ctypes.c_double * 3)()
        library.program_cost(r.program, 1, 71, 2, 2, cost)
    pairs = 21 + sum(min(i + 1, 21) for i in range(70))
    is_integer = kv_type is KVType.INT8 and not r.has_tiles
    key_bytes = 2 * 32 * 4 if kv_type is KVType.BF16 else 2 * (32 + 2) * 2
    assert list(cost) == [(21 + 70) * key_bytes, 4 * pairs * 2 * 3 * 32, is_integer]


def test_a_value_that_is_not_finite_is_not_lost_in_8_bits(library: ctypes.CDLL) -> None:
    case = case_of(1, 3, 32, 0, KVType.INT8)
    with recording(library, tokens=NUM_TOKENS) as r:
        attention = Attention(r, case, True)
        block, offset = attention.tables[5, 70 // BLOCK_SIZE], 70 % BLOCK_SIZE
        attention.kv.scales[block, :, 1, offset] = bf16_bits(np.array([np.nan], np.float32))
        (out,) = attention.run([(5, 60, 20)])
    assert np.isfinite(out[:10]).all() and np.isnan(out[10:]).all()


@pytest.mark.parametrize("head_dim", [32, 80, 96])
@pytest.mark.parametrize("at", [0, 17, 31])
def test_a_query_that_is_not_finite_is_not_lost_in_8_bits(library: ctypes.CDLL, head_dim: int, at: int) -> None:
    """Wherever its NaN is."""
    case = case_of(1, 3, head_dim, 0, KVType.INT8)
    case.queries[5][70, ..., at] = np.nan
    with recording(library, tokens=NUM_TOKENS) as r:
        (out,) = Attention(r, case, True).run([(5, 60, 20)])
    assert np.isnan(out[10]).any()
    assert np.isfinite(out[:10]).all() and np.isfinite(out[11:]).all()
