"""Replies of POST /v1/embeddings: one vector for each input, from the model's last hidden states.

The default is the vector of the last token, which has seen the whole text; the mean over all tokens is the other
choice. Vectors have length 1, after being cut to `dimensions`. An input is a request of one step, whose token output
is the vector; see pipeline/runtime/token_outputs.py."""

import base64
from http import HTTPStatus
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions
from pipeline.stages.gateway.replies.large_json import PackedList, encode_large


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
        _encoder.encode(EmbeddingData(index=i, embedding=_encoded(vector_of(one, options), options)))
        for i, one in enumerate(request.sequences)
    )
    num = request.num_prompt_tokens
    reply = EmbeddingsReply("list", data, request.parsed.model, EmbeddingUsage(num, num))
    return encode_large(reply)


def vector_of(sequence: SequenceOutput, options: EmbeddingOptions) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """float32 [dimensions], of length 1, or all zeros."""
    if not sequence.token_outputs:
        message = "the request was aborted before all embeddings were computed"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="ended")
    vector = np.frombuffer(bytes(sequence.token_outputs), "<f4").astype(np.float64)[: options.dimensions]
    if not np.isfinite(vector).all():
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the model produced an embedding with NaN or infinity")
    length = float(np.linalg.norm(vector))
    return (vector / length if length else vector).astype("<f4")


def _encoded(vector: "np.ndarray[tuple[int], np.dtype[np.float32]]", options: EmbeddingOptions) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if options.is_base64 else vector.tolist()


class EmbeddingsDialect(Dialect):
    """/v1/embeddings"""

    id_prefix = "embd-"
    prompt_field = "input"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        return embedded(request)


EMBEDDINGS = EmbeddingsDialect()
