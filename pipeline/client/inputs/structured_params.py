"""Structured-output parameters, with vLLM's names."""

import json as text_json
from collections.abc import Mapping
from typing import Any

import msgspec

from pipeline.client import protocol as p
from pipeline.client.inputs.checks import shown
from pipeline.client.protocol.generation import KINDS


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True):
    """A constraint on the output: exactly one field is set. The constructor raises TypeError or ValueError that names
    the invalid field. Only the server checks schemas, patterns and grammars."""

    json: Any = None
    """A JSON Schema: a dict, JSON text, or a class that has one (with `model_json_schema`, as pydantic's models)."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A pattern that the whole output matches."""
    choice: list[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """A grammar in Lark or EBNF."""
    structural_tag: Any = None
    """A dict, or JSON text."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = f"not both {given[0]} and {given[1]}" if given else "and has none"
            raise ValueError(f"structured_outputs must have one of {', '.join(KINDS)}, {found}")
        if self.json_object not in (None, True, False):
            raise TypeError(f"json_object must be True or False, not {shown(self.json_object)}")
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be a string, not {shown(value)}")
        if self.choice is not None:
            choice = self.choice
            if not isinstance(choice, (list, tuple)) or not all(isinstance(one, str) for one in choice):
                raise TypeError(f"choice must be a list of strings, not {shown(choice)}")
            msgspec.structs.force_setattr(self, "choice", list(choice))
        for name in ("json", "structural_tag"):
            msgspec.structs.force_setattr(self, name, _text(name, getattr(self, name)))
        if not getattr(self, given[0]):
            raise ValueError(f"{given[0]} must not be empty")

    def on_the_wire(self) -> p.StructuredOutputsParam:
        """The fields for the server."""
        given = {name: value for name in KINDS if (value := getattr(self, name)) is not None}
        for name in ("json", "structural_tag"):
            if name in given:
                given[name] = p.json_text(given[name])
        return p.StructuredOutputsParam(**given)


def _text(name: str, value: Any) -> str | None:
    """The JSON text of a text, a mapping, or a class with `model_json_schema`."""
    if value is None or isinstance(value, str):
        return value
    if callable(schema := getattr(value, "model_json_schema", None)):
        value = schema()
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict or JSON text, not {shown(value)}")
    try:
        return text_json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise type(error)(f"{name} is not valid JSON: {error}") from error
