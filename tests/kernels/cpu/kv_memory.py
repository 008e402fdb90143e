"""The KV memory of one layer, as kv.h lays it out."""

import ctypes
from typing import Any

import numpy as np

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import KVType
from pipeline.kernels.step_inputs import BLOCK_SIZE
from tests.kernels.cpu.quantized import PANEL, bf16_bits, upcast
from tests.kernels.cpu.recording import Recording


class KVMemory:
    """Memory of a recording, with views of its parts. Indices are blocks."""

    def __init__(
        self,
        r: Recording,
        num_blocks: int,
        num_heads: int,
        head_dim: int,
        type: KVType,
        center: np.ndarray | None = None,
        factors: np.ndarray | None = None,
    ) -> None:
        self.type = type
        dtype = np.uint16 if type is KVType.BF16 else np.int8
        panel = head_dim * BLOCK_SIZE * np.dtype(dtype).itemsize
        scales = 0 if type is KVType.BF16 else 2 * BLOCK_SIZE * 2
        self.bytes = r.memory(num_blocks * num_heads * (2 * panel + scales))
        blocks = self.bytes.reshape(num_blocks, -1)
        panels = blocks[:, : 2 * num_heads * panel].view(dtype).reshape(num_blocks, 2, num_heads, -1)
        keys = panels[:, 0].reshape(num_blocks, num_heads, head_dim // 2, BLOCK_SIZE, 2)
        values = panels[:, 1].reshape(num_blocks, num_heads, head_dim // PANEL, BLOCK_SIZE // 2, PANEL, 2)
        self.keys, self.values = keys, values
        self.scales = blocks[:, 2 * num_heads * panel :].view(np.uint16).reshape(num_blocks, num_heads, -1, BLOCK_SIZE)
        """[num_blocks, heads, 2 (none in bfloat16), BLOCK_SIZE]"""
        self.head_dim, self.num_heads = head_dim, num_heads
        at = None if center is None else r.floats(center).ctypes.data
        scaling = None
        if factors is not None:
            arrays = (r.floats(array).ctypes.data for array in (factors, 1 / factors))
            scaling = ctypes.addressof(r.kept(native.NativeKeyFactors(*arrays, None)))
        sizes = num_heads, head_dim, type
        stride = self.bytes.nbytes // num_blocks
        self._layer = r.kept(native.NativeLayerMemory(self.bytes.ctypes.data, *sizes, at, scaling, stride))

    @property
    def layer(self) -> Any:
        """A reference for the library."""
        return ctypes.byref(self._layer)

    def write(self, blocks: np.ndarray, offsets: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        """Write keys and values [tokens, heads, head_dim] float32, rounded, to these places in blocks."""
        if self.type is KVType.INT8:
            codes, scales = zip(quantize_heads(keys), quantize_heads(values), strict=True)
            for i in range(2):
                self.scales[blocks, :, i, offsets] = bf16_bits(scales[i])
        else:
            codes = bf16_bits(keys), bf16_bits(values)
        num = len(keys)
        self.keys[blocks, :, :, offsets] = codes[0].reshape(num, self.num_heads, -1, 2)
        self.values[blocks, :, :, offsets // 2, :, offsets % 2] = codes[1].reshape(num, self.num_heads, -1, PANEL)

    def read(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The numbers at these places: keys and values [tokens, heads, head_dim], bfloat16 words or int8 codes."""
        shape = len(blocks), self.num_heads, self.head_dim
        keys = self.keys[blocks, :, :, offsets].reshape(shape)
        return keys, self.values[blocks, :, :, offsets // 2, :, offsets % 2].reshape(shape)

    def read_scales(self, blocks: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scales of keys and values at these places, [tokens, heads] float32."""
        return upcast(self.scales[blocks, :, 0, offsets]), upcast(self.scales[blocks, :, 1, offsets])


def quantize_heads(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [..., D] int8 and scales [...] float32, a bfloat16 each, of float32 values, as `quantize_head` in kv.h
    defines them."""
    words = (np.abs(values).max(-1) / np.float32(127)).astype(np.float32).view(np.uint32)
    scales = ((words + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)
    scales = np.where(scales < np.finfo(np.float32).tiny, np.float32(0), scales)
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
    return np.rint(values * inverse[..., None]).astype(np.int8), scales


def hadamard(heads: np.ndarray) -> np.ndarray:
    """Heads [..., D] float32 as `hadamard` in hadamard.h transforms them, with the same roundings."""
    size = heads.shape[-1] & -heads.shape[-1]
    out, step = heads, 1
    while step < size:
        pairs = out.reshape(-1, 2, step)
        out = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        step *= 2
    return out.reshape(heads.shape) * (np.float32(1) / np.sqrt(np.float32(size)))


def dequantized(values: np.ndarray) -> np.ndarray:
    """What is left of float32 values in 8 bits; exact in float32."""
    codes, scales = quantize_heads(values)
    return codes * scales[..., None]
