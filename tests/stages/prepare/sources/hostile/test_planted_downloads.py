"""Downloads into a cache in which another user has put links and FIFOs."""

import hashlib
import os
from pathlib import Path

import pytest

from pipeline.stages.prepare.sources.hub import download
from tests.stages.prepare.fake_hub import COMMIT, FakeHub
from tests.stages.prepare.sources.test_hub_downloads import ggufs, hub, refused

__all__ = ["ggufs", "hub"]


@pytest.mark.parametrize("planted", ["link", "fifo"])
def test_what_another_user_has_put_where_a_file_goes_is_not_written_to(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path, planted: str
) -> None:
    """As in a cache that several users share."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    digest = hashlib.sha256(ggufs["Tiny-F16.gguf"]).hexdigest()
    path = tmp_path / "hub/models--org--tiny/blobs" / f"{digest}.incomplete"
    path.parent.mkdir(parents=True)
    if planted == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    assert str(path) in refused("org/tiny:F16", tmp_path)
    assert victim.read_bytes() == b"precious"


def test_the_note_of_a_revision_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "refs").mkdir()
    (tmp_path / f"refs/main.{os.getpid()}.tmp").symlink_to(victim)
    download.remember(tmp_path, "main", COMMIT)
    assert victim.read_bytes() == b"precious" and (tmp_path / "refs/main").read_text() == COMMIT
