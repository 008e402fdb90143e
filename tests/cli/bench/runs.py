"""A run of `pipeline bench` against a fake server, with its report."""

import json
from typing import Any

import pytest

from pipeline.__main__ import main
from tests.cli.fake_server import FakeServer


def bench(server: FakeServer, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], str]:
    """Run at temperature 0, unless `options` set another. Returns exit code, report and standard error."""
    code = main(["bench", "--url", server.url, "--json", "-", "--temperature=0", *options])
    out, err = capsys.readouterr()
    return code, json.loads(out), err
