"""Widen a Llama .gguf file with float32 weights by zeros, so that its rows have whole blocks of K-quants.

    .venv/bin/python -m tools.models.widen_gguf SmolLM2-f32.gguf wide.gguf

Rows of K-quants are multiples of 256 numbers, and llama-quantize takes other formats for other rows. The hidden size
becomes the next multiple of 256, and each head of keys and values gets as many heads of queries more as that needs.
New weights are zero. RMS norms divide by the new number of numbers, so their weights and their epsilon are scaled: in
exact arithmetic the outputs are the same.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BLOCK = 256
Array = np.ndarray[Any, Any]


def widen(source: Path, target: Path) -> None:
    """Raises SystemExit if the file isn't one that this tool can widen."""
    reader = gguf.GGUFReader(source)

    def value(key: str) -> Any:
        field = reader.fields[f"llama.{key}"]
        return field.contents()

    hidden, heads, groups = value("embedding_length"), value("attention.head_count"), value("attention.head_count_kv")
    dim, wide = hidden // heads, -(-hidden // BLOCK) * BLOCK
    if wide % (dim * groups):
        sys.exit(f"{source}: {wide} numbers are no whole number of heads of {dim} for each of {groups} heads of keys")
    ratio, each = hidden / wide, heads // groups
    # Where the numbers of the old heads are among those of the new ones.
    indices = (np.arange(groups)[:, None] * (wide // groups) + np.arange(each * dim)).reshape(-1)
    changed = {"embedding_length": wide, "attention.head_count": wide // dim}
    changed["attention.layer_norm_rms_epsilon"] = value("attention.layer_norm_rms_epsilon") * ratio
    writer = gguf.GGUFWriter(target, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(
            field.name, changed.get(field.name.removeprefix("llama."), field.contents()), field.types[0], sub_type
        )
    for tensor in reader.tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            sys.exit(f"{source}: {tensor.name} is {tensor.tensor_type.name}: convert it with llama-quantize … F32")
        writer.add_tensor(tensor.name, _widened(tensor.name, np.array(tensor.data), wide, ratio, indices))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _widened(name: str, numbers: Array, wide: int, ratio: float, indices: Array) -> Array:
    if name.endswith("norm.weight"):
        return _scattered(numbers, (wide,), np.arange(len(numbers))) * np.float32(np.sqrt(ratio))
    old = np.arange(len(indices))
    if name.endswith("attn_q.weight"):
        return _scattered(numbers, (wide, wide), indices, old)
    if name.endswith("attn_output.weight"):
        return _scattered(numbers, (wide, wide), old, indices)
    if name.endswith("ffn_down.weight"):
        return _scattered(numbers, (wide, numbers.shape[1]), old, np.arange(numbers.shape[1]))
    return _scattered(numbers, (len(numbers), wide), np.arange(len(numbers)), old)


def _scattered(numbers: Array, shape: tuple[int, ...], *indices: Array) -> Array:
    out = np.zeros(shape, np.float32)
    out[np.ix_(*indices)] = numbers
    return out


if __name__ == "__main__":
    widen(Path(sys.argv[1]), Path(sys.argv[2]))
