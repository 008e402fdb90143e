"""Bodies of POST /v1/embeddings. Pure."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.client.protocol.request import Dimensions, Pooling, PromptName, UseActivation
from pipeline.http_server import request_ids
from pipeline.stages.gateway.apis.embeddings.reply import EMBEDDINGS
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import (
    InputBody,
    Normalize,
    embedding_request,
    inputs_of,
)


class EmbeddingsBody(InputBody, kw_only=True):
    """POST /v1/embeddings"""

    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 is of float32, little-endian.")] | None
    ) = None
    dimensions: Dimensions | None = None
    pooling: Pooling | None = None
    """Ours"""
    input_type: PromptName | None = None
    prompt_name: PromptName | None = None
    """sentence-transformers' name of the same"""
    normalize: Normalize | None = None
    use_activation: UseActivation | None = None
    """vLLM's name of the same"""


EMBEDDINGS_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}
"""vLLM's fields that are not supported, and the values, besides null, at which they change nothing."""


_decoder = msgspec.json.Decoder(with_unsupported(EmbeddingsBody, EMBEDDINGS_UNSUPPORTED_FIELDS))


def parse_embeddings(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /v1/embeddings. Raises ApiError."""
    return embeddings_request_of(decode(_decoder, body, EMBEDDINGS_UNSUPPORTED_FIELDS), limits)


def embeddings_request_of(decoded: EmbeddingsBody, limits: RequestLimits) -> ParsedRequest:
    """Check a body of POST /v1/embeddings. Raises ApiError."""
    return embedding_request(
        decoded,
        EMBEDDINGS,
        inputs_of(decoded.input, limits, ("input_type", decoded.input_type), ("prompt_name", decoded.prompt_name)),
        "input",
        limits,
        request_id=request_ids.checked(decoded.request_id, "request_id"),
        is_base64=decoded.encoding_format == "base64",
        normalize=normalized(decoded.normalize, decoded.use_activation),
    )


def normalized(normalize: bool | None, use_activation: bool | None) -> bool | None:
    """The value of two names of one field. Raises ApiError."""
    if None not in (normalize, use_activation) and normalize != use_activation:
        raise invalid("normalize", "'normalize' and 'use_activation' are one field: give one of them", "invalid_value")
    return use_activation if normalize is None else normalize
