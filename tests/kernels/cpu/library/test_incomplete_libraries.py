"""A library that is incomplete, damaged or still being compiled is never used, whatever dies meanwhile."""

import fcntl
import hashlib
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.kernels.cpu import build as build_module
from pipeline.kernels.cpu.compiler import BuildError, CompileError
from tests.kernels.cpu.library.bench import PATIENCE_S, Bench, answer, eventually, is_running


def replace(library: Path, data: bytes) -> None:
    """Replace a library's file; the file that this process has mapped does not change."""
    library.unlink()
    library.write_bytes(data)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def seal_nonsense(_: bytes) -> bytes:
    nonsense = b"not a library" * 1000
    return nonsense + hashlib.sha256(nonsense).digest()


@pytest.mark.parametrize("damage", [cut, flip, seal_nonsense, lambda _: b""], ids=["cut", "flip", "nonsense", "empty"])
def test_a_damaged_library_is_compiled_again(damage: Callable[[bytes], bytes], bench: Bench) -> None:
    library = bench.build()
    whole = library.read_bytes()
    replace(library, damage(whole))
    assert bench.build() == library
    assert bench.num_compiled == 2
    assert answer(library) == 42
    data = library.read_bytes()
    assert hashlib.sha256(data[:-32]).digest() == data[-32:]


def test_a_library_that_fails_to_load_is_an_error_and_is_not_compiled_again(bench: Bench) -> None:
    bench.source.write_text('extern "C" int missing(); extern "C" int answer() { return missing(); }\n')
    with pytest.raises(CompileError, match=r"can't be loaded: .*undefined symbol: missing"):
        bench.build()
    assert bench.num_compiled == 1
    assert bench.kept() == []


def test_a_killed_compiler_leaves_no_files(bench: Bench) -> None:
    bench.compile_with('for last; do :; done\necho half > "$last"\nkill -9 $$')
    with pytest.raises(CompileError, match=r"killed by signal 9, perhaps .* want of memory"):
        bench.build()
    assert bench.kept() == []


def test_a_hung_compiler_is_killed_with_its_child_processes(bench: Bench) -> None:
    bench.compile_with(f"sleep 600 &\necho $! > {bench.folder}/pid\nwait")
    with pytest.raises(CompileError, match=r"ended after 1 s"):
        bench.build(timeout_s=1)
    child = bench.pid_in_compiler()
    eventually(lambda: not is_running(child))
    assert bench.kept() == []


def test_a_killed_builder_leaves_no_library_that_would_be_used(bench: Bench) -> None:
    bench.wait_in_compiler()
    killed = bench.start()
    compiler = bench.pid_in_compiler()
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=PATIENCE_S)
    (partial,) = bench.kept()
    assert partial.startswith(".partial-")
    bench.compile_with('exec c++ "$@"')
    library = bench.build()
    assert answer(library) == 42
    assert bench.kept() == [library.name]
    eventually(lambda: not is_running(compiler))


def test_the_compiler_s_own_processes_end_with_the_process_that_wanted_the_library(bench: Bench) -> None:
    """As at Ctrl-C in a first start, when the supervisor kills the executor."""
    bench.compile_with(f"sleep 600 &\necho $! > {bench.folder}/pid\nwait")
    with ended(bench.start()) as killed:
        child = bench.pid_in_compiler()
        assert is_running(child)
        killed.kill()
        eventually(lambda: not is_running(child))


def test_concurrent_builds_compile_once(bench: Bench) -> None:
    gate = bench.wait_in_compiler()
    with ended(bench.start()) as first, ended(bench.start()) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        bench.pid_in_compiler()
        lines = {first.stdout.readline(), second.stdout.readline()}
        assert lines == {
            "compiling the CPU kernels (portable), once: about 20 s\n",
            "another process is compiling the CPU kernels: waiting for it\n",
        }
        gate.write_text("go\n")
        paths = {process.communicate(timeout=PATIENCE_S)[0].splitlines()[-1] for process in (first, second)}
    (path,) = paths
    assert answer(Path(path)) == 42
    assert bench.num_compiled == 1


def test_a_library_is_compiled_while_another_one_is(bench: Bench) -> None:
    """The other one's folder stays, and is removed when its process has been killed."""
    bench.wait_in_compiler()
    with ended(bench.start()) as other:
        compiler = bench.pid_in_compiler()
        try:
            bench.compile_with('exec c++ "$@"')
            bench.write_header("#define ANSWER 43\n")
            library = bench.build()
            assert answer(library) == 43
            assert len(bench.kept()) == 2
            other.kill()
            other.communicate(timeout=PATIENCE_S)
            bench.write_header("#define ANSWER 44\n")
            names = sorted([library.name, bench.build().name])
            assert bench.kept() == names
            eventually(lambda: not is_running(compiler))
        finally:
            other.kill()


class ended:
    """A process that ends with its test."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def __enter__(self) -> subprocess.Popen[str]:
        return self.process

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate(timeout=PATIENCE_S)


def test_a_lock_that_is_never_released_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "LOCK_TIMEOUT_S", 0.2)
    library = bench.build()
    library.unlink()
    bench.log_lines.clear()
    with (bench.kernels / f".lock-{library.stem}").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BuildError, match=r"another process has held .*\.lock-"):
            bench.build()
    assert bench.log_lines == ["another process is compiling the CPU kernels: waiting for it"]
    assert bench.num_compiled == 1
