"""Chooses the launch configuration of a matmul: from a shipped table, or by a rule if it has no entry.

Nothing is timed while serving. `tools/gpu_check --tune` times `candidates` on a GPU and writes the table.

The rule (reasoned, not measured) for matmuls that stream weights once: as many programs as run at the same time, each
with at least 16 KiB in flight, so that a multiprocessor has 48 KiB (see vector.py). With too few rows for that, a
program takes fewer rows and more columns. Only if that isn't enough, columns are split among programs.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from pipeline.kernels.triton.launch import num_multiprocessors

Op = Literal["linear", "swiglu", "logits"]
"""`swiglu`: a program has rows of gate and up; never split. `logits`: float32, never split."""

FOLDER = Path(__file__).parent / "tuned"
VECTOR_TOKENS = 1
"""Most tokens for a matrix-vector product (vector.py)."""
SKINNY_TOKENS = 16
"""Most tokens for our own matmul with float weights (skinny.py); cuBLAS above."""
CODE_TOKENS = 128
"""Most tokens for our own matmul with quantized weights; above, they are dequantized for cuBLAS."""
VECTOR_TILE_BYTES = 128 * 128
"""128 bytes per thread of four warps."""
SHORT_ROW = 1024
"""Columns of a row that fits in one tile."""
FLOAT_BITS = {"bf16": 16, "f16": 16, "f32": 32}
K_QUANT_GROUP = 32
BUCKETS = (1, 8, 16, 32, 64, 128)
"""Numbers of tokens with entries in a table."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How a launch divides a matmul [M, K] x [N, K] into programs."""

    block_m: int
    """Tokens of a program: 1 with vector.py, at least 8 with skinny.py"""
    block_n: int
    """Rows of the weight; with op "swiglu" of each half"""
    block_k: int
    """Columns of a tile"""
    split: int
    """Number of split-K partials"""
    num_warps: int
    num_stages: int
    """Tiles in flight (skinny.py)"""


@dataclass(frozen=True, slots=True)
class GemmShape:
    """The key of a table."""

    op: Op
    num_tokens: int
    """One of BUCKETS"""
    num_rows: int
    """N; with op "swiglu" the rows of one half"""
    num_columns: int
    format: str
    """`DeviceMatrix.format`"""


def bucket_of(num_tokens: int) -> int:
    """The smallest bucket with at least `num_tokens`, else the last."""
    return next((bucket for bucket in BUCKETS if num_tokens <= bucket), BUCKETS[-1])


def choose(
    op: Op, *, num_tokens: int, num_rows: int, num_columns: int, format: str, device: torch.device
) -> GemmConfig:
    """The configuration in the shipped table, else the rule's."""
    shape = GemmShape(op, bucket_of(num_tokens), num_rows, num_columns, format)
    return _choose(shape, architecture(device), _num_programs(device))


@lru_cache(maxsize=8)
def _num_programs(device: torch.device) -> int:
    return num_multiprocessors(device)


@lru_cache(maxsize=4096)
def _choose(shape: GemmShape, architecture: str, num_programs: int) -> GemmConfig:
    return table(architecture).get(shape) or rule(shape, num_programs)


@lru_cache(maxsize=8)
def architecture(device: torch.device) -> str:
    """sm_90 for a Hopper GPU; "none" without one."""
    if device.type != "cuda":
        return "none"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@lru_cache(maxsize=4)
def table(architecture: str) -> dict[GemmShape, GemmConfig]:
    """Measured configurations; empty if none were measured on the architecture."""
    path = FOLDER / f"{architecture}.json"
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["entries"]
    return {GemmShape(**entry["shape"]): GemmConfig(**entry["config"]) for entry in entries}


def write_table(folder: Path, architecture: str, entries: dict[GemmShape, GemmConfig], measured_on: str) -> Path:
    """Write measured configurations to a table, in `FOLDER` that which a release ships. Returns the file."""
    path = folder / f"{architecture}.json"
    rows = [{"shape": asdict(shape), "config": asdict(config)} for shape, config in entries.items()]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'{{\n  "measured_on": {json.dumps(measured_on)},\n  "entries": [\n{lines}\n  ]\n}}\n')
    forget()
    return path


def forget() -> None:
    """Clear the cached tables."""
    table.cache_clear()
    _choose.cache_clear()


def bytes_of_columns(format: str, num_columns: int) -> int:
    """Bytes of the values of `num_columns` columns of a row, without scales."""
    return num_columns * (FLOAT_BITS.get(format) or int(format.strip("intfpq")[0])) // 8


def has_codes(format: str) -> bool:
    """Whether values are codes with scales."""
    return format not in FLOAT_BITS


def rule(shape: GemmShape, num_programs: int) -> GemmConfig:
    """The configuration without measurements; `num_programs` is the number of multiprocessors."""
    if shape.num_tokens <= VECTOR_TOKENS:
        return _vector_rule(shape, num_programs)
    return _skinny_rule(shape, num_programs)


def _vector_rule(shape: GemmShape, num_programs: int) -> GemmConfig:
    """Tiles of 16 KiB, 128 bytes per thread; tall with many rows, wide with few.

    With floats, one load of all threads is a row, so a thread has the same columns of every row and its activations
    need not pass through shared memory. With codes a load has too many columns for that, and tiles have twice as many
    rows.
    """
    # 128 registers per thread leave room for four programs per multiprocessor. Short rows are loaded at once, with
    # fewer.
    enough = num_programs * 5 // 2 if shape.num_columns > SHORT_ROW else num_programs * 3 // 2
    tallest = (16 if has_codes(shape.format) else 8) // (2 if shape.op == "swiglu" else 1)
    least = 4 if has_codes(shape.format) and shape.op != "swiglu" else 2
    block_n = next((n for n in (16, 8, 4) if n <= tallest and _ceil(shape.num_rows, n) >= enough), least)
    tile_bytes = VECTOR_TILE_BYTES // (2 if shape.op == "swiglu" else 1)
    block_k = max(64, group_of(shape.format))
    while block_k < shape.num_columns and bytes_of_columns(shape.format, 2 * block_k) * block_n <= tile_bytes:
        block_k *= 2
    num_blocks = _ceil(shape.num_columns, block_k)
    wanted = enough // _ceil(shape.num_rows, block_n) if shape.op == "linear" else 1
    return GemmConfig(1, block_n, block_k, _even_split(num_blocks, wanted), num_warps=4, num_stages=1)


def _skinny_rule(shape: GemmShape, num_programs: int) -> GemmConfig:
    """Tiles of 64 rows with 48 KiB in flight, and one or two programs per multiprocessor."""
    block_m = max(8, shape.num_tokens)
    block_k = max(64 if shape.format == "f32" else 128, group_of(shape.format))
    num_blocks = _ceil(shape.num_columns, block_k)
    most_split = min(num_blocks, 8) if shape.op == "linear" and block_m <= SKINNY_TOKENS else 1
    if block_m > SKINNY_TOKENS:  # every program reads all tokens, so programs should be few and tall
        block_n = 64
    else:
        block_n = next((n for n in (64, 32) if _ceil(shape.num_rows, n) * most_split >= num_programs), 16)
    split = _even_split(num_blocks, min(most_split, 2 * num_programs // _ceil(shape.num_rows, block_n)))
    tile_bytes = block_n * bytes_of_columns(shape.format, block_k) * (2 if shape.op == "swiglu" else 1)
    tokens_bytes = block_m * block_k * (4 if shape.format == "f32" else 2)
    num_stages = max(3, min(8, 48 * 1024 // tile_bytes))
    while num_stages > 2 and num_stages * (tile_bytes + tokens_bytes) > 108 * 1024:
        num_stages -= 1
    return GemmConfig(block_m, block_n, block_k, split, num_warps=4, num_stages=num_stages)


def candidates(
    op: Op, *, num_tokens: int, num_rows: int, num_columns: int, format: str, device: torch.device
) -> Iterator[GemmConfig]:
    """Configurations to time for a shape: the rule's choice first, then its neighbours."""
    shape = GemmShape(op, bucket_of(num_tokens), num_rows, num_columns, format)
    first = rule(shape, _num_programs(device))
    seen = {first}
    yield first
    for config in _neighbours(shape, first):
        if config not in seen and _fits(shape, config):
            seen.add(config)
            yield config


def _neighbours(shape: GemmShape, first: GemmConfig) -> Iterator[GemmConfig]:
    splits = (first.split, 1, 2, 4, 8) if shape.op == "linear" and shape.num_tokens <= SKINNY_TOKENS else (1,)
    if shape.num_tokens <= VECTOR_TOKENS:
        for block_n in (1, 2, 4, 8, 16, 32):
            for block_k in (256, 512, 1024, 2048, 4096):
                for num_warps in (1, 2, 4, 8):
                    for split in splits[:3]:
                        yield GemmConfig(1, block_n, block_k, split, num_warps, 1)
        return
    for block_n in (16, 32, 64, 128):
        for block_k in (64, 128, 256):
            for num_warps, num_stages in ((4, 3), (4, 4), (4, 6), (8, 3), (8, 4), (2, 4)):
                for split in splits:
                    yield GemmConfig(first.block_m, block_n, block_k, split, num_warps, num_stages)


def _fits(shape: GemmShape, config: GemmConfig) -> bool:
    """Whether the tile fits into registers or shared memory, and no split is empty."""
    if config.block_k < group_of(shape.format) or config.block_k >= 2 * max(shape.num_columns, 64):
        return False
    if config.split != _even_split(_ceil(shape.num_columns, config.block_k), config.split):
        return False
    halves = 2 if shape.op == "swiglu" else 1
    tile_bytes = bytes_of_columns(shape.format, config.block_k) * config.block_n * halves
    if shape.num_tokens <= VECTOR_TOKENS:
        if has_codes(shape.format) and config.block_n * halves < 4:  # see vector.py
            return False
        return 32 <= tile_bytes // (32 * config.num_warps) <= 256
    tokens_bytes = config.block_m * config.block_k * 2
    return config.num_stages * (tile_bytes + tokens_bytes) <= 160 * 1024


def group_of(format: str) -> int:
    """Columns of a group of `DeviceMatrix`; 0 for floats."""
    return K_QUANT_GROUP if format.endswith("_k") else int(format.partition("g")[2] or 0)


def _even_split(num_blocks: int, wanted: int) -> int:
    """The smallest split with as few blocks per program as `wanted` gives; none is empty then."""
    wanted = min(max(1, wanted), num_blocks)
    return _ceil(num_blocks, _ceil(num_blocks, wanted))


def _ceil(number: int, step: int) -> int:
    return -(-number // step)
