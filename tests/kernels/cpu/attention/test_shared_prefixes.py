"""Attention computes rows that share blocks together, with the same bits as separately."""

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm, KVType
from pipeline.kernels.step_inputs import BLOCK_SIZE, IntArray
from tests.kernels.cpu.quantized import bf16_bits, random, read_floats
from tests.kernels.cpu.recording import Recording, recording

STRETCH_BLOCKS = 4
MOST_BLOCKS = 24
"""Per row"""
NUM_BLOCKS = 640
NUM_TOKENS = 192
NUM_ROWS = 40

SHAPES = [  # key-value heads, queries a head, head_dim, window
    (3, 3, 64, 0),
    (2, 1, 32, 0),
    (1, 7, 80, 0),
    (3, 3, 64, 100),
    (2, 4, 16, 64),
    (1, 2, 128, 37),
    (1, 16, 32, 0),
    (1, 1, 256, 200),
    (2, 71, 16, 0),
    (9, 16, 16, 0),
    (1, 3, 96, 1),
]


@dataclass
class Tree:
    """The rows of a step: each one's start, number of tokens, and blocks, some of which it shares with other rows."""

    starts: list[int]
    counts: list[int]
    tables: IntArray
    """[rows, MOST_BLOCKS]"""

    @property
    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self.starts, self.counts, strict=True))

    def apart(self) -> tuple[IntArray, IntArray]:
        """The same rows without shared blocks: their tables, and for each block the block that it copies."""
        tables, originals = np.zeros_like(self.tables), [0]
        for i, (start, count) in enumerate(self.entries):
            num = -(-(start + count) // BLOCK_SIZE)
            tables[i, :num] = np.arange(num) + len(originals)
            originals += self.tables[i, :num].tolist()
        return tables, np.array(originals)


class Attention:
    """One attention op over the keys and values of `memory_of`."""

    def __init__(self, r: Recording, shape: tuple[int, int, int, int], memory: np.ndarray, queries: np.ndarray) -> None:
        kv_heads, group, head_dim, window = shape
        self.r, self.width = r, kv_heads * group * head_dim
        kept = r.memory(memory.nbytes)
        kept[:] = memory.reshape(-1).view(np.uint8)
        self.queries = r.rows(NUM_TOKENS, self.width)
        self.given = queries
        self.out = r.wide_rows(NUM_TOKENS, self.width * 4)
        kv_type = KVType.BF16 if memory.dtype == np.uint16 else KVType.INT8
        layer = r.kept(
            native.NativeLayerMemory(kept.ctypes.data, kv_heads, head_dim, kv_type, stride=memory.nbytes // len(memory))
        )
        plan = r.library.program_attention_plan(r.program, kv_heads * group, kv_heads, window, -1)
        r.library.program_attention(r.program, self.out, True, self.queries, ctypes.byref(layer), plan, None)

    def run(
        self, tree: Tree, tables: IntArray, rows: Sequence[int], key_ends: np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Run these rows of a tree as one step, with these tables. Returns the output of each, [tokens, width]."""
        ends = np.cumsum(tree.counts)
        self.r.fill([tree.entries[row] for row in rows], tables=tables[list(rows)], key_ends=key_ends)
        given = [self.given[ends[row] - tree.counts[row] : ends[row]] for row in rows]
        num = sum(len(queries) for queries in given)
        self.r.put(self.queries, np.concatenate(given), ActivationForm.PLAIN)
        assert self.r.run() == 0
        made = read_floats(self.out, num, self.width).copy()
        return np.split(made, np.cumsum([len(queries) for queries in given])[:-1])

    def bytes_read(self, num_tokens: int, num_rows: int) -> float:
        cost = (ctypes.c_double * 3)()
        self.r.library.program_cost(self.r.program, 1, num_tokens, num_rows, num_rows, cost)
        return float(cost[0])


def grow(seed: int) -> Tree:
    """Each row continues some leading blocks of an earlier row, or none. Shared prefixes end within a stretch as often
    as at its end. Some rows share everything except the tokens that they compute."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(2, NUM_ROWS))
    tree = Tree([], [], np.zeros((num, MOST_BLOCKS), np.int32))
    names = iter(rng.permutation(NUM_BLOCKS))
    budget, free = NUM_TOKENS, NUM_BLOCKS - 1
    for i in range(num):
        shared = 0
        if i and rng.random() < 0.8:
            parent = int(rng.integers(0, i))
            shared = int(rng.integers(0, tree.starts[parent] // BLOCK_SIZE + 1))
            if rng.random() < 0.5:
                shared -= shared % STRETCH_BLOCKS
            tree.tables[i, :shared] = tree.tables[parent, :shared]
        most = budget - (num - 1 - i)
        count = 1 if rng.random() < 0.7 else int(rng.integers(1, min(most, 70) + 1))
        room = min((MOST_BLOCKS - shared) * BLOCK_SIZE - count, (free // 2 - 5) * BLOCK_SIZE)
        own = 0 if rng.random() < 0.2 else int(rng.integers(0, max(1, min(room, 130))))
        start = shared * BLOCK_SIZE + own
        if start + count > MOST_BLOCKS * BLOCK_SIZE:
            start, count = MOST_BLOCKS * BLOCK_SIZE - 1, 1
        needed = -(-(start + count) // BLOCK_SIZE)
        tree.tables[i, shared:needed] = [next(names) for _ in range(needed - shared)]
        free -= needed - shared
        budget -= count
        tree.starts.append(start)
        tree.counts.append(count)
    return tree


def fan(lengths: Sequence[int], count: int = 1) -> Tree:
    """Rows that share their first blocks, 256 tokens, each with its own number of further tokens from `lengths`."""
    tables = np.zeros((len(lengths), MOST_BLOCKS), np.int32)
    tables[:, :16] = np.arange(16)
    tables[:, 16:] = 16 + np.arange(8 * len(lengths)).reshape(len(lengths), 8)
    return Tree([256 + length for length in lengths], [count] * len(lengths), tables)


@functools.cache
def memory_of(shape: tuple[int, int, int, int], seed: int, kv_type: KVType = KVType.BF16) -> np.ndarray:
    """Random keys and values of NUM_BLOCKS blocks: bfloat16 [blocks, numbers of a block], or 8 bits [blocks, bytes].
    Cached for the other instruction sets, and read-only."""
    kv_heads, _, head_dim, _ = shape
    if kv_type is KVType.INT8:
        rng = np.random.default_rng(seed)
        codes = rng.integers(0, 256, (NUM_BLOCKS, 2 * kv_heads * head_dim * BLOCK_SIZE), np.uint8)
        scales = bf16_bits(rng.uniform(0.01, 0.03, (NUM_BLOCKS, kv_heads * 2 * BLOCK_SIZE)))
        made: np.ndarray = np.concatenate([codes, scales.view(np.uint8)], axis=1)
    else:
        values = random(seed, NUM_BLOCKS, 2 * kv_heads * head_dim * BLOCK_SIZE)
        made = (values.view(np.uint32) >> 16).astype(np.uint16)
    made.flags.writeable = False
    return made


def queries_of(shape: tuple[int, int, int, int], seed: int) -> np.ndarray:
    kv_heads, group, head_dim, _ = shape
    made: np.ndarray = random(seed, NUM_TOKENS, kv_heads * group * head_dim, scale=2.5 / head_dim**0.5)
    return made


def assert_same(made: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for row, other in zip(made, expected, strict=True):
        assert np.isfinite(row).all()
        np.testing.assert_array_equal(row, other)


@pytest.mark.parametrize("kv_type", KVType, ids=lambda kv_type: kv_type.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shared_blocks_and_copies_of_them_yield_the_same_bits(
    library: ctypes.CDLL, is_emulated: bool, shape: tuple[int, int, int, int], kv_type: KVType
) -> None:
    memory, queries = memory_of(shape, 1, kv_type), queries_of(shape, 2)
    for seed in range(1 if is_emulated else 3):
        tree = grow(seed + 100 * SHAPES.index(shape))
        rows = range(len(tree.starts))
        tables, originals = tree.apart()
        results = []
        for threads in (1, 2, 3):
            with recording(library, threads=threads, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
                shared = Attention(r, shape, memory, queries)
                results.append(shared.run(tree, tree.tables, rows))
                results.append(shared.run(tree, tree.tables, rows[::-1])[::-1])
        with recording(library, threads=2, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
            alone = Attention(r, shape, memory, queries)
            results.append([alone.run(tree, tree.tables, [row])[0] for row in rows])
        with recording(library, threads=2, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
            results.append(Attention(r, shape, memory[originals], queries).run(tree, tables, rows))
        for result in results[1:]:
            assert_same(result, results[0])


@pytest.mark.parametrize("num", [2, 3, 16, 40])
@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_rows_shares_a_prefix(library: ctypes.CDLL, num: int, count: int) -> None:
    """Several work items hold them, and their own tokens start at different positions."""
    shape = (3, 3, 64, 0)
    tree = fan([(7 * i) % 90 for i in range(num)], count)
    memory, queries = memory_of(shape, 3), queries_of(shape, 4)
    with recording(library, threads=2, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
        attention = Attention(r, shape, memory, queries)
        together = attention.run(tree, tree.tables, range(num))
        assert_same(together, [attention.run(tree, tree.tables, [row])[0] for row in range(num)])


def test_tokens_behind_a_shared_prefix_are_not_mixed_up(library: ctypes.CDLL) -> None:
    """Rows with the same prefix and queries differ if their own keys do, and are equal if those are copies."""
    shape = (2, 3, 32, 0)
    tree = fan([70, 70, 70])
    memory, queries = memory_of(shape, 5).copy(), queries_of(shape, 6)
    queries[1:3] = queries[0]
    memory[tree.tables[2, 16:]] = memory[tree.tables[0, 16:]]
    with recording(library, threads=2, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
        first, second, third = Attention(r, shape, memory, queries).run(tree, tree.tables, range(3))
    np.testing.assert_array_equal(first, third)
    assert (first != second).any()


def test_cost_counts_a_shared_block_once(library: ctypes.CDLL) -> None:
    shape = (2, 3, 32, 0)
    tree = fan([5, 40, 0, 100])
    with recording(library, tokens=NUM_TOKENS, rows=NUM_ROWS, blocks=MOST_BLOCKS) as r:
        attention = Attention(r, shape, memory_of(shape, 7), queries_of(shape, 8))
        attention.run(tree, tree.tables, range(4))
        assert attention.bytes_read(4, 4) == (256 + 6 + 41 + 1 + 101) * 2 * 32 * 4
