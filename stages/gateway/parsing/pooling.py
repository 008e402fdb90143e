"""Requests for what a model's pooler makes of inputs: embeddings, logits, scores. All APIs build them here. Pure.

A request of a task that the model lacks is refused with the names of those that it has. An input is a prompt request of
one step, whose token output is the result (pipeline/runtime/token_outputs.py); replies/pooled.py reads it.
"""

from collections.abc import Callable
from typing import Annotated, Literal, Protocol, get_args

import msgspec
from msgspec import Meta

from pipeline.client.protocol.request import (
    CacheSalt,
    Pooling,
    Priority,
    Timeout,
    Truncate,
    TruncationSide,
)
from pipeline.client.protocol.sampling import Id
from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import LAST_TOKEN, Task
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.errors import invalid, shown
from pipeline.stages.gateway.parsing.build import check_task, priority_of
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions, ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.prompt_fields import (
    check_prompt_bytes,
    check_truncate,
    most_ids,
    num_prompts,
    prompts_of,
)

Inputs = Annotated[str | list[str | Id | list[Id]], Meta(description="A text, texts, ids, or lists of ids.")]
POOLINGS: tuple[str, ...] = get_args(get_args(Pooling)[0])
"""What `pooling` may be."""
Normalize = Annotated[bool, Meta(description="Whether vectors have length 1; default what the model's files say.")]


class PoolingBody(msgspec.Struct, kw_only=True):
    """Fields of the bodies of all such routes."""

    model: Annotated[str, Meta(description="The model's name in /v1/models; default the served model.")] | None = None
    truncate_prompt_tokens: Truncate | None = None
    truncation_side: TruncationSide | None = None
    request_id: Annotated[str, Meta(description="The client's own id of the request.")] | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    timeout_s: Timeout | None = None


class InputBody(PoolingBody, kw_only=True):
    """Fields of those with `input`."""

    input: Inputs
    add_special_tokens: (
        Annotated[bool, Meta(description="Whether the tokenizer adds special tokens; default true for texts.")] | None
    ) = None


class PoolingFields(Protocol):
    """What such requests can ask, over HTTP and ZeroMQ."""

    model: str | None
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"] | None
    priority: int | None
    cache_salt: str | None
    timeout_s: float | None


class EmbeddingFields(PoolingFields, Protocol):
    """What requests for embeddings can ask besides."""

    dimensions: int | None
    pooling: Pooling | None
    add_special_tokens: bool | None


def pooling_request(
    fields: PoolingFields,
    task: Task,
    dialect: Dialect,
    make_prompts: Callable[[int | None], list[m.Prompt]],
    prompt_param: str,
    limits: RequestLimits,
    *,
    request_id: str | None = None,
    add_special_tokens: bool | None = None,
    pooling: str | None = None,
    embedding: EmbeddingOptions | None = None,
    timings: bool = False,
) -> ParsedRequest:
    """A request of one task for each prompt. `make_prompts` gets the longest prompt that is allowed, in ids. `pooling`
    is in place of the model's own. Raises ApiError."""
    model = check_task(task, fields.model, limits)
    truncate = check_truncate(fields.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompts = make_prompts(most_ids(truncate, limits.max_prompt_tokens))
    check_prompt_bytes(prompts, limits.caps.max_prompt_bytes, dialect, prompt_param)
    side = fields.truncation_side or ("left" if limits.pooler is LAST_TOKEN else "right")
    return ParsedRequest(
        dialect=dialect,
        model=model,
        prompts=prompts,
        n=1,
        max_tokens_param=prompt_param,
        seed=0,
        options=m.GenerationOptions(
            max_tokens=1,
            temperature=0.0,
            pooling=_pooling_of(task, pooling, limits),
            priority=priority_of(fields.priority, limits),
            cache_salt=fields.cache_salt or "",
            adapter_id=limits.adapter_id(model),
        ),
        stream=False,
        include_usage=False,
        prompt_options=m.PromptOptions(add_special_tokens, truncate=truncate, truncates_right=side == "right"),
        prompt_param=prompt_param,
        request_id=request_id,
        timeout_s=fields.timeout_s,
        embedding=embedding,
        task=task,
        timings=timings,
    )


def embedding_request(
    fields: EmbeddingFields,
    dialect: Dialect,
    make_prompts: Callable[[int | None], list[m.Prompt]],
    prompt_param: str,
    limits: RequestLimits,
    *,
    request_id: str | None = None,
    is_base64: bool = False,
    normalize: bool | None = None,
    timings: bool = False,
) -> ParsedRequest:
    """A request for the embeddings of prompts. Raises ApiError."""
    check_task("embed", fields.model, limits)
    return pooling_request(
        fields,
        "embed",
        dialect,
        make_prompts,
        prompt_param,
        limits,
        request_id=request_id,
        add_special_tokens=fields.add_special_tokens,
        pooling=fields.pooling,
        embedding=embedding_options(fields.dimensions, limits, is_base64=is_base64, normalize=normalize),
        timings=timings,
    )


def embedding_options(
    dimensions: int | None, limits: RequestLimits, *, is_base64: bool = False, normalize: bool | None = None
) -> EmbeddingOptions:
    """How vectors are returned. Raises ApiError if they can't have these dimensions."""
    _check_dimensions(dimensions, limits)
    if normalize is None:
        normalize = limits.pooler.normalize
    return EmbeddingOptions(dimensions=dimensions, is_base64=is_base64, normalize=normalize)


def check_num_inputs(num: int, param: str, limits: RequestLimits) -> None:
    """Raises ApiError if there are more inputs than can be open at once."""
    if num > limits.max_sequences:
        most = f"{limits.max_sequences} open sequences (gateway.max_open_sequences)"
        raise invalid(param, f"{num} inputs exceed the limit of {most}")


def inputs_of(
    given: str | list[str | int | list[int]],
    limits: RequestLimits,
    *names: tuple[str, str | None],
    param: str = "input",
) -> Callable[[int | None], list[m.Prompt]]:
    """What makes the prompts of the field `param`. `names` are fields that choose a prompt of the model's files, and
    their values. Raises ApiError if there are too many inputs."""
    check_num_inputs(num_prompts(given), param, limits)

    def make(most: int | None) -> list[m.Prompt]:
        prompts = prompts_of(given, most, param)
        prefix = prefix_of(limits, *names)
        if not prefix:
            return prompts
        if any(isinstance(prompt, m.IdsPrompt) for prompt in prompts):
            named = next((name for name, value in names if value is not None), None)
            if named is None:
                return prompts  # the model's default is for texts
            raise invalid(named, f"'{named}' is not allowed with token ids as input: a prompt goes before a text")
        return [m.TextPrompt(prefix + prompt.text) for prompt in prompts if isinstance(prompt, m.TextPrompt)]

    return make


def prefix_of(limits: RequestLimits, *names: tuple[str, str | None]) -> str:
    """The prompt that goes before each text: the named one, or the model's default. Raises ApiError for a name that
    the model's files lack."""
    prompts, default = limits.pooler.prompts, limits.pooler.default_prompt
    given = [(field, name) for field, name in names if name is not None]
    if len({name for _, name in given}) > 1:
        raise invalid(given[1][0], f"'{given[1][0]}' is not allowed together with another '{given[0][0]}'")
    if not given:
        return "" if default is None else prompts.get(default, "")
    field, name = given[0]
    if name in prompts:
        return prompts[name]
    folded = {known.casefold(): text for known, text in prompts.items()}
    if (text := folded.get(name.casefold())) is not None:
        return text
    has = f"the model has {', '.join(sorted(prompts))}" if prompts else "the model has no prompts"
    raise invalid(field, f"'{field}' can't be '{shown(name)}': {has}", "invalid_value")


def _pooling_of(task: Task, given: str | None, limits: RequestLimits) -> m.Pooling:
    if task in ("token_embed", "token_classify"):
        return m.Pooling.ALL
    return m.Pooling[(given or limits.pooler.pooling).upper()]


def _check_dimensions(dimensions: int | None, limits: RequestLimits) -> None:
    """Raises ApiError if an embedding can't have this length."""
    if dimensions is None:
        return
    if dimensions < 1:
        raise invalid("dimensions", f"'dimensions' must be at least 1, not {dimensions}", "invalid_value")
    if limits.hidden_size is not None and dimensions > limits.hidden_size:
        message = f"'dimensions' must be at most {limits.hidden_size}, the length of an embedding, not {dimensions}"
        raise invalid("dimensions", message, "invalid_value")
    known = limits.pooler.matryoshka_dimensions
    if known is not None and dimensions not in (*known, limits.pooler.width):
        sizes = ", ".join(map(str, sorted(known)))
        raise invalid("dimensions", f"'dimensions' must be one of {sizes}, not {dimensions}", "invalid_value")
