"""The driver of the check on aarch64 passes on this machine, and the comparison finds every difference."""

import shutil
import struct
from pathlib import Path

import pytest

from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.compiler import find_compiler
from pipeline.kernels.cpu.isa import Isa, available
from pipeline.kernels.cpu.peaks import SOURCE as PEAKS
from tests.kernels.cpu.compile import library_of
from tests.slices import ALL_CASES
from tools.check_aarch64.__main__ import toolchains
from tools.check_aarch64.builds import CheckError, Toolchain
from tools.check_aarch64.compare import differences, read

FLOATS, HALVES = struct.pack("<4f", 1, -2, 0.5, 0), struct.pack("<2H", 0x3F80, 0x4000)


@pytest.fixture(scope="module")
def native() -> Toolchain:
    return Toolchain(find_compiler().command)


@pytest.fixture(scope="module")
def driver(native: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native.driver(tmp_path_factory.mktemp("driver") / "driver")


@pytest.mark.parametrize("isa", available())
def test_threads_do_not_change_a_step(isa: Isa, native: Toolchain, driver: Path, tmp_path: Path) -> None:
    """The driver also checks by itself that chunks change no logits, that sampled ids are allowed, and so on.

    Three of its ten models by default; PIPELINE_ALL_CASES=1 and `python -m tools.check_aarch64` compute all."""
    library, every = library_of(isa), 1 if ALL_CASES else 4
    one, two = (native.run(driver, library, threads, tmp_path / f"{threads}", every) for threads in (1, 2))
    assert differences(one, two) == []
    arrays = dict(read(one))
    assert len(arrays) > 1000 / every
    assert arrays["q4_1, 12-bit activations: decode 12: ids"].size == 12
    assert arrays["bf16: decode 3: logits"].any()


def test_a_library_of_something_else_is_an_error(native: Toolchain, driver: Path, tmp_path: Path) -> None:
    library = build("portable", print, PEAKS)
    with pytest.raises(CheckError, match="exit code 1\nthe library has no function abi_version"):
        native.run(driver, library, 1, tmp_path / "results")


def results(path: Path, *arrays: tuple[str, str, bytes]) -> Path:
    parts = (
        struct.pack("<I", len(name)) + name.encode() + kind.encode() + struct.pack("<Q", len(data)) + data
        for name, kind, data in arrays
    )
    path.write_bytes(b"".join(parts))
    return path


def test_equal_results_do_not_differ(tmp_path: Path) -> None:
    arrays = ("a", "f", FLOATS), ("b", "h", HALVES), ("empty", "i", b"")
    assert differences(results(tmp_path / "one", *arrays), results(tmp_path / "other", *arrays)) == []


@pytest.mark.parametrize(
    ("kind", "data", "changed", "expected"),
    [
        ("f", FLOATS, struct.pack("<4f", 1, -2, 0.75, 0), "a: 1 of 4 values differ, by up to 1.2e-01 of the largest"),
        ("f", FLOATS, struct.pack("<4f", 1, -2, 0.5, -0.0), "a: 1 of 4 values differ, by up to 0.0e+00 of the largest"),
        (
            "f",
            FLOATS,
            struct.pack("<4f", 1, -2, float("inf"), 0),
            "a: 1 of 4 values differ, by up to inf of the largest",
        ),
        ("h", HALVES, struct.pack("<2H", 0x3F81, 0x4001), "a: 2 of 2 values differ"),
        ("i", bytes(8), bytes(7) + b"\x01", "a: 1 of 2 values differ"),
        ("b", b"abc", b"abd", "a: 1 of 3 values differ"),
    ],
)
def test_every_changed_bit_is_found(kind: str, data: bytes, changed: bytes, expected: str, tmp_path: Path) -> None:
    same = "z", "b", b"same"
    (found,) = differences(
        results(tmp_path / "one", ("a", kind, data), same), results(tmp_path / "other", ("a", kind, changed), same)
    )
    assert str(found).startswith(expected)


def test_results_of_other_arrays_can_not_be_compared(tmp_path: Path) -> None:
    one = results(tmp_path / "one", ("a", "f", FLOATS))
    with pytest.raises(ValueError, match=r"other arrays: \['a', 'b'\]"):
        differences(one, results(tmp_path / "other", ("b", "f", FLOATS)))
    with pytest.raises(ValueError, match=r"a has 4 values in .*, 2 in"):
        differences(one, results(tmp_path / "other", ("a", "f", FLOATS[:8])))
    (tmp_path / "cut").write_bytes(one.read_bytes()[:10])
    with pytest.raises(ValueError, match="is incomplete"):
        differences(one, tmp_path / "cut")


def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "available", lambda environ: ["avx2", "portable"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(CheckError, match=r"g\+\+-aarch64-linux-gnu\), qemu-aarch64 \(Debian: qemu-user\)"):
        toolchains("aarch64-linux-gnu-g++", "/usr/aarch64-linux-gnu")


def test_a_machine_without_fused_products_has_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "available", lambda environ: ["neon", "portable"])
    with pytest.raises(CheckError, match="needs an x86-64 CPU with FMA"):
        toolchains("aarch64-linux-gnu-g++", "/usr/aarch64-linux-gnu")


def test_a_warning_of_the_compiler_is_an_error(native: Toolchain, tmp_path: Path) -> None:
    source = tmp_path / "warns.cpp"
    source.write_text("int answer(int unused) { return 42; }\n")
    with pytest.raises(CheckError, match=r"(?s)warns of warns\.cpp:\n.*unused"):
        native.library(tmp_path / "warns.so", (), source)
