"""The files, and what each must hold."""

import json
from pathlib import Path
from typing import Any

from tools.export_protocol.page import with_tables
from tools.export_protocol.schema import schema
from tools.export_protocol.vectors import vectors

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "docs" / "protocol.schema.json"
PAGE = ROOT / "docs" / "protocol.md"
VECTORS = ROOT / "tests" / "protocol" / "vectors.json"


def published() -> dict[Path, str]:
    """What each file must hold."""
    page = PAGE.read_text() if PAGE.exists() else ""
    return {SCHEMA: _json(schema()), VECTORS: _json(vectors()), PAGE: with_tables(page)}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"
