"""Commands, run in the test's process."""

from pathlib import Path

import pytest

from pipeline.__main__ import main

ROOT = Path(__file__).resolve().parents[3]


def run(*argv: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Returns exit code, standard output and standard error."""
    try:
        code = main(argv)
    except SystemExit as stopped:
        assert isinstance(stopped.code, int)
        code = stopped.code
    out, err = capsys.readouterr()
    return code, out, err
