"""Structured outputs: converts the fields that constrain the output to one `m.Grammar`. Pure.

    response_format                          OpenAI's: text, json_object, json_schema; vLLM's structural_tag; a schema
                                             may stand where llama.cpp takes it
    structured_outputs                       vLLM's: json, json_object, regex, choice, grammar or structural_tag
    guided_json, _regex, _choice, _grammar   vLLM's older names of these

One of them may be set, with one kind in it. Schemas are passed on as the client wrote them, and bounded in size. Ingest
compiles them, in bounded time.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported

RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


OBJECT = {"type": ["object", "null"]}
OBJECT_OR_TEXT = {"type": ["object", "string", "null"]}
OBJECTS = {"type": ["array", "null"]}
"""JSON schemas of fields that are not decoded"""


class JsonSchemaFormat(msgspec.Struct, omit_defaults=True):
    """`json_schema` of `response_format`"""

    name: Annotated[str, Meta(description="The client's name for it; no effect.")] | None = None
    description: Annotated[str, Meta(description="Changes nothing.")] | None = None
    schema: Annotated[
        Raw,
        Meta(
            description="A JSON Schema: an object. Further properties are not allowed unless it says so.",
            extra_json_schema=OBJECT,
        ),
    ] = Raw()
    strict: Annotated[bool, Meta(description="No effect: the schema is always enforced.")] | None = None


class ResponseFormat(msgspec.Struct, omit_defaults=True):
    """OpenAI's"""

    type: Annotated[str, Meta(extra_json_schema={"enum": list(RESPONSE_FORMATS)})]
    json_schema: JsonSchemaFormat | None = None
    schema: Annotated[
        Raw,
        Meta(
            description="llama.cpp's, with json_object or json_schema: as json_schema.schema.", extra_json_schema=OBJECT
        ),
    ] = Raw()
    structures: Annotated[Raw, Meta(description="structural_tag, older form: the tags.", extra_json_schema=OBJECTS)] = (
        Raw()
    )
    triggers: Annotated[
        Raw, Meta(description="structural_tag, older form: the texts that start a tag.", extra_json_schema=OBJECTS)
    ] = Raw()
    format: Annotated[Raw, Meta(description="structural_tag, newer form.", extra_json_schema=OBJECT)] = Raw()


class StructuredOutputsParam(msgspec.Struct, omit_defaults=True):
    """vLLM's. Exactly one of the first six is set."""

    json: Annotated[
        Raw, Meta(description="A JSON Schema: an object, or its JSON text.", extra_json_schema=OBJECT_OR_TEXT)
    ] = Raw()
    json_object: Annotated[bool, Meta(description="true: any JSON object.")] | None = None
    regex: Annotated[str, Meta(description="A regular expression that the whole output matches.")] | None = None
    choice: Annotated[list[str], Meta(description="The output is one of these.")] | None = None
    grammar: Annotated[str, Meta(description="A grammar in Lark or EBNF.")] | None = None
    structural_tag: Annotated[
        Raw, Meta(description="An object, or its JSON text.", extra_json_schema=OBJECT_OR_TEXT)
    ] = Raw()
    disable_fallback: Annotated[bool, Meta(description="No effect: there is no fallback.")] | None = None
    disable_any_whitespace: Annotated[bool, Meta(description="The JSON output has no white space.")] | None = None
    disable_additional_properties: (
        Annotated[bool, Meta(description="Objects in `json` have no further properties.")] | None
    ) = None
    whitespace_pattern: str | None = None


class StructuredFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The fields of a body."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsParam | None = None
    guided_json: Annotated[Raw, Meta(description="As structured_outputs.json.", extra_json_schema=OBJECT_OR_TEXT)] = (
        Raw()
    )
    guided_regex: Annotated[str, Meta(description="As structured_outputs.regex.")] | None = None
    guided_choice: Annotated[list[str], Meta(description="As structured_outputs.choice.")] | None = None
    guided_grammar: Annotated[str, Meta(description="As structured_outputs.grammar.")] | None = None
    guided_decoding_backend: Annotated[str, Meta(description="No effect: there is only one backend.")] | None = None


def grammar_of(fields: StructuredFields, caps: Caps) -> m.Grammar | None:
    """The grammar of the output; None if it is not constrained. Raises ApiError."""
    found = list(_grammars(fields))
    if len(found) > 1:
        both = f"'{found[0].param}' and '{found[1].param}'"
        raise invalid(found[1].param, f"{both} cannot be combined: each constrains the output", "invalid_value")
    if not found:
        return None
    (grammar,) = found
    return _bounded(grammar, caps)


def _grammars(fields: StructuredFields) -> Iterator[m.Grammar]:
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
