"""An unwritable file is an error before the work, and the check leaves no trace."""

import os
from pathlib import Path

import pytest

from pipeline.cli.out_file import require_writable
from pipeline.config.load import ConfigError


def test_the_check_changes_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "new", "--out")
    assert not (tmp_path / "new").exists()
    (tmp_path / "old").write_bytes(b"old")
    require_writable(tmp_path / "old", "--out")
    assert (tmp_path / "old").read_bytes() == b"old"
    os.mkfifo(tmp_path / "pipe")
    require_writable(tmp_path / "pipe", "--out")  # opening it would block until a reader opens it


def test_an_unwritable_file_is_named_with_its_option(tmp_path: Path) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x", "No such file or directory"),
        (Path("a\0b"), "null"),
    ):
        with pytest.raises(ConfigError) as caught:
            require_writable(path, "--out")
        [problem] = caught.value.problems
        assert problem.startswith(f"--out {path}: can't be written: ")
        assert reason in problem
