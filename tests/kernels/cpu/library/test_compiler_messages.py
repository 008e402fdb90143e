"""What users hear of the compiler and the cache, and which compiler is used."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.kernels.cpu.build import default_cache_root
from pipeline.kernels.cpu.compiler import BuildError, CompileError, Compiler, NoCompiler, find_compiler
from tests.kernels.cpu.library.bench import SOURCE, Bench


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
