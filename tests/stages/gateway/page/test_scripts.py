"""The page's scripts: the tests in js/, under Node's test runner."""

import json
import re
import shutil
from pathlib import Path

from pipeline.stages.gateway.page import files
from tests.e2e.client.packages import run

TESTS = Path(__file__).parent / "js"
RUN_S = 60.0


def test_the_scripts_pass_their_tests(tmp_path: Path) -> None:
    assert shutil.which("node"), "node not found: install Node.js 20 or newer (https://nodejs.org)"
    shutil.copytree(files.FOLDER, tmp_path / "page")
    shutil.copytree(TESTS, tmp_path / "tests")
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    names = sorted(path.name for path in TESTS.glob("*.test.mjs"))
    report = run(["node", "--test", *(f"tests/{name}" for name in names)], tmp_path, RUN_S)
    passed = re.search(r"^(?:#|ℹ) pass (\d+)$", report, re.MULTILINE)
    assert passed and int(passed[1]) >= len(names), report
