"""Nothing asks which API a request belongs to, but the files that answer that API."""

import re
from pathlib import Path

import pipeline
import pipeline.stages.gateway as gateway

ASKS = re.compile(r"isinstance\([^)]*dialect|dialect (?:is|==|!=|in)\b|match .*dialect")
ANSWERS = {"apis/ollama/reply.py", "apis/responses/reply.py"}
"""They read what they have kept of the request."""
OF_A_PATH = re.compile(r"""(?<!["`])["'](?:/v1/messages|/v1/responses|/api)\b|\bis_(?:anthropic|ollama|responses)\b""")
TABLES = {"pipeline/deploy/proxy/deadline.py"}
"""It lists routes, of all APIs."""


def test_only_a_dialect_asks_for_itself() -> None:
    (folder,) = map(Path, gateway.__path__)
    asking = {
        str(path.relative_to(folder)) for path in folder.rglob("*.py") if ASKS.search(path.read_text(encoding="utf-8"))
    }
    assert asking == ANSWERS


def test_only_the_table_of_apis_finds_one_from_a_path() -> None:
    root = Path(pipeline.__path__[0]).parent
    paths = [path for folder in ("pipeline", "stages") for path in (root / folder).rglob("*.py")]
    assert len(paths) > 300
    asking = {
        str(path.relative_to(root))
        for path in paths
        if "apis" not in path.parts and OF_A_PATH.search(path.read_text(encoding="utf-8"))
    }
    assert asking == TABLES
