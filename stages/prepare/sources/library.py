"""Well-known names of models, such as `qwen3:0.6b`: library.toml says which repository of the hub each is."""

import tomllib
from functools import cache
from pathlib import Path

TABLE = Path(__file__).with_suffix(".toml")
NOT_TAGS = ("architecture", "default")
LATEST = "latest"
"""Ollama's tag for the default one."""


@cache
def table() -> dict[str, dict[str, str]]:
    """The keys of each name."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def tags_of(name: str) -> list[str]:
    """The tags of a name of the table, in its order."""
    return [tag for tag in table()[name] if tag not in NOT_TAGS]


def names() -> list[str]:
    """All names, alone and with each tag."""
    return [full for name in table() for full in (name, *(f"{name}:{tag}" for tag in tags_of(name)))]


def find(word: str) -> str | None:
    """The hub id of a name: NAME, NAME:TAG, or NAME:TAG-QUANTIZATION as in Ollama's library (`qwen2.5:0.5b-q8_0`, or
    `…-instruct-q8_0`). None if the table lacks it."""
    name, _, tag = word.lower().partition(":")
    if (entry := table().get(name)) is None:
        return None
    if tag in ("", LATEST):
        return entry[entry["default"]]
    if tag in tags_of(name):
        return entry[tag]
    size, _, rest = tag.partition("-")
    quantization = rest.removeprefix("it-").removeprefix("instruct-").removeprefix("text-")
    if size in tags_of(name) and quantization and "-" not in quantization:
        return entry[size] + (f":{quantization}" if quantization not in ("instruct", "it", "text") else "")
    return None
