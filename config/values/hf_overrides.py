"""The setting `hf_overrides`: keys of the model's config.json that have other values."""

from collections.abc import Mapping
from typing import Any

import msgspec

NESTED = "text_config"
"""The object whose keys are overridden one by one; other objects are replaced."""


def parse(text: str) -> dict[str, Any]:
    """The keys and values. Raises ValueError unless the text is empty or a JSON object."""
    if not text.strip():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(
            f"""hf_overrides: needs a JSON object such as {{"max_position_embeddings": 131072}} ({error})"""
        ) from error


def problems_of(text: str) -> list[str]:
    """The sentence about a text that `parse` does not take."""
    try:
        parse(text)
    except ValueError as error:
        return [str(error)]
    return []


def applied(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with other values."""
    inner, given = config.get(NESTED), overrides.get(NESTED)
    merged = {NESTED: {**inner, **given}} if isinstance(inner, dict) and isinstance(given, dict) else {}
    return {**config, **overrides, **merged}
