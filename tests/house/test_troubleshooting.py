"""docs/troubleshooting.md quotes messages that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
QUOTED = re.findall(r"\*\*`([^`]+)`\*\*", (ROOT / "docs" / "troubleshooting.md").read_text("utf-8"))
FOLDERS = ("pipeline", "stages", "kernels", "shm", "config")


def _sources() -> str:
    """All Python sources and the Makefile, with texts joined that stand in several parts."""
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")) if not path.is_symlink()]
    text = "\n".join(path.read_text("utf-8") for path in [*files, ROOT / "Makefile"])
    return re.sub(r"\"\s*\n\s*f?\"", "", text)


SOURCES = _sources()
MAX_VALUE_CHARS = 60
"""Of an expression in braces, which stands for what differs."""


@pytest.mark.parametrize("message", QUOTED, ids=[one[:40] for one in QUOTED])
def test_a_quoted_message_is_one_of_the_products(message: str) -> None:
    parts = [part.strip() for part in re.split(r"…|execute\.0|\n\s*|Address already in use", message)]
    words = [re.escape(part) for part in parts if len(part.strip(" :;()")) >= 2]
    assert re.search(f".{{,{MAX_VALUE_CHARS}}}".join(words), SOURCES), "no message has these words in this order"


def test_there_are_messages() -> None:
    assert len(QUOTED) >= 15
