"""The examples of docs/python.md, run in order as one program."""

import re
from pathlib import Path

import pytest

from tests.e2e.client.scripts import ROOT, Script

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("smollm2_dir")
def test_the_examples_run(tmp_path: Path) -> None:
    blocks = BLOCK.findall((ROOT / "docs" / "python.md").read_text())
    assert len(blocks) == 15
    with Script(tmp_path, "".join(blocks)) as script:
        assert script.end(150) == 0, script.errors
        shown = "\n".join(script.lines)
        assert "Athens" in shown
        assert "100 answers" in shown
        assert " is Athens" in shown
        assert '["{' in shown.replace("'", '"')
        assert "SmolLM2-135M-Instruct 1024" in shown
        assert "1 context_length_exceeded prompts[1]: this model's maximum context length is 8192 tokens" in shown
        assert script.errors == ""
        assert "starting" in (tmp_path / "server.log").read_text()
