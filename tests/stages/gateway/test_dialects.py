"""Nothing asks which API a request belongs to, but the files that answer that API."""

import re
from pathlib import Path

import pipeline.stages.gateway as gateway

ASKS = re.compile(r"isinstance\([^)]*dialect|dialect (?:is|==|!=|in)\b|match .*dialect")
ANSWERS = {"apis/ollama/reply.py", "apis/responses/reply.py"}
"""They read what they have kept of the request."""


def test_only_a_dialect_asks_for_itself() -> None:
    (folder,) = map(Path, gateway.__path__)
    asking = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert asking == ANSWERS
