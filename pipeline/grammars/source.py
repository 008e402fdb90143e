"""Convert a client's grammar to llguidance's format.

Call this only in a worker process: a hostile grammar can make the conversion slow.
"""

import json
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pipeline.grammars.closed import closed
from pipeline.grammars.exact_json import decoded, encoded
from pipeline.grammars.format_names import with_known_formats
from pipeline.grammars.schema import COMPACT, OWN_OPTIONS, STRICT, UnsupportedSchema, check, strict
from pipeline.grammars.simplified import simplified
from pipeline.text.formats.grammar.lark import LarkGrammar

MAX_CHOICES = 10_000
Options = Mapping[str, Any]
"""`STRICT` or `COMPACT`"""

ANY_TEXT = r"/(.|\n)*/"


class InvalidGrammar(Exception):
    """A client's grammar is invalid or not supported. The message is for the client."""


def to_llguidance(kind: str, source: str, tokenizer: LLTokenizer) -> str:
    """The grammar in llguidance's format; `kind` and `source` are as in `Grammar`. Raises Unusable."""
    options = COMPACT if kind.startswith("compact_") else STRICT
    try:
        match kind:
            case "json_object" | "compact_json_object":
                return _schema('{"type": "object"}', options)
            case "json_schema" | "compact_json_schema":
                return _schema(source, options)
            case "closed_schema" | "compact_closed_schema":
                return _schema(source, options, is_closed=True)
            case "regex":
                return LLMatcher.grammar_from_regex(source)
            case "choice":
                return _choice(_json(source, "the choices"))
            case "grammar":
                return LLMatcher.grammar_from_lark(_lark(source))
            case "calls":
                return LLMatcher.grammar_from_lark(_calls(source))
            case "structural_tag" | "compact_structural_tag":
                return _structural_tag(_json(source, "the structural tag"), tokenizer, options)
    except RecursionError:
        raise InvalidGrammar("it is nested too deeply") from None
    except UnicodeEncodeError:  # JSON can spell lone surrogates
        raise InvalidGrammar("it contains a lone surrogate, which is not a valid character") from None
    raise InvalidGrammar(f"there is no kind of grammar {kind!r}")


def _json(source: str, what: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise InvalidGrammar(f"{what} contains {name}, which is not valid JSON")

    try:
        return decoded(source, refuse)
    except ValueError as error:
        raise InvalidGrammar(f"{what} is not valid JSON: {error}") from None


def _schema(source: str, options: Options, *, is_closed: bool = False) -> str:
    schema = _json(source, "the schema")
    return f'{{"grammars": [{{"json_schema": {_fit(schema, options, is_closed=is_closed)}}}]}}'


def _calls(source: str) -> str:
    """The Lark grammar of tool calls."""

    def fit(text: str) -> str:
        return _fit(_json(text, "the schema of a tool"), STRICT, is_closed=True)

    return msgspec.json.decode(source, type=LarkGrammar).lark(fit)


def _fit(schema: Any, options: Options, *, is_closed: bool = False) -> str:
    """A schema's text for the library. Keywords and numbers that the library can't enforce are errors."""
    schema = _checked(schema)
    text = encoded(schema)
    try:
        text = with_known_formats(text, schema)
        return strict(closed(text, schema) if is_closed else text, schema, options)
    except msgspec.DecodeError as error:  # stricter about strings than json.loads
        raise InvalidGrammar(f"it can't be read: {error}") from None


def _checked(schema: Any) -> Any:
    """A schema that the library enforces."""
    if not isinstance(schema, dict | bool):
        raise InvalidGrammar(f"a schema must be an object, true or false, not {_type(schema)}")
    if isinstance(schema, dict) and OWN_OPTIONS in schema:
        raise InvalidGrammar(f"{OWN_OPTIONS!r} is not supported in a schema")
    try:
        check(schema)
        return simplified(schema)
    except UnsupportedSchema as error:
        raise InvalidGrammar(str(error)) from None


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices):
        raise InvalidGrammar("the choices must be an array of strings")
    if not choices:
        raise InvalidGrammar("the list of choices is empty")
    if len(choices) > MAX_CHOICES:
        raise InvalidGrammar(f"there are {len(choices)} choices; the limit is {MAX_CHOICES}")
    # One terminal makes one automaton of all choices; rules would be tried one by one.
    return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(_literal, choices)))


def _literal(text: str) -> str:
    """A Lark string literal. Control characters are escaped."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _lark(source: str) -> str:
    """A grammar in Lark, or in llama.cpp's notation (GBNF, EBNF) with a rule `root`."""
    if not source.strip():
        raise InvalidGrammar("the grammar is empty")
    try:
        return any_to_lark(source)
    except RecursionError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises a plain Exception for missing and duplicate rules
        raise InvalidGrammar(f"it is neither Lark, with a rule `start:`, nor GBNF: {error}") from None


def _structural_tag(tag: Any, tokenizer: LLTokenizer, options: Options) -> str:
    """vLLM's format: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. Text is free up to a trigger,
    which starts a structure."""
    if not isinstance(tag, dict):
        raise InvalidGrammar(f"a structural tag must be an object, not {_type(tag)}")
    if "format" in tag:
        raise InvalidGrammar("structural tags need `structures` and `triggers`; `format` is not supported")
    unknown = sorted(set(tag) - {"type", "structures", "triggers"})
    if unknown or tag.get("type", "structural_tag") != "structural_tag":
        raise InvalidGrammar(f"a structural tag has only `structures` and `triggers`, not {unknown or tag['type']!r}")
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(triggers, list) or not triggers or not all(isinstance(t, str) and t for t in triggers):
        raise InvalidGrammar("`triggers` must be an array of at least one string")
    if not isinstance(structures, list) or not structures:
        raise InvalidGrammar("`structures` must be an array of at least one object")
    rules = [_structure(i, structure, triggers, tokenizer, options) for i, structure in enumerate(structures)]
    names = " | ".join(f"tag_{i}" for i in range(len(rules)))
    return LLMatcher.grammar_from_lark(
        f"%llguidance {{}}\nstart: ({names})* rest\nrest: TEXT\nTEXT: {ANY_TEXT}\n" + "\n".join(rules)
    )


def _structure(i: int, structure: Any, triggers: list[str], tokenizer: LLTokenizer, options: Options) -> str:
    where = f"structures[{i}]"
    if not isinstance(structure, dict) or set(structure) - {"begin", "schema", "end"}:
        raise InvalidGrammar(f"{where} must be an object with `begin`, `schema` and `end`")
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str):
        raise InvalidGrammar(f"`begin` and `end` of {where} must be strings")
    trigger = max((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
    if trigger is None:
        raise InvalidGrammar(f"`begin` of {where} does not start with any of the triggers")
    inner = f"%json {_fit(schema, options)}"
    follows = begin[len(trigger) :]
    body = " ".join(part for part in (follows and _literal(follows), inner, end and _literal(end)) if part)
    if (special := _special(trigger, tokenizer)) is not None:
        return f"tag_{i}: TEXT <[{special}]> {body}"
    return f"trigger_{i}[lazy]: TEXT {_literal(trigger)}\ntag_{i}: trigger_{i} {body}"


def _special(text: str, tokenizer: LLTokenizer) -> int | None:
    """The id of the special token with this text; None if there is none."""
    ids = tokenizer.tokenize_str(text, parse_special=True)
    return ids[0] if len(ids) == 1 and tokenizer.is_special_token(ids[0]) else None


def _type(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", type(None): "null"}
    return names.get(type(value), "a number")
