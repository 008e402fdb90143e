"""Replies of POST /v2/embed and /v1/embed, as Cohere's clients read them."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from pipeline.stages.gateway.admission.open_bytes import echo_bytes
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.large_json import PackedList, encode_large
from pipeline.stages.gateway.replies.pooled import Vector, vector_of

EmbeddingType = Literal["float", "base64", "binary", "ubinary"]

_encoder = msgspec.json.Encoder()


class EmbeddingsByType(msgspec.Struct, kw_only=True):
    """A list for each of `embedding_types`."""

    float_: Annotated[list[list[float]] | UnsetType, Meta(description="Numbers.")] = msgspec.field(
        default=UNSET, name="float"
    )
    base64: Annotated[list[str] | UnsetType, Meta(description="Base64 of float32, little-endian.")] = UNSET
    binary: Annotated[
        list[list[int]] | UnsetType,
        Meta(description="A bit for each number, 1 if it is not negative; in signed bytes."),
    ] = UNSET
    ubinary: Annotated[list[list[int]] | UnsetType, Meta(description="The same in unsigned bytes.")] = UNSET


class ApiVersion(msgspec.Struct):
    version: str = "2"


class BilledUnits(msgspec.Struct):
    input_tokens: int


class CohereMeta(msgspec.Struct):
    api_version: ApiVersion
    billed_units: BilledUnits


class CohereEmbedReply(msgspec.Struct, kw_only=True):
    """POST /v2/embed"""

    id: str
    response_type: str = "embeddings_by_type"
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: CohereMeta


class OldCohereEmbedReply(msgspec.Struct, kw_only=True):
    """POST /v1/embed"""

    id: str
    response_type: Annotated[
        str, Meta(description="embeddings_floats, or embeddings_by_type if the request has embedding_types.")
    ]
    embeddings: EmbeddingsByType | list[list[float]]
    texts: list[str]
    meta: CohereMeta


@dataclass(frozen=True)
class CohereEmbedDialect(Dialect):
    """/v2/embed"""

    types: list[EmbeddingType]
    texts: list[str]
    is_old: bool = False
    """/v1/embed"""
    is_list: bool = False
    """The reply of /v1/embed has a list of vectors, as none of `types` was asked for."""

    id_prefix = "embd-"
    prompt_field = "texts"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        options = request.parsed.embedding
        assert options is not None
        vectors = [vector_of(one, options) for one in request.sequences]
        by_type: dict[str, Any] = {
            ("float_" if one == "float" else one): PackedList(_encoder.encode(_AS[one](vector)) for vector in vectors)
            for one in self.types
        }
        texts: Any = PackedList(map(_encoder.encode, self.texts))
        meta = CohereMeta(ApiVersion("1" if self.is_old else "2"), BilledUnits(request.num_prompt_tokens))
        if self.is_list:
            floats = OldCohereEmbedReply(
                id=request.id, response_type="embeddings_floats", embeddings=by_type["float_"], texts=texts, meta=meta
            )
            return encode_large(floats)
        return encode_large(
            CohereEmbedReply(id=request.id, embeddings=EmbeddingsByType(**by_type), texts=texts, meta=meta)
        )

    def reply_bytes(self, *, stream: bool) -> int:
        return echo_bytes(self.texts)


def _bits(vector: Vector) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    return np.packbits(vector >= 0)


_AS: dict[EmbeddingType, Callable[[Vector], Any]] = {
    "float": lambda vector: vector.tolist(),
    "base64": lambda vector: base64.b64encode(vector.tobytes()).decode(),
    "binary": lambda vector: (_bits(vector).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vector: _bits(vector).tolist(),
}
assert set(_AS) == set(get_args(EmbeddingType))
