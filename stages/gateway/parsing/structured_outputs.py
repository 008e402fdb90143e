"""Structured outputs: converts the fields that constrain the output to one `m.Grammar`. Pure.

Schemas are passed on as the client wrote them, and bounded in size. Ingest compiles them, in bounded time.
"""

from collections.abc import Iterator

import msgspec
from msgspec import Raw

from pipeline.client.protocol.generation import (
    KINDS,
    RESPONSE_FORMATS,
    GenerationFields,
    ResponseFormat,
    StructuredOutputsParam,
)
from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported


def grammar_of(fields: GenerationFields, caps: Caps) -> m.Grammar | None:
    """The grammar of the output; None if it is not constrained. Raises ApiError."""
    found = list(_grammars(fields))
    if len(found) > 1:
        both = f"'{found[0].param}' and '{found[1].param}'"
        raise invalid(found[1].param, f"{both} cannot be combined: each constrains the output", "invalid_value")
    if not found:
        return None
    (grammar,) = found
    return _bounded(grammar, caps)


def _grammars(fields: GenerationFields) -> Iterator[m.Grammar]:
    if (response := fields.response_format) is not None and response.type != "text":
        yield _of_response_format(response)
    if fields.structured_outputs is not None:
        yield _of_structured_outputs(fields.structured_outputs)
    if _is_given(fields.guided_json):
        yield m.Grammar("json_schema", _text(fields.guided_json, "guided_json"), "guided_json")
    if fields.guided_regex is not None:
        yield m.Grammar("regex", fields.guided_regex, "guided_regex")
    if fields.guided_choice is not None:
        yield _of_choice(fields.guided_choice, "guided_choice")
    if fields.guided_grammar is not None:
        yield m.Grammar("grammar", fields.guided_grammar, "guided_grammar")


def _of_response_format(response: ResponseFormat) -> m.Grammar:
    param = "response_format"
    match response.type:
        case "json_object" if not _is_given(response.schema):
            return m.Grammar("json_object", "", param)
        case "json_object" | "json_schema":
            return _of_schema(response, param)
        case "structural_tag":
            names = ("structures", "triggers", "format")
            given = {name: raw for name in names if _is_given(raw := getattr(response, name))}
            if not given:
                raise invalid(f"{param}.format", f"'{param}.format' is required", None)
            tag = msgspec.json.encode({"type": "structural_tag"} | given)
            return m.Grammar("structural_tag", _utf8(tag, param), param)
    raise invalid(f"{param}.type", f"'{param}.type' must be one of {', '.join(RESPONSE_FORMATS)}", "invalid_value")


def _of_schema(response: ResponseFormat, at: str) -> m.Grammar:
    """OpenAI's place of the schema, or llama.cpp's."""
    schema, param = response.schema, f"{at}.schema"
    if not _is_given(schema):
        if response.json_schema is None:
            raise invalid(f"{at}.json_schema", f"'{at}.json_schema' is required", None)
        schema, param = response.json_schema.schema, f"{at}.json_schema.schema"
        if not _is_given(schema):
            raise invalid(param, f"'{param}' is required", None)
    elif response.json_schema is not None:
        raise invalid(param, f"'{param}' and '{at}.json_schema' cannot be combined", "invalid_value")
    return m.Grammar("closed_schema", _text(schema, param, takes_string=False), param)


def _of_structured_outputs(outputs: StructuredOutputsParam) -> m.Grammar:
    if outputs.whitespace_pattern:
        raise unsupported("structured_outputs.whitespace_pattern")
    given = [name for name in KINDS if _is_asked_for(getattr(outputs, name))]
    if len(given) != 1:
        kinds = f"one of {', '.join(KINDS)}"
        what = f"not both {given[0]} and {given[1]}" if given else "and has none"
        raise invalid("structured_outputs", f"'structured_outputs' must have {kinds}, {what}", "invalid_value")
    (name,) = given
    param = f"structured_outputs.{name}"
    compact = "compact_" if outputs.disable_any_whitespace else ""
    match name:
        case "json":
            kind = compact + ("closed_schema" if outputs.disable_additional_properties else "json_schema")
            return m.Grammar(kind, _text(outputs.json, param), param)
        case "json_object":
            return m.Grammar(f"{compact}json_object", "", param)
        case "regex":
            return m.Grammar("regex", outputs.regex or "", param)
        case "choice":
            return _of_choice(outputs.choice or [], param)
        case "grammar":
            return m.Grammar("grammar", outputs.grammar or "", param)
    return m.Grammar(f"{compact}structural_tag", _text(outputs.structural_tag, param), param)


def _of_choice(choice: list[str], param: str) -> m.Grammar:
    if not choice:
        raise invalid(param, f"'{param}' must not be an empty array", "invalid_value")
    return m.Grammar("choice", msgspec.json.encode(choice).decode(), param)


def _bounded(grammar: m.Grammar, caps: Caps) -> m.Grammar:
    param, size = grammar.param, len(grammar.source)
    if not grammar.kind.endswith("json_object") and not size:
        raise invalid(param, f"'{param}' must not be empty", "invalid_value")
    if size > caps.max_grammar_bytes // 4:  # else it fits in any case
        size = len(grammar.source.encode())
    if size > caps.max_grammar_bytes:
        most = f"the limit is {caps.max_grammar_bytes} (limits.max_grammar_bytes)"
        raise invalid(param, f"'{param}' has {size} bytes, and {most}", "invalid_value")
    return grammar


def _is_given(raw: Raw) -> bool:
    return bytes(raw) not in (b"", b"null")


def _is_asked_for(value: object) -> bool:
    return _is_given(value) if isinstance(value, Raw) else value not in (None, False)


def _text(raw: Raw, param: str, *, takes_string: bool = True) -> str:
    """The JSON of an object, which the client may have put into a string. Raises ApiError."""
    text = _utf8(bytes(raw), param)
    if takes_string and text.startswith('"'):
        try:
            text = msgspec.json.decode(raw, type=str).strip()
        except msgspec.DecodeError as error:
            raise invalid(param, f"'{param}' is not a valid string: {error}", "invalid_value") from error
    if not text.startswith("{"):
        words = " or a string that holds one" if takes_string else ""
        raise invalid(param, f"'{param}' must be an object{words}", "invalid_type")
    return text


def _utf8(data: bytes, param: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise _invalid_utf8(param) from error


def _invalid_utf8(param: str) -> ApiError:
    return invalid(param, f"'{param}' is not valid UTF-8", "invalid_json")
