"""The fields of every request that generates: sampling parameters, and what constrains the output.

    response_format                          OpenAI's: text, json_object, json_schema; vLLM's structural_tag; a schema
                                             may stand where llama.cpp takes it
    structured_outputs                       vLLM's: json, json_object, regex, choice, grammar or structural_tag
    guided_json, _regex, _choice, _grammar   vLLM's older names of these

One of them may be set, with one kind in it. Schemas are not decoded: fields of type `Raw` hold JSON.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Raw

from pipeline.client.protocol.sampling import SamplingFields

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
    whitespace_pattern: Annotated[str, Meta(description="Not supported.")] | None = None


class GenerationFields(SamplingFields, kw_only=True, omit_defaults=True):
    """Fields of every route that generates: sampling parameters, and what constrains the output."""

    response_format: Annotated[ResponseFormat, Meta(description="A format of the output.")] | None = None
    structured_outputs: Annotated[StructuredOutputsParam, Meta(description="What the output must match.")] | None = None
    guided_json: Annotated[Raw, Meta(description="As structured_outputs.json.", extra_json_schema=OBJECT_OR_TEXT)] = (
        Raw()
    )
    guided_regex: Annotated[str, Meta(description="As structured_outputs.regex.")] | None = None
    guided_choice: Annotated[list[str], Meta(description="As structured_outputs.choice.")] | None = None
    guided_grammar: Annotated[str, Meta(description="As structured_outputs.grammar.")] | None = None
    guided_decoding_backend: Annotated[str, Meta(description="No effect: there is only one backend.")] | None = None
