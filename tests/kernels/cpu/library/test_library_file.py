"""The library that was checked is the one whose code runs, and no two are taken for one."""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import own_files
from pipeline.kernels.cpu import library_file
from tests.kernels.cpu.library.bench import Bench, answer

MARKER = "RAN_BY_THE_TEST_OF_LIBRARIES"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def libraries(bench: Bench) -> Callable[[int], Path]:
    """Compiles a library that gives an answer, and says so in the environment when it is loaded."""

    def compiled(result: int) -> Path:
        bench.source.write_text(
            f'#include <stdlib.h>\nextern "C" int answer() {{ return {result}; }}\n'
            f'__attribute__((constructor)) static void run() {{ setenv("{MARKER}", "{result}", 1); }}\n'
        )
        return bench.build()

    return compiled


def ran() -> str | None:
    """The answer of the library that was loaded last."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    found = getenv(MARKER.encode())
    return found.decode() if found else None


@pytest.fixture
def swap(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Makes the next loading of a library call a function first: the last moment in which others can act."""

    def arrange(act: Callable[[], object]) -> None:
        load = ctypes.CDLL

        def late(*args: Any, **options: Any) -> ctypes.CDLL:
            monkeypatch.setattr(ctypes, "CDLL", load)
            act()
            return load(*args, **options)

        monkeypatch.setattr(ctypes, "CDLL", late)

    return arrange


def test_a_file_in_place_of_the_checked_one_is_not_loaded(
    bench: Bench, libraries: Callable[[int], Path], swap: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    theirs = copy(libraries(66), tmp_path / "theirs.so")
    found = copy(libraries(1), tmp_path / "found.so")  # of another inode: not loaded yet
    swap(lambda: theirs.replace(found))
    assert library_file.load(found).answer() == 1
    assert ran() == "1"


def test_a_folder_in_place_of_the_checked_one_is_not_used(
    bench: Bench, libraries: Callable[[int], Path], swap: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    """The owner of a cache may rename the folders in it. `build` finds a library, and loads it to see if it works."""
    library = libraries(2)
    shutil.copytree(bench.kernels, tmp_path / "theirs")
    shutil.copy(libraries(66), tmp_path / "theirs" / library.name)
    bench.source.write_text(bench.source.read_text().replace("66", "2"))
    copy(library, tmp_path / "copied.so").replace(library)  # as in a process that has not loaded it yet

    def rename() -> None:
        bench.kernels.rename(tmp_path / "ours")
        (tmp_path / "theirs").rename(bench.kernels)

    swap(rename)
    assert bench.build() == library
    assert bench.num_compiled == 2 and ran() == "2"


def test_a_library_in_place_of_the_compiled_one_does_not_run(
    bench: Bench, libraries: Callable[[int], Path], swap: Callable[[Callable[[], object]], None]
) -> None:
    theirs = libraries(66)

    def replace() -> None:
        (partial,) = bench.kernels.glob(".partial-*/library.so")
        copy(theirs, partial.with_suffix(".theirs")).replace(partial)

    swap(replace)
    libraries(3)
    assert ran() == "3"


@pytest.mark.parametrize("with_proc", [True, False])
def test_no_two_libraries_are_taken_for_one(
    libraries: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_proc: bool
) -> None:
    """dlopen compares names first. These have the same path, and get the same number of a descriptor."""
    made = [libraries(result) for result in (4, 5, 6)]
    if not with_proc:
        monkeypatch.setattr(own_files, "PROC", tmp_path / "none")
    path, numbers, answers = tmp_path / "one.so", [], []
    for library in made:
        copy(library, path.with_suffix(".new")).replace(path)
        info, names = path.stat(), set(library_file._names)
        answers.append(library_file.load(path).answer())
        (name,) = library_file._names - names
        (fd,) = [fd for fd in open_descriptors() if is_file(fd, info)]
        numbers.append(fd)
        assert with_proc == name.endswith(f"/{fd}")
        os.close(fd)  # as a function that closes all descriptors of a process
    assert answers == [4, 5, 6] and len(set(numbers)) == 1


def copy(library: Path, path: Path) -> Path:
    shutil.copy(library, path)
    return path


def open_descriptors() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())


def is_file(fd: int, info: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), info)
    except OSError:  # of iterdir itself
        return False


def test_a_library_is_loaded_once_and_keeps_one_descriptor(libraries: Callable[[int], Path]) -> None:
    path = libraries(7)
    before = open_descriptors()
    first, second = library_file.load(path), library_file.load(path)
    assert first._handle == second._handle and first._name == str(path)
    assert open_descriptors() == before, "it was loaded when it was compiled"


def test_the_kernel_and_debuggers_know_the_file(libraries: Callable[[int], Path], tmp_path: Path) -> None:
    """/proc/PID/maps, from which `perf` and `pipeline cache` have their names, and the name that a debugger opens."""
    path = copy(libraries(8), tmp_path / "named.so")
    names = set(library_file._names)
    library_file.load(path)
    assert f" {path}\n" in Path("/proc/self/maps").read_text()
    (name,) = library_file._names - names
    assert name.startswith(f"/proc/{os.getpid()}/fd/") and path.samefile(name)


def test_without_proc_a_warning_says_what_can_happen(
    libraries: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = copy(libraries(9), tmp_path / "ours.so")
    monkeypatch.setattr(own_files, "PROC", tmp_path / "none")
    assert library_file.load(path).answer() == 9
    (record,) = caplog.records
    assert "other users may rename" in record.getMessage() and str(path) in record.getMessage()


@pytest.mark.parametrize("fault", ["open to others", "cut", "folder", "missing", "link"])
def test_a_library_that_fails_its_check_is_an_error(
    libraries: Callable[[int], Path], tmp_path: Path, fault: str
) -> None:
    path = copy(libraries(10), tmp_path / "faulty.so")
    if fault == "open to others":
        path.chmod(0o775)
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    if fault == "folder":
        path.mkdir()
    elif fault == "link":
        path.symlink_to(libraries(10))
    before = open_descriptors()
    with pytest.raises(OSError, match=r"faulty\.so"):
        library_file.load(path)
    assert open_descriptors() == before
    assert answer(libraries(10)) == 10
