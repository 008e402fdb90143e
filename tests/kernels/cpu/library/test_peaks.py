"""Measured peaks are within what a machine can have. Tests require no particular speed."""

import platform
from dataclasses import astuple
from pathlib import Path

import pytest

from pipeline.kernels.cpu import peaks as module
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.compiler import ISA_FLAGS
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.kernels.cpu.peaks import SOURCE, bf16_rate, buffer_bytes, cache_bytes, measure

MIB = 1 << 20
GIB = 1 << 30
TEST_S = 0.1

COMPILED: list[Isa] = [isa for isa in ISA_FLAGS if isa != "neon"] if platform.machine() == "x86_64" else available()


@pytest.fixture(scope="module")
def cache_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("isa", COMPILED)
def test_the_source_compiles_without_a_warning(isa: Isa, cache_root: Path) -> None:
    library = build(isa, print, SOURCE, cache_root=cache_root)
    assert not library.with_suffix(".log").exists()


@pytest.mark.parametrize(("isa", "num_threads"), [*((isa, 1) for isa in available()), (available()[0], 2)])
def test_peaks_are_plausible(isa: Isa, num_threads: int, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_free_bytes", lambda: 64 * MIB)  # a small buffer is filled quickly
    peaks = measure(isa, num_threads, TEST_S, print, cache_root=cache_root)
    assert (peaks.isa, peaks.num_threads) == (isa, num_threads)
    assert all(1e8 < rate < 1e15 for rate in astuple(peaks)[2:])
    # Less than one float per cycle would mean that the loop measures something else.
    assert peaks.float32_flop_per_s > 1e9
    assert 1e8 < bf16_rate(isa, num_threads, TEST_S / 10, print, cache_root=cache_root) < 1e15


@pytest.mark.parametrize(("num_threads", "seconds"), [(0, 1.0), (-1, 1.0), (1, 0.0), (1, -1.0)])
def test_an_empty_measurement_is_rejected(num_threads: int, seconds: float, cache_root: Path) -> None:
    with pytest.raises(ValueError, match="nothing can be measured"):
        measure("portable", num_threads, seconds, print, cache_root=cache_root)
    with pytest.raises(ValueError, match="nothing can be measured"):
        bf16_rate("portable", num_threads, seconds, print, cache_root=cache_root)


@pytest.mark.parametrize(
    ("cache", "free", "expected"),
    [
        (32 * MIB, 16 * GIB, 256 * MIB),
        (0, 16 * GIB, 256 * MIB),
        (100 * MIB, 16 * GIB, 800 * MIB),
        (1152 * MIB, 512 * GIB, 4 * GIB),
        (32 * MIB, 512 * MIB, 128 * MIB),
        (32 * MIB, 9 * MIB, 2 * MIB),
        (32 * MIB, 0, 1 * MIB),
    ],
)
def test_the_buffer_exceeds_the_caches_and_leaves_memory_free(cache: int, free: int, expected: int) -> None:
    assert buffer_bytes(cache, free) == expected


def describe_cache(cpus: Path, cpu: int, index: int, level: int, size: str, shared: str) -> None:
    folder = cpus / f"cpu{cpu}" / "cache" / f"index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", shared)):
        (folder / name).write_text(text + "\n")


def test_a_cache_counts_once_for_all_cpus_that_share_it(tmp_path: Path) -> None:
    for cpu in range(4):
        describe_cache(tmp_path, cpu, 0, 1, "32K", str(cpu))
        describe_cache(tmp_path, cpu, 3, 3, "16384K", "0-1" if cpu < 2 else "2-3")
    assert cache_bytes(tmp_path) == 32 * MIB


def test_the_last_described_cache_level_counts(tmp_path: Path) -> None:
    describe_cache(tmp_path, 0, 0, 1, "64K", "0")
    describe_cache(tmp_path, 0, 1, 2, "1024K", "0")
    describe_cache(tmp_path, 0, 2, 3, "", "0")
    assert cache_bytes(tmp_path) == 1 * MIB
    assert cache_bytes(tmp_path / "nothing") == 0
