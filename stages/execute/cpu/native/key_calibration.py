"""Measures keys and queries in the CPU library, to round keys to 8 bits with smaller errors.

The mean keys of each head are subtracted: half of the square of a key, and more, is that of the mean of all keys. It
costs the rest bits, and nothing of it matters (stages/execute/layers/key_center.py).

The rest is multiplied with a factor for each dimension, and queries with its inverse. Rounding adds errors of about
one size to all dimensions of a key: that of a score grows with the root of (sum of k^2 f^2) (sum of q^2 / f^2), where k
and q are the sizes of a dimension of keys and queries. That is least if f^2 = q / k. Two dimensions that rotate
together have one factor, so that it suits all positions.

The sizes in random common tokens are near those in texts. They are measured once, when the model is loaded. Equal
weights have equal means and factors: the tokens are always the same, and results don't depend on how many are computed
at a time.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.sampling.logprob_inputs import FloatArray
from pipeline.kernels.step_inputs import BLOCK_SIZE, StepInputs
from pipeline.stages.execute.cpu.native.memory import PAIR

Doubles = np.ndarray[Any, np.dtype[np.float64]]

NUM_TOKENS = 256
COMMON = range(300, 5000)
"""Most vocabularies are sorted by frequency, behind special tokens and single bytes."""
NUM_LEFT_OUT = BLOCK_SIZE
"""Of the first tokens, whose keys are unlike others: many heads attend to them when they look for nothing."""


SMALLEST_SIZE = 1e-3
"""Of a dimension of keys or queries, relative to the largest one of the head."""


class KeyFactors:
    """Factors of a layer's keys, [heads, head_dim] in the order of the panels, at first 1. The library reads them in
    every step."""

    def __init__(self, num_query_heads: int, num_heads: int, head_dim: int) -> None:
        self.factors = np.ones((num_heads, head_dim), np.float32)
        self._inverses = np.ones((num_heads, head_dim), np.float32)
        self._squares = np.zeros((num_query_heads, head_dim), np.float32)
        addresses = (array.ctypes.data for array in (self.factors, self._inverses, self._squares))
        self.native = native.NativeKeyFactors(*addresses)

    def choose(self, keys: FloatArray) -> None:
        """Set the factors, from the queries so far and `keys` without their mean, [tokens, heads, head_dim]. No more
        queries are measured."""
        self.native.query_squares = None
        num_heads, head_dim = self.factors.shape
        sizes = [
            _sizes_of_pairs(squares.astype(np.float64))
            for squares in (self._squares.reshape(num_heads, -1, head_dim).sum(1), np.square(keys).sum(0))
        ]
        if all(np.isfinite(size).all() and (size > 0).all() for size in sizes):
            factors = np.sqrt(sizes[0] / sizes[1])
            self.factors[:] = factors / np.exp(np.log(factors).mean(-1, keepdims=True))
            self._inverses[:] = 1 / self.factors


def _sizes_of_pairs(squares: Doubles) -> Doubles:
    """Roots of the sums of squares [heads, head_dim] over the two dimensions that rotate together, for each of them."""
    pairs = squares.reshape(len(squares), -1, 2, PAIR)
    sizes: Doubles = np.sqrt(pairs.sum(2, keepdims=True).repeat(2, axis=2)).reshape(squares.shape)
    found: Doubles = np.maximum(sizes, SMALLEST_SIZE * sizes.max(-1, keepdims=True))
    return found


class CalibratedLayer(NamedTuple):
    memory: native.NativeLayerMemory
    group: int
    """Its KV group"""
    center: FloatArray
    """[heads, head_dim] in the order of the panels; the library reads it in every step"""
    factors: KeyFactors | None


def calibrate_keys(
    layers: Sequence[CalibratedLayer],
    inputs: StepInputs,
    run: Callable[[], object],
    vocab_size: int,
    max_model_len: int,
    num_kv_blocks: int,
) -> None:
    """Compute some tokens with `run`, in the first blocks, add the mean of their keys to the centers of all layers, and
    choose factors. The blocks are zero again afterwards. A layer whose keys are not all finite keeps its center."""
    num_groups = len(inputs.group_tables)
    num_blocks = min(NUM_TOKENS // BLOCK_SIZE, max_model_len // BLOCK_SIZE, num_kv_blocks // num_groups)
    num_tokens = num_blocks * BLOCK_SIZE
    if num_tokens <= NUM_LEFT_OUT:
        return
    common = min(COMMON.start, vocab_size // 2), min(COMMON.stop, vocab_size)
    ids = np.random.default_rng(0).integers(*common, num_tokens).astype(np.int32)
    tables = [np.arange(num_blocks, dtype=np.int32)[None] + group * num_blocks for group in range(num_groups)]
    for start in range(0, num_tokens, inputs.max_num_tokens):
        part = ids[start : start + inputs.max_num_tokens]
        starts, counts, samples = np.array([start], np.int32), np.array([len(part)], np.int32), np.zeros(1, np.uint8)
        inputs.fill(part, starts, counts, tables[0], samples, tables[1:])
        inputs.state_reads[0] = 0 if start else -1
        run()
    for layer in layers:
        blocks = _blocks(layer.memory, layer.group * num_blocks, num_blocks)
        keys = _keys(blocks, layer.memory.heads, layer.memory.head_dim)[NUM_LEFT_OUT:]
        mean = keys.mean(0)
        if np.isfinite(mean).all():
            layer.center[:] += hadamard(mean)
        if layer.factors is not None:
            layer.factors.choose(hadamard(keys - mean))
        blocks[:] = 0


def hadamard(heads: FloatArray) -> FloatArray:
    """The transform of hadamard.h, which is its own inverse, of heads [..., head_dim] in the order of the panels."""
    size = heads.shape[-1] & -heads.shape[-1]
    out, step = heads, 1
    while step < size:
        pairs = out.reshape(-1, 2, step)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
        step *= 2
    transformed: FloatArray = out.reshape(heads.shape) / np.float32(size**0.5)
    return transformed


def _blocks(
    memory: native.NativeLayerMemory, first: int, num_blocks: int
) -> "np.ndarray[tuple[int, int], np.dtype[np.int8]]":
    """Some blocks of a layer, [num_blocks, bytes]."""
    block = memory.heads * 2 * (memory.head_dim + 2) * BLOCK_SIZE
    data, num_bytes = memory.data + first * memory.stride, (num_blocks - 1) * memory.stride + block
    array = np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_int8)), (num_bytes,))
    return np.lib.stride_tricks.as_strided(array, (num_blocks, block), (memory.stride, 1))


def _keys(blocks: "np.ndarray[tuple[int, int], np.dtype[np.int8]]", heads: int, head_dim: int) -> FloatArray:
    """The keys of blocks as kv.h lays them out, [tokens, heads, head_dim] float32."""
    size, num_blocks = heads * head_dim * BLOCK_SIZE, len(blocks)
    codes = blocks[:, :size].reshape(num_blocks, heads, head_dim // 2, BLOCK_SIZE, 2)
    words = blocks[:, 2 * size :].copy().view(np.uint16).reshape(num_blocks, heads, 2, BLOCK_SIZE)[:, :, 0]
    scales = (words.astype(np.uint32) << 16).view(np.float32)
    numbers = codes.transpose(0, 3, 1, 2, 4).reshape(-1, heads, head_dim).astype(np.float32)
    keys: FloatArray = numbers * scales.transpose(0, 2, 1).reshape(-1, heads, 1)
    return keys
