"""Bodies of POST /v1/embeddings. Pure."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from pipeline.client.protocol.request import (
    CacheSalt,
    Dimensions,
    Pooling,
    Priority,
    Timeout,
    Truncate,
    TruncationSide,
)
from pipeline.client.protocol.sampling import Id
from pipeline.http_server import request_ids
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.embeddings.reply import EMBEDDINGS
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.bodies import with_unsupported
from pipeline.stages.gateway.parsing.build import check_model, priority_of
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions, ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.prompt_fields import (
    check_prompt_bytes,
    check_truncate,
    most_ids,
    num_prompts,
    prompts_of,
)

POOLING = {"last": m.Pooling.LAST, "mean": m.Pooling.MEAN}


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings"""

    input: Annotated[str | list[str | Id | list[Id]], Meta(description="A text, texts, ids, or lists of ids.")]
    model: Annotated[str, Meta(description="The model's name in /v1/models; default the served model.")] | None = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 is of float32, little-endian.")] | None
    ) = None
    dimensions: Dimensions | None = None
    pooling: Pooling | None = None
    """Ours"""
    truncate_prompt_tokens: Truncate | None = None
    truncation_side: TruncationSide | None = None
    add_special_tokens: (
        Annotated[bool, Meta(description="Whether the tokenizer adds special tokens; default true for texts.")] | None
    ) = None
    request_id: Annotated[str, Meta(description="The client's own id of the request.")] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    timeout_s: Timeout | None = None


EMBEDDINGS_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "normalize": (True,),
    "use_activation": (True,),
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
    num = num_prompts(decoded.input)
    if num > limits.max_sequences:
        most = f"{limits.max_sequences} open sequences (gateway.max_open_sequences)"
        raise invalid("input", f"{num} inputs exceed the limit of {most}")
    return embedding_request(
        decoded,
        lambda most: prompts_of(decoded.input, most, "input"),
        "input",
        limits,
        request_id=request_ids.checked(decoded.request_id, "request_id"),
        is_base64=decoded.encoding_format == "base64",
    )


class EmbeddingFields(Protocol):
    """What requests for embeddings can ask, over HTTP and ZeroMQ."""

    model: str | None
    dimensions: int | None
    pooling: Literal["last", "mean"] | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    add_special_tokens: bool | None
    priority: int | None
    cache_salt: str | None
    timeout_s: float | None


def embedding_request(
    fields: EmbeddingFields,
    make_prompts: Callable[[int | None], list[m.Prompt]],
    prompt_param: str,
    limits: RequestLimits,
    *,
    request_id: str | None,
    is_base64: bool = False,
    timings: bool = False,
) -> ParsedRequest:
    """A request for the embeddings of prompts: each samples one id, which has no meaning. `make_prompts` gets the
    longest prompt that is allowed, in ids. Raises ApiError."""
    model = check_model(fields.model, limits)
    _check_dimensions(fields.dimensions, limits)
    truncate = check_truncate(fields.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompts = make_prompts(most_ids(truncate, limits.max_prompt_tokens))
    check_prompt_bytes(prompts, limits.caps.max_prompt_bytes, prompt_param)
    return ParsedRequest(
        dialect=EMBEDDINGS,
        model=model,
        prompts=prompts,
        n=1,
        max_tokens_param=prompt_param,
        seed=0,
        options=m.GenerationOptions(
            max_tokens=1,
            temperature=0.0,
            pooling=POOLING[fields.pooling or "last"],
            priority=priority_of(fields.priority, limits),
            cache_salt=fields.cache_salt or "",
            adapter_id=limits.adapter_id(model),
        ),
        stream=False,
        include_usage=False,
        prompt_options=m.PromptOptions(
            fields.add_special_tokens, truncate=truncate, truncates_right=fields.truncation_side == "right"
        ),
        prompt_param=prompt_param,
        request_id=request_id,
        timeout_s=fields.timeout_s,
        embedding=EmbeddingOptions(dimensions=fields.dimensions, is_base64=is_base64),
        timings=timings,
    )


def _check_dimensions(dimensions: int | None, limits: RequestLimits) -> None:
    """Raises ApiError if an embedding can't have this length."""
    if dimensions is None:
        return
    if dimensions < 1:
        raise invalid("dimensions", f"'dimensions' must be at least 1, not {dimensions}", "invalid_value")
    if limits.hidden_size is not None and dimensions > limits.hidden_size:
        message = f"'dimensions' must be at most {limits.hidden_size}, the model's hidden size, not {dimensions}"
        raise invalid("dimensions", message, "invalid_value")
