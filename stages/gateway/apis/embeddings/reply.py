"""Replies of POST /v1/embeddings: one vector for each input, from the model's last hidden states.

Of a model that generates, the default is the vector of the last token, which has seen the whole text."""

import base64
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.large_json import PackedList, encode_large
from pipeline.stages.gateway.replies.pooled import vector_of


class EmbeddingData(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: Annotated[int, Meta(description="Index of the input.")]
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or base64 of float32, little-endian.")]


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsReply(msgspec.Struct):
    """POST /v1/embeddings"""

    object: Annotated[str, Meta(description="list")]
    data: list[EmbeddingData]
    model: str
    usage: EmbeddingUsage


_encoder = msgspec.json.Encoder()


def embedded(request: Request) -> bytes:
    """The response body of a finished request. Raises ApiError if an input has no embedding."""
    options = request.parsed.embedding
    assert options is not None
    data: Any = PackedList(
        _encoder.encode(EmbeddingData(index=i, embedding=encoded(vector_of(one, options), is_base64=options.is_base64)))
        for i, one in enumerate(request.sequences)
    )
    num = request.num_prompt_tokens
    reply = EmbeddingsReply("list", data, request.parsed.model, EmbeddingUsage(num, num))
    return encode_large(reply)


def encoded(numbers: "np.ndarray[Any, np.dtype[np.float32]]", *, is_base64: bool) -> Any:
    """Numbers, or base64 of float32, little-endian."""
    return base64.b64encode(numbers.tobytes()).decode() if is_base64 else numbers.tolist()


class EmbeddingsDialect(Dialect):
    """/v1/embeddings"""

    id_prefix = "embd-"
    prompt_field = "input"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        return embedded(request)


EMBEDDINGS = EmbeddingsDialect()
