"""POST /v1/embeddings: the hidden states of each input's tokens, behind the model's last norm, as one vector.

A decoder is no embedding model by itself: the vector of the last token has seen the whole text, and is the default; the
mean of all may be asked for. A vector is of length 1, cut to `dimensions` or not. An input is a request of one step,
whose record is the vector; see pipeline/runtime/logprob_records.py.
"""

import base64
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.client.protocol import MAX_SALT_CHARS, MAX_TIMEOUT_S
from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import embedding_bytes
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.http import request_ids
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.embedding_options import EmbeddingOptions
from pipeline.stages.gateway.parsing.parse import Ask, Limits, check_model, decode, priority_of
from pipeline.stages.gateway.parsing.prompt_fields import (
    check_prompt_bytes,
    check_truncate,
    most_ids,
    num_prompts,
    prompts_of,
)
from pipeline.stages.gateway.parsing.sampling_fields import Id
from pipeline.stages.gateway.requests import Call, Sequence

POOLING = {"last": m.Pooling.LAST, "mean": m.Pooling.MEAN}


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings"""

    model: Annotated[str, Meta(description="The name that /v1/models gives.")]
    input: Annotated[str | list[str | Id | list[Id]], Meta(description="A text, texts, ids, or lists of ids.")]
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 is of float32, little-endian.")] | None
    ) = None
    dimensions: Annotated[int, Meta(ge=1, description="Keep the first so many numbers; by default all.")] | None = None
    pooling: Annotated[Literal["last", "mean"], Meta(description="Of which tokens; by default last.")] | None = None
    """Ours"""
    truncate_prompt_tokens: (
        Annotated[int, Meta(ge=-1, lt=2**31, description="Keep this many of an input's last tokens; -1: as fit.")]
        | None
    ) = None
    add_special_tokens: Annotated[bool, Meta(description="By default true around texts.")] | None = None
    request_id: Annotated[str, Meta(description="The client's own name for it.")] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31, description="Lower goes first.")] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="From its arrival to its end.")] | None = None


EMBEDDINGS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "normalize": (True,),
    "use_activation": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}
"""vLLM's fields that are not supported, and the values, besides null, at which they change nothing."""


class EmbeddingData(msgspec.Struct, kw_only=True):
    object: str = "embedding"
    index: Annotated[int, Meta(description="Which of the inputs.")]
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


_decoder = msgspec.json.Decoder(with_unsupported(EmbeddingsBody, EMBEDDINGS_NEUTRAL))
_encoder = msgspec.json.Encoder()


def parse_embeddings(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /v1/embeddings. Raises ApiError."""
    asked = decode(_decoder, body, EMBEDDINGS_NEUTRAL)
    check_model(asked.model, limits)
    num = num_prompts(asked.input)
    if num > limits.max_sequences:
        most = f"({limits.max_sequences}): gateway.max_open_requests says how many"
        raise invalid("input", f"{num} inputs are more than this server takes at once {most}")
    hidden_size = limits.hidden_size or 0
    if asked.dimensions is not None and limits.hidden_size is not None and asked.dimensions > hidden_size:
        message = f"'dimensions' must be at most the {hidden_size} that the model has, not {asked.dimensions}"
        raise invalid("dimensions", message, "invalid_value")
    truncate = check_truncate(asked.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompts = prompts_of(asked.input, most_ids(truncate, limits.max_prompt_tokens), "input")
    check_prompt_bytes(prompts, limits.caps.max_prompt_bytes, "input")
    return Ask(
        is_chat=False,
        model=asked.model,
        prompts=prompts,
        n=1,
        max_tokens=1,
        max_tokens_param="input",
        seed=0,
        sampling=m.Sampling(temperature=0.0, pooling=POOLING[asked.pooling or "last"]),
        text=m.TextOptions(record_bytes=embedding_bytes(hidden_size)),
        stream=False,
        include_usage=False,
        prompt_options=m.PromptOptions(asked.add_special_tokens, truncate=truncate),
        prompt_param="input",
        request_id=request_ids.checked(asked.request_id, "request_id"),
        priority=priority_of(asked.priority, limits),
        cache_salt=asked.cache_salt or "",
        timeout_s=asked.timeout_s,
        embedding=EmbeddingOptions(dimensions=asked.dimensions, is_base64=asked.encoding_format == "base64"),
    )


def embedded(call: Call) -> bytes:
    """The body of a response. The call has finished. Raises ApiError where an input has no embedding."""
    options = call.ask.embedding
    assert options is not None
    data = [
        EmbeddingData(index=i, embedding=_told(_vector(one, options), options)) for i, one in enumerate(call.sequences)
    ]
    num = call.num_prompt_tokens
    reply = EmbeddingsReply("list", data, call.ask.model, EmbeddingUsage(num, num))
    return _encoder.encode(reply)


def _vector(sequence: Sequence, options: EmbeddingOptions) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """float32 [dimensions], of length 1: or all zeros, where the model gives nothing else."""
    if not sequence.records:
        message = "the request was ended before it had all embeddings"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="ended")
    vector = np.frombuffer(bytes(sequence.records), "<f4").astype(np.float64)[: options.dimensions]
    if not np.isfinite(vector).all():
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the model gave an embedding that is not finite")
    length = float(np.linalg.norm(vector))
    return (vector / length if length else vector).astype("<f4")


def _told(vector: "np.ndarray[tuple[int], np.dtype[np.float32]]", options: EmbeddingOptions) -> list[float] | str:
    return base64.b64encode(vector.tobytes()).decode() if options.is_base64 else vector.tolist()
