"""Kernels are compiled once and cached; an incomplete library is never used."""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.kernels.cpu import build as build_module
from pipeline.kernels.cpu import compile_ahead
from pipeline.kernels.cpu import compiler as compiler_module
from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.build import MAX_KEPT, build, default_cache_root
from pipeline.kernels.cpu.compiler import BuildError, CompileError, Compiler, NoCompiler, find_compiler
from pipeline.kernels.cpu.library_file import load

ROOT = Path(__file__).resolve().parents[4]
PATIENCE_S = 60

SOURCE = '#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n'

BUILD = """
import sys
from pathlib import Path
from pipeline.kernels.cpu.build import build
log = lambda line: print(line, flush=True)
print(build("portable", log, Path(sys.argv[1]), cache_root=Path(sys.argv[2])), flush=True)
"""


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        time.sleep(0.01)


class Bench:
    """A small source, an empty cache, and a compiler that counts its runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.cache_root = folder / "cache"
        self.kernels = self.cache_root / "kernels"
        self.log_lines: list[str] = []
        self.say: Callable[[str], None] = self.log_lines.append
        self.source = folder / "source" / "answer.cpp"
        self.source.parent.mkdir()
        self.source.write_text(SOURCE)
        self.write_header("#define ANSWER 42\n")
        self._monkeypatch = monkeypatch
        self._real = shutil.which("c++")
        assert self._real is not None, "these tests need a C++ compiler"
        self.compile_with(f'exec {self._real} "$@"')

    def write_header(self, text: str) -> None:
        self.source.with_name("answer.h").write_text(text)

    def compile_with(self, script: str, *, version: str = "a compiler, 1.0") -> Path:
        """Set CXX to a shell script that runs `script` to compile. Returns its path."""
        path = self.folder / "compiler"
        path.write_text(
            f"#!/bin/sh\ncase \"$*\" in *--version) echo '{version}'; exit 0 ;; esac\n"
            f"echo compiling >> {self.folder}/count\n{script}\n"
        )
        path.chmod(0o755)
        self._monkeypatch.setenv("CXX", str(path))
        return path

    def wait_in_compiler(self) -> Path:
        """Make the compiler wait for a line in the returned pipe."""
        gate = self.folder / "gate"
        os.mkfifo(gate)
        self.compile_with(f'echo $$ > {self.folder}/pid\nread line < {gate}\nexec {self._real} "$@"')
        return gate

    def pid_in_compiler(self) -> int:
        """The id of the process that waits in the compiler. Waits until it exists."""
        path = self.folder / "pid"
        eventually(lambda: path.exists() and path.read_text().endswith("\n"))
        return int(path.read_text())

    def build(
        self,
        isa: cpu_isa.Isa = "portable",
        *,
        emulate: bool = False,
        quick: bool = False,
        timeout_s: float = PATIENCE_S,
    ) -> Path:
        return build(
            *(isa, self.say, self.source),
            cache_root=self.cache_root,
            emulate=emulate,
            quick=quick,
            timeout_s=timeout_s,
        )

    def start(self) -> subprocess.Popen[str]:
        """`build` in another process, which prints its log lines and then the path."""
        command = (sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{BUILD}")
        arguments = (str(self.source), str(self.cache_root))
        return subprocess.Popen((*command, *arguments), stdout=subprocess.PIPE, text=True)

    @property
    def num_compiled(self) -> int:
        count = self.folder / "count"
        return len(count.read_text().splitlines()) if count.exists() else 0

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.kernels.iterdir() if not path.name.startswith(".lock-"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


def answer(library: Path) -> int:
    result = load(library).answer()
    assert isinstance(result, int)
    return result


# --- compile once ---


def test_a_library_is_compiled_once_and_found_again(bench: Bench) -> None:
    library = bench.build()
    assert library.parent == bench.kernels
    assert answer(library) == 42
    assert bench.build() == library
    assert bench.num_compiled == 1
    assert bench.kept() == [library.name]


def test_log_lines_before_and_after_compiling(bench: Bench) -> None:
    bench.build()
    before, after = bench.log_lines
    assert before == "compiling the CPU kernels (portable), once: about 20 s"
    assert after.startswith("compiled the CPU kernels in ")
    bench.build()
    assert len(bench.log_lines) == 2


def change_source(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.source.write_text(SOURCE + "// more\n")


def change_header(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.write_header("#define ANSWER 43\n")


def add_header(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.source.with_name("another.h").write_text("")


def change_compiler(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copy(bench.folder / "compiler", bench.folder / "another")
    monkeypatch.setenv("CXX", str(copy))


def change_version(bench: Bench, _: pytest.MonkeyPatch) -> None:
    bench.compile_with('exec c++ "$@"', version="a compiler, 1.1")


def change_compiler_options(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"{bench.folder}/compiler -DMORE")


def change_flags(_: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "FLAGS", (*compiler_module.FLAGS, "-DMORE"))


def change_cpu(_: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_isa, "cpuinfo", lambda: "model name : another\nflags : fpu\n")


@pytest.mark.parametrize(
    "change",
    [
        change_source,
        change_header,
        add_header,
        change_compiler,
        change_version,
        change_compiler_options,
        change_flags,
        change_cpu,
    ],
)
def test_every_dependency_of_the_code_changes_the_library(
    change: Callable[[Bench, pytest.MonkeyPatch], None], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.build()
    change(bench, monkeypatch)
    after = bench.build()
    assert after != before
    assert bench.num_compiled == 2
    assert answer(after) == (43 if change is change_header else 42)


def test_an_emulated_instruction_set_has_its_own_library(bench: Bench) -> None:
    bench.write_header(
        "#if defined(ISA_AVX512) && defined(EMULATE)\n#define ANSWER 1\n#else\n#define ANSWER 2\n#endif\n"
    )
    plain, emulated = bench.build(), bench.build("avx512_bf16", emulate=True)
    assert (answer(plain), answer(emulated)) == (2, 1)
    with pytest.raises(ValueError, match="nothing to emulate"):
        bench.build("portable", emulate=True)


def test_each_library_reports_its_instruction_set(bench: Bench) -> None:
    bench.write_header(
        "#if defined(ISA_AVX512)\n#define ANSWER 512\n#elif defined(ISA_AVX2)\n#define ANSWER 2\n"
        "#elif defined(ISA_PORTABLE)\n#define ANSWER 0\n#endif\n"
    )
    answers = {isa: answer(bench.build(isa)) for isa in cpu_isa.available()}
    assert answers == {
        isa: {"amx": 512, "avx512_bf16": 512, "avx512": 512, "avx2": 2, "neon": 0, "portable": 0}[isa]
        for isa in cpu_isa.available()
    }


def test_libraries_of_one_process_share_no_state(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.source.write_text(
        "template <class T> T& counter() { static T count = 0; return count; }\n"
        'extern "C" int answer() { return ++counter<int>(); }\n'
    )
    monkeypatch.delenv("CXX")
    one = bench.build()
    monkeypatch.setenv("CXX", "c++ -DANOTHER")
    other = bench.build()
    assert one != other
    assert [answer(one), answer(one), answer(other)] == [1, 2, 1]


def test_the_most_recently_used_libraries_are_kept(bench: Bench) -> None:
    used = bench.build()
    os.utime(used, (1, 1))
    for i in range(MAX_KEPT + 2):
        for suffix in (".so", ".log"):
            old = bench.kernels / f"old{i}{suffix}"
            old.write_bytes(b"")
            os.utime(old, (1000 + i, 1000 + i))
    assert bench.build() == used  # used now, though compiled long ago
    bench.write_header("#define ANSWER 43\n")
    made = bench.build()
    libraries = {path.name for path in bench.kernels.glob("*.so")}
    assert libraries == {used.name, made.name, *(f"old{i}.so" for i in range(4, MAX_KEPT + 2))}
    assert len(list(bench.kernels.glob("*.log"))) == MAX_KEPT


# --- a first start ---


def test_a_first_start_takes_a_quick_library_and_the_next_one_the_optimized(bench: Bench) -> None:
    quick = bench.build(quick=True)
    assert quick.name.endswith("-quick.so") and answer(quick) == 42
    assert bench.log_lines[0].startswith("compiling the CPU kernels (portable), quickly, and better for the next start")
    assert bench.build(quick=True) == quick and bench.num_compiled == 1
    optimized = bench.build()
    assert optimized != quick and bench.num_compiled == 2
    assert bench.build(quick=True) == optimized and bench.num_compiled == 2


def test_a_quick_library_is_compiled_with_the_same_rounding_and_less_optimization(bench: Bench) -> None:
    compiler = find_compiler()
    for isa in compiler_module.ISA_FLAGS:
        options = compiler.options(isa, emulate=False)
        assert compiler.options(isa, emulate=False, quick=True) == (*options, *compiler_module.QUICK)
        assert "-ffp-contract=off" in options and not {"-ffast-math", "-Ofast"} & set(options)


def test_a_user_hears_that_the_compiler_still_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "PROGRESS_S", 0.05)
    gate = bench.wait_in_compiler()

    def hear(line: str) -> None:
        bench.log_lines.append(line)
        if line.startswith("still") and gate.exists():
            gate.write_text("go\n")
            gate.unlink()

    bench.say = hear
    assert answer(bench.build()) == 42
    assert any(re.fullmatch(r"still compiling the CPU kernels: \d+ s so far", line) for line in bench.log_lines)


def test_the_optimized_library_is_compiled_ahead_in_a_process_that_ends_with_its_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not done within a test's time: it is seen at work in its compiler, and killed."""
    bench.compile_with(f"echo $$ > {bench.folder}/pid\nexec sleep 600")
    process = compile_ahead.start("portable", bench.cache_root)
    assert process is not None
    try:
        compiler = bench.pid_in_compiler()
        assert os.getpriority(os.PRIO_PROCESS, compiler) == 19
        assert Path(f"/proc/{compiler}/oom_score_adj").read_text() == "1000\n"
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    eventually(lambda: not is_running(compiler))


def test_compiling_for_the_next_start_leaves_no_zombie(bench: Bench) -> None:
    bench.compile_with("exit 1")
    process = compile_ahead.start("portable", bench.cache_root)
    assert process is not None
    eventually(lambda: not Path(f"/proc/{process.pid}").exists())


# --- incomplete libraries ---


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


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


# --- messages to the user ---


def test_a_compile_error_shows_its_first_line_and_logs_everything(bench: Bench) -> None:
    bench.source.write_text("int first() { return nonsense; }\nint second() { return rubbish; }\n")
    with pytest.raises(CompileError, match=r"answer\.cpp for portable: .*error: .*nonsense") as raised:
        bench.build()
    (log,) = bench.kept()
    assert str(bench.kernels / log) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "rubbish" in (bench.kernels / log).read_text()


def test_a_compiler_warning_is_logged_and_the_library_is_used(bench: Bench) -> None:
    bench.source.write_text(SOURCE + "static int unused;\n")
    library = bench.build()
    assert "unused" in library.with_suffix(".log").read_text()


def test_a_log_is_deleted_after_a_build_without_warnings(bench: Bench) -> None:
    bench.compile_with("echo no more room >&2; exit 1")
    with pytest.raises(CompileError, match="no more room; all it said is in"):
        bench.build()
    bench.compile_with('exec c++ "$@"')
    library = bench.build()
    assert bench.kept() == [library.name]


def test_the_error_without_a_compiler_names_what_to_install(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(bench.folder / "empty"))
    with pytest.raises(NoCompiler, match=r"c\+\+, g\+\+, clang\+\+.*apt install g\+\+"):
        bench.build()
    assert not bench.cache_root.exists()


@pytest.mark.parametrize(
    ("named", "fault"),
    [
        ("no-such-compiler -O3", "there is no such program"),
        ("'unfinished", "can't be read as a command"),
        ("{folder}/failing", "does not work: it exited with code 3"),
        ("{folder}/not-a-program", "can't be run"),
    ],
)
def test_the_error_names_a_compiler_in_cxx_that_does_not_work(
    named: str, fault: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("failing", "#!/bin/sh\nexit 3\n"), ("not-a-program", "\0")):
        (bench.folder / name).write_text(text)
        (bench.folder / name).chmod(0o755)
    monkeypatch.setenv("CXX", named.format(folder=bench.folder))
    with pytest.raises(NoCompiler, match=fault):
        bench.build()


def test_the_first_compiler_in_path_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("clang++", "g++", "c++"):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho this is {name}\n")
        path.chmod(0o755)
        assert find_compiler() == Compiler((str(path),), f"this is {name}")


def test_only_gcc_gets_flags_that_only_gcc_supports() -> None:
    gcc = Compiler(("/usr/bin/c++",), "c++ (Debian 12.2.0) 12.2.0\nCopyright (C) 2022 Free Software Foundation, Inc.")
    clang = Compiler(("/usr/bin/c++",), "Debian clang version 14.0.6")
    only_gcc = set(gcc.options("portable", False)) - set(clang.options("portable", False))
    assert only_gcc == {"-fno-gnu-unique", "-Wno-maybe-uninitialized", "-Wno-uninitialized"}


def test_a_cache_that_is_not_writable_is_a_clear_error(bench: Bench) -> None:
    bench.cache_root.write_text("a file, not a folder")
    with pytest.raises(BuildError, match=r"cannot keep compiled kernels in .*set cache_dir"):
        bench.build()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    yield tmp_path


def test_the_cache_is_in_the_users_cache_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_cache_root() == home / ".cache" / "pipeline"
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "elsewhere"))
    assert default_cache_root() == home / "elsewhere" / "pipeline"
    monkeypatch.setenv("XDG_CACHE_HOME", "~no-such-user/cache")
    with pytest.raises(BuildError, match="set cache_dir"):
        default_cache_root()
