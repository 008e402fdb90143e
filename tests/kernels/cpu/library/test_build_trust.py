"""Libraries that another user could have written are not loaded: loading one runs its code."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import own_files
from pipeline.kernels.cpu import build as build_module
from pipeline.kernels.cpu import compiler
from pipeline.kernels.cpu.compiler import BuildError
from tests.kernels.cpu.library.bench import Bench, answer

Give = Callable[[Path], None]
OWN = f"kernels-{os.geteuid()}"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Give]:
    """Makes a file one of another user: only root could do so really."""
    given: dict[int, int] = {}
    is_trusted = own_files.is_trusted

    def give(path: Path) -> None:
        given[path.lstat().st_ino] = os.open(path, os.O_PATH | os.O_NOFOLLOW)  # so that no other file gets its number

    def trusted(info: os.stat_result) -> bool:
        return is_trusted(info) and info.st_ino not in given

    monkeypatch.setattr(own_files, "is_trusted", trusted)
    yield give
    for fd in given.values():
        os.close(fd)


def test_files_of_this_user_and_of_root_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_files.is_trusted(tmp_path.stat()) and own_files.is_trusted(Path("/").stat())
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert own_files.is_trusted(tmp_path.stat()) == (tmp_path.stat().st_uid == 0)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_of_this_user_is_closed_to_others(bench: Bench, mode: int) -> None:
    """As a umask of 002 or 000 leaves it. What is in it may be from others."""
    library = bench.build()
    library.chmod(0o775)
    bench.kernels.chmod(mode)
    assert bench.build() == library and bench.num_compiled == 2
    assert not stat.S_IMODE(bench.kernels.stat().st_mode) & 0o022 and not library.stat().st_mode & 0o022
    assert bench.build() == library and bench.num_compiled == 2


def test_with_any_umask_it_is_compiled_once(bench: Bench) -> None:
    before = os.umask(0)
    try:
        assert answer(bench.build()) == answer(bench.build()) == 42
    finally:
        os.umask(before)
    assert bench.num_compiled == 1


def test_folders_are_made_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not closed later: a first start compiles for long."""
    modes: list[int] = []
    compile_it = build_module._compile

    def compiling(*args: Any) -> None:
        modes.extend(stat.S_IMODE(path.stat().st_mode) for path in (bench.cache_root, bench.kernels))
        compile_it(*args)

    monkeypatch.setattr(build_module, "_compile", compiling)
    before = os.umask(0o002)
    try:
        bench.build()
    finally:
        os.umask(before)
    assert modes == [0o755, 0o700]


def test_where_others_can_rename_the_folder_the_default_cache_is_used(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    bench.cache_root.mkdir()
    bench.cache_root.chmod(0o1777)
    assert bench.build().parent == bench.kernels, "in a sticky folder they can't"
    for mode in (0o777, 0o775):
        bench.cache_root.chmod(mode)
        assert bench.build().parent == tmp_path / "home" / "pipeline" / "kernels"
    assert bench.num_compiled == 2 and any("rename what is in" in line for line in bench.log_lines)
    (tmp_path / "home" / "pipeline").chmod(0o775)
    assert bench.build().parent == tmp_path / "home" / "pipeline" / "kernels"
    assert (tmp_path / "home" / "pipeline").stat().st_mode & 0o777 == 0o755


def test_a_folder_that_another_user_makes_meanwhile_is_not_used(
    bench: Bench, give_away: Give, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir = Path.mkdir

    def racing(path: Path, *args: Any, **options: Any) -> None:
        if path == bench.kernels and not path.exists():
            mkdir(path)
            give_away(path)
        mkdir(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", racing)
    assert bench.build().parent == bench.cache_root / OWN
    assert not list(bench.kernels.iterdir())


def test_a_folder_in_place_of_the_open_one_gets_no_files(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner of a folder above may rename it while the compiler runs, and put links in its place."""
    (victim := tmp_path / "victim").write_text("precious")
    run = compiler.run

    def late(command: tuple[str, ...], timeout_s: float, folder: Path, *others: Any) -> tuple[int | None, str]:
        if partials := list(bench.kernels.glob(".partial-*")):
            (partial,) = partials
            bench.kernels.rename(tmp_path / "moved")
            (bench.kernels / partial.name).mkdir(parents=True)
            (bench.kernels / partial.name / "library.so").symlink_to(victim)
            (bench.kernels / f"{partial.name.removeprefix('.partial-').rpartition('-')[0]}.log").symlink_to(victim)
        code, _ = run(command, timeout_s, folder, *others)
        return code, "a warning"

    monkeypatch.setattr(build_module, "run", late)
    library = bench.build()
    assert victim.read_text() == "precious"
    kept = tmp_path / "moved" / library.name
    assert answer(kept) == 42 and kept.with_suffix(".log").read_text() == "a warning\n"


def test_a_link_in_place_of_a_library_is_not_followed(bench: Bench, tmp_path: Path) -> None:
    library = bench.build()
    library.rename(tmp_path / "elsewhere.so")
    library.symlink_to(tmp_path / "elsewhere.so")
    assert bench.build() == library and not library.is_symlink() and bench.num_compiled == 2


def test_a_library_of_another_user_is_compiled_again(bench: Bench, give_away: Give) -> None:
    library = bench.build()
    give_away(library)
    assert bench.build() == library and bench.num_compiled == 2


def test_in_a_cache_of_another_user_this_one_has_a_folder_of_its_own(bench: Bench, give_away: Give) -> None:
    library = bench.build()
    give_away(bench.kernels)
    for _ in range(2):
        own = bench.build()
        assert own.parent == bench.cache_root / OWN and own.name == library.name and bench.num_compiled == 2
    assert any("other users can write to" in line for line in bench.log_lines)
    give_away(own.parent)
    with pytest.raises(BuildError, match="remove it, or set cache_dir"):
        bench.build()


@pytest.mark.parametrize("target", ["somewhere", "none"])
def test_a_link_of_another_user_is_not_followed(bench: Bench, give_away: Give, tmp_path: Path, target: str) -> None:
    (tmp_path / "somewhere").mkdir()
    bench.cache_root.mkdir()
    bench.kernels.symlink_to(tmp_path / target)
    give_away(bench.kernels)
    assert bench.build().parent == bench.cache_root / OWN
    assert not list((tmp_path / "somewhere").iterdir())


def test_a_link_of_this_user_to_its_folder_is_followed(bench: Bench, tmp_path: Path) -> None:
    library = bench.build()
    shutil.move(bench.kernels, tmp_path / "moved")
    bench.kernels.symlink_to(tmp_path / "moved")
    assert bench.build() == library and bench.num_compiled == 1
