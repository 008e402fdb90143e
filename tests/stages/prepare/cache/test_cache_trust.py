"""A cache in which other users can rename: what is prepared reaches no folder but its own."""

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline import own_files
from pipeline.config.settings import Settings, SpeculativeSettings
from pipeline.lora.adapter_file import FOLDER, path_of, write
from pipeline.own_files import NotOwn
from pipeline.runtime.model.draft_link import draft_link
from pipeline.stages.prepare import adapters
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import SILENT
from tests.planting import give_away
from tests.rig import PATIENCE_S


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A cache that all users share, without the sticky bit."""
    (root := tmp_path / "cache").mkdir()
    root.chmod(0o777)
    return root


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (victim := tmp_path / "victim").mkdir()
    (victim / "file.lora").write_text("precious")
    os.utime(victim / "file.lora", (0, 0))
    return victim


def is_whole(victim: Path) -> bool:
    return [(one.name, one.read_text()) for one in victim.iterdir()] == [("file.lora", "precious")]


def ensure(root: Path, fill: object) -> Path:
    return Cache(root).ensure("key", "a test", fill, print, 1)  # type: ignore[arg-type]


def test_a_swapped_folder_gets_no_files(root: Path, victim: Path) -> None:
    def fill(folder: Path) -> None:
        (root / ".partial-key").rename(root / "moved")
        (root / ".partial-key").symlink_to(victim)
        (folder / "file.lora").write_text("new")

    with pytest.raises(ModelError, match="another user has replaced"):
        ensure(root, fill)
    assert is_whole(victim) and (root / "moved" / "file.lora").read_text() == "new"
    assert not os.path.lexists(root / "key") and not os.path.lexists(root / ".partial-key")


def test_a_swapped_cache_gets_no_files(root: Path, victim: Path) -> None:
    def fill(folder: Path) -> None:
        root.rename(root.with_name("moved"))
        root.symlink_to(victim)
        (folder / "file.lora").write_text("new")

    ensure(root, fill)
    assert is_whole(victim) and (root.with_name("moved") / "key" / "file.lora").read_text() == "new"


@pytest.mark.parametrize("name", [".partial-key", "key"])
@pytest.mark.parametrize("removes", [False, True])
def test_links_in_place_of_an_entry_are_removed(root: Path, victim: Path, name: str, removes: bool) -> None:
    (root / name).symlink_to(victim)
    if removes:
        Cache(root).remove("key")
    else:
        ensure(root, lambda folder: (folder / "file.lora").write_text("new"))
    assert is_whole(victim) and not (root / name).is_symlink()


def test_a_link_of_another_user_is_no_cache(root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = root / "link"
    link.symlink_to(victim)
    give_away(link, monkeypatch)
    for cache in (link, link / "below"):
        with pytest.raises(ModelError, match="link of another user"):
            ensure(cache, lambda _: None)
        with pytest.raises(NotOwn):
            Cache(link).remove("key")
    assert is_whole(victim)


@pytest.mark.parametrize("umask", [0, 0o002, 0o022, 0o077])
def test_only_its_user_enters_a_folder_that_is_filled(root: Path, umask: int) -> None:
    def fill(folder: Path) -> None:
        modes.append(stat.S_IMODE(folder.stat().st_mode))

    modes: list[int] = []
    before = os.umask(umask)
    try:
        folder = ensure(root, fill)
    finally:
        os.umask(before)
    assert modes == [0o700] and stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


def test_errors_and_children_know_the_folder(root: Path) -> None:
    def fill(folder: Path) -> None:
        command = [sys.executable, "-c", "import sys; open(sys.argv[1], 'x')", str(folder / "of a child")]
        subprocess.run(command, check=True, timeout=PATIENCE_S)
        raise ModelError(f"{folder / 'of a child'} is {(folder / 'of a child').exists()}")

    with pytest.raises(ModelError) as caught:
        ensure(root, fill)
    assert str(caught.value) == f"{root}/.partial-key/of a child is True"


def test_adapters_are_written_and_removed_in_their_folder(
    root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / FOLDER).symlink_to(victim)
    give_away(root / FOLDER, monkeypatch)
    adapters.remove_unused(root)
    assert is_whole(victim)
    with pytest.raises(NotOwn, match="link of another user"):
        write(path_of(root, "id"), "f32", [])
    assert is_whole(victim)
    monkeypatch.undo()
    (root / FOLDER).unlink()
    for name in ("old", "new"):
        write(path_of(root, name), "f32", [])
    os.utime(path_of(root, "old"), (0, time.time() - adapters.KEEP_S - 100))
    adapters.remove_unused(root)
    assert [one.name for one in (root / FOLDER).iterdir()] == ["new.lora"]


def test_the_link_of_a_draft_is_made_in_its_folder(root: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=str(root), speculative=SpeculativeSettings(draft="x"))
    link = draft_link(settings)
    link.parent.symlink_to(victim)
    give_away(link.parent, monkeypatch)
    with pytest.raises(ModelError, match="link of another user"):
        draft.link(settings, root, SILENT)
    assert is_whole(victim)
    monkeypatch.setattr(own_files, "is_trusted", lambda _: True)
    draft.link(settings, root, SILENT)
    assert (victim / link.name).readlink() == root
