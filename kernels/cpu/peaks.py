"""What this machine can do at most, measured: the floor that the time of a step is compared with."""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.kernels.cpu import library_file
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import Isa

SOURCE = Path(__file__).parent / "peaks.cpp"
CPUS = Path("/sys/devices/system/cpu")

NUM_ROUNDS = 5
MIN_BUFFER_BYTES = 256 << 20
MAX_BUFFER_BYTES = 4 << 30
BUFFER_PER_CACHE = 8
PIECE_BYTES = 1 << 20
"""The buffer is read in whole pieces; each thread needs one."""
WHAT = "the measurement of peaks"


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a number of threads reach together with an ISA: medians of short runs."""

    isa: Isa
    num_threads: int
    read_bytes_per_s: float
    """Reading memory far larger than the caches, in huge pages where the system has them."""
    float32_flop_per_s: float
    """float32 products and sums, two operations each, between registers; as below."""
    bf16_flop_per_s: float
    """Products of bfloat16 summed as float32. Without its instruction the kernels compute them as float32, and so does
    this."""
    int8_op_per_s: float
    """Products of bytes by codes of 4 bits, summed as int32, with the widening that this takes with the ISA. Codes of
    8 bits run as fast at avx512, and at half the rate elsewhere."""


def measure(
    isa: Isa, num_threads: int, seconds: float, say: Callable[[str], None], *, cache_root: Path | None = None
) -> Peaks:
    """Measure this machine for about `seconds`, after the measurement has been compiled.

    `isa` is one of those that are available here, `cache_root` as for `build`. Raises BuildError as `build` does,
    ValueError for num_threads < 1 or seconds <= 0, and OSError where memory or threads are not to be had.
    """
    if num_threads < 1 or seconds <= 0:
        raise ValueError(f"nothing can be measured with {num_threads} threads in {seconds} s")
    library = _load(build(isa, say, SOURCE, cache_root=cache_root, what=WHAT, about_s=2))
    num_bytes = max(buffer_bytes(cache_bytes(), _free_bytes()), num_threads * PIECE_BYTES)
    buffer = library.peak_open(num_bytes, num_threads)
    if buffer is None:
        raise OSError(f"{num_bytes >> 20} MiB and {num_threads} threads to measure with are not to be had")
    run_s = seconds / (4 * NUM_ROUNDS)
    try:
        # What is compared is measured in turns, as machines drift.
        rounds = [
            (
                library.peak_read(buffer, num_bytes, num_threads, run_s),
                library.peak_float32(num_threads, run_s),
                library.peak_bf16(num_threads, run_s),
                library.peak_int8(num_threads, run_s),
            )
            for _ in range(NUM_ROUNDS)
        ]
    finally:
        library.peak_close(buffer, num_bytes)
    if any(rate < 0 for rates in rounds for rate in rates):
        raise OSError(f"{num_threads} threads to measure with are not to be had")
    return Peaks(isa, num_threads, *(statistics.median(rates) for rates in zip(*rounds, strict=True)))


def bf16_rate(
    isa: Isa, num_threads: int, seconds: float, say: Callable[[str], None], *, cache_root: Path | None = None
) -> float:
    """`Peaks.bf16_flop_per_s` of one run of `seconds`, for comparisons in turns. Raises as `measure` does."""
    if num_threads < 1 or seconds <= 0:
        raise ValueError(f"nothing can be measured with {num_threads} threads in {seconds} s")
    library = _load(build(isa, say, SOURCE, cache_root=cache_root, what=WHAT, about_s=2))
    rate = float(library.peak_bf16(num_threads, seconds))
    if rate < 0:
        raise OSError(f"{num_threads} threads to measure with are not to be had")
    return rate


def buffer_bytes(cache_bytes: int, free_bytes: int) -> int:
    """How much to read in turns so that next to none of it comes out of a cache, but at most a quarter of what is free.
    Whole pieces, at least one."""
    wanted = min(max(BUFFER_PER_CACHE * cache_bytes, MIN_BUFFER_BYTES), MAX_BUFFER_BYTES, free_bytes // 4)
    return max(wanted // PIECE_BYTES, 1) * PIECE_BYTES


def cache_bytes(cpus: Path = CPUS) -> int:
    """The sum of this machine's caches of the last level; 0 where the system does not say.

    `cpus` is the system's folder of CPUs, in which a cache is described once for each CPU that shares it.
    """
    sizes: dict[tuple[int, str], int] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level = int((cache / "level").read_text())
            shared = (cache / "shared_cpu_list").read_text().strip()
            sizes[level, shared] = int((cache / "size").read_text().strip().removesuffix("K")) * 1024
        except (OSError, ValueError):  # a virtual machine may leave out any of them
            continue
    last = max((level for level, _ in sizes), default=0)
    return sum(size for (level, _), size in sizes.items() if level == last)


def _free_bytes() -> int:
    """What may be taken without swapping, the files that the system has cached included."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo has no MemAvailable")


def _load(path: Path) -> ctypes.CDLL:
    library = library_file.load(path)
    library.peak_open.argtypes = (ctypes.c_size_t, ctypes.c_int)
    library.peak_open.restype = ctypes.c_void_p
    library.peak_close.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.peak_close.restype = None
    library.peak_read.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_double)
    library.peak_read.restype = ctypes.c_double
    for of_products in (library.peak_float32, library.peak_bf16, library.peak_int8):
        of_products.argtypes = (ctypes.c_int, ctypes.c_double)
        of_products.restype = ctypes.c_double
    return library
