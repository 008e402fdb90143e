"""Bodies of POST /v2/embed and /v1/embed, which are Cohere's. Pure."""

import functools
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.client.protocol.request import Dimensions, Priority
from pipeline.stages.gateway.apis.cohere.reply import CohereEmbedDialect, EmbeddingType
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.build import check_task
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.field_names import FieldNames
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import (
    PoolingBody,
    embedding_options,
    inputs_of,
    pooling_request,
)

PROMPTS = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's values of `input_type`, which its clients always send, and the prompts that they mean: the first that the
model has. A model without it has none for this."""

BITS = 8
"""Numbers in a byte of a binary embedding."""


class TextPart(msgspec.Struct):
    type: Literal["text"]
    text: str


class EmbedInput(msgspec.Struct):
    content: Annotated[list[TextPart], Meta(min_length=1, description="Parts of one text.")]


class OldCohereEmbedBody(msgspec.Struct, kw_only=True):
    """POST /v1/embed"""

    model: Annotated[str, Meta(description="Default the served model.")] | None = None
    texts: list[str] | None = None
    inputs: Annotated[list[EmbedInput], Meta(description="In place of texts.")] | None = None
    input_type: (
        Annotated[
            str,
            Meta(
                description="The prompt of the model's files that goes before each text. search_query, "
                "search_document, classification and clustering mean the model's own for that, if it has one."
            ),
        ]
        | None
    ) = None
    embedding_types: Annotated[list[EmbeddingType], Meta(description="Default float.")] | None = None
    output_dimension: Dimensions | None = None
    truncate: (
        Annotated[
            Literal["NONE", "START", "END"],
            Meta(description="Which end of a text is cut if it is too long; NONE refuses it. Default END."),
        ]
        | None
    ) = None
    max_tokens: Annotated[int, Meta(ge=1, lt=2**31, description="Cut texts to this many tokens.")] | None = None
    priority: Priority | None = None
    """vLLM's"""


class CohereEmbedBody(OldCohereEmbedBody, kw_only=True):
    """POST /v2/embed"""

    model: str


COHERE_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {"images": ([],)}

_decoder = msgspec.json.Decoder(with_unsupported(CohereEmbedBody, COHERE_UNSUPPORTED_FIELDS))
_old_decoder = msgspec.json.Decoder(with_unsupported(OldCohereEmbedBody, COHERE_UNSUPPORTED_FIELDS))
_NAMES = FieldNames(
    (
        (r"dimensions\b", "output_dimension"),
        (r"truncate_prompt_tokens\b", "max_tokens"),
    )
)


def parse_embed(body: bytes, limits: RequestLimits, *, is_old: bool = False) -> ParsedRequest:
    """Read the body of POST /v2/embed, or of /v1/embed, whose reply has another form. Raises ApiError."""
    decoder: Any = _old_decoder if is_old else _decoder
    decoded: OldCohereEmbedBody = decode(decoder, body, COHERE_UNSUPPORTED_FIELDS)
    check_task("embed", decoded.model, limits)
    param, texts = _texts(decoded)
    cuts = (decoded.truncate or "END") != "NONE"
    if not cuts and decoded.max_tokens is not None:
        raise unsupported("max_tokens", "together with truncate = NONE")
    fields = PoolingBody(
        model=decoded.model,
        truncate_prompt_tokens=(decoded.max_tokens or -1) if cuts else None,
        truncation_side="left" if decoded.truncate == "START" else "right",
        priority=decoded.priority,
    )
    types: list[EmbeddingType] = list(dict.fromkeys(decoded.embedding_types or ["float"]))
    dialect = CohereEmbedDialect(types, texts, is_old, is_list=is_old and not decoded.embedding_types)
    inputs: Any = texts  # lists are invariant
    try:
        make = inputs_of(inputs, limits, ("input_type", _prompt_of(decoded.input_type, limits)), param=param)
        embedding = embedding_options(decoded.output_dimension, limits)
        _check_bits(types, decoded.output_dimension, limits)
        return pooling_request(fields, "embed", dialect, make, param, limits, embedding=embedding)
    except ApiError as error:
        raise _NAMES.renamed(error) from error


parse_old_embed = functools.partial(parse_embed, is_old=True)
"""Reads the body of POST /v1/embed. Raises ApiError."""


def _texts(decoded: OldCohereEmbedBody) -> tuple[str, list[str]]:
    """The field with the texts, and they. Raises ApiError."""
    match decoded.texts, decoded.inputs:
        case None, None:
            raise invalid("texts", "'texts' or 'inputs' is required")
        case list(texts), None:
            if not texts:
                raise invalid("texts", "'texts' must not be an empty array", "invalid_value")
            return "texts", texts
        case None, list(inputs):
            if not inputs:
                raise invalid("inputs", "'inputs' must not be an empty array", "invalid_value")
            return "inputs", ["".join(part.text for part in one.content) for one in inputs]
    raise invalid("inputs", "'inputs' is not allowed together with 'texts'", "invalid_value")


def _prompt_of(input_type: str | None, limits: RequestLimits) -> str | None:
    """The name of a prompt of the model."""
    if input_type is None or (meant := PROMPTS.get(input_type)) is None:
        return input_type
    has = {name.casefold(): name for name in limits.pooler.prompts}
    return next((has[name] for name in meant if name in has), None)


def _check_bits(types: list[EmbeddingType], dimensions: int | None, limits: RequestLimits) -> None:
    length = dimensions or limits.hidden_size
    binary = next((one for one in types if one in ("binary", "ubinary")), None)
    if binary is not None and length is not None and length % BITS:
        message = f"'embedding_types' can't have '{binary}': an embedding of {length} numbers doesn't fill whole bytes"
        raise invalid("embedding_types", message, "invalid_value")
