"""Builds the checked request that the APIs share from what they parse. Pure: no sockets, no state.

Every function returns or raises `ApiError` with a 4xx, for any bytes. Ingest checks what needs the tokenizer, such as
the length of a text. Too many prompts, ids or messages are refused here, before any of them is processed: a body of
legal size may hold a million, and processing them blocks the event loop.
"""

from collections.abc import Callable, Sequence
from http import HTTPStatus

import msgspec

from pipeline.client.protocol.request import Request
from pipeline.http_server import request_ids
from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import Task
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.beam_search import check_grammar, with_beam_search
from pipeline.stages.gateway.parsing.bodies import (
    Body,
    ChatBody,
    StreamOptions,
)
from pipeline.stages.gateway.parsing.chat.conversation import (
    calls_grammar,
    reply_parsing,
)
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.chat.reasoning_budget import check_budget
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.prompt_fields import (
    check_prompt_bytes,
    check_truncate,
)
from pipeline.stages.gateway.parsing.sampling_fields import (
    check_counts,
    check_num_allowed,
    generation_options,
    seed_of,
)
from pipeline.stages.gateway.parsing.token_detail_options import TokenDetailOptions, check_num_top, with_details

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of completions. A model's max_new_tokens may be lower."""


def default_completion_tokens(limits: RequestLimits) -> int:
    """The maximum number of output tokens of a completion that doesn't give one."""
    return min(DEFAULT_COMPLETION_TOKENS, limits.defaults.max_new_tokens or DEFAULT_COMPLETION_TOKENS)


def with_reply(
    parsed: ParsedRequest, limits: RequestLimits, *, shows_specials: bool = False, with_reasoning: bool = True
) -> ParsedRequest:
    """Add the grammar of the reply to a chat, and what to parse in it. Raises ApiError."""
    formats = limits.formats
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    parsing = reply_parsing(prompt, formats, shows_specials=shows_specials, with_reasoning=with_reasoning)
    if parsing is None:
        return parsed
    replace = msgspec.structs.replace
    options = parsed.options
    has_marks = formats.needs_specials(parsing.tool_choice)
    skip = options.skip_special_tokens and not has_marks
    grammar = calls_grammar(prompt, formats, options.grammar, limits.caps)
    options = replace(options, skip_special_tokens=skip, with_special_spans=has_marks, grammar=grammar)
    check_grammar(options)
    return replace(
        parsed,
        reply=parsing,
        options=options,
        prompt_options=replace(parsed.prompt_options, with_tail=formats.reasoning is not None),
    )


def chat_num_top(chat: ChatBody, limits: RequestLimits) -> int | None:
    """The number of top logprobs of a reply; None without logprobs. Raises ApiError."""
    if not chat.logprobs:
        if chat.top_logprobs:
            raise invalid("top_logprobs", "'top_logprobs' is only allowed together with logprobs = true")
        return None
    return check_num_top("top_logprobs", chat.top_logprobs or 0, limits.caps)


def details_of(
    body: Body | Request, num_top: int | None, limits: RequestLimits, *, echo: bool = False
) -> TokenDetailOptions:
    """Which token details the reply has. Raises ApiError."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "'prompt_logprobs' is not allowed together with stream = true")
    return TokenDetailOptions(
        num_top=num_top,
        prompt_num_top=check_num_top("prompt_logprobs", body.prompt_logprobs, limits.caps),
        with_echo=echo and num_top is not None,
        with_ids=bool(body.return_token_ids),
        names_ids=bool(body.return_tokens_as_token_ids),
    )


def prompt_only(
    prompt: m.Prompt,
    options: m.PromptOptions,
    prompt_param: str,
    limits: RequestLimits,
    dialect: Dialect,
    images: Sequence[m.EncodedImage] = (),
) -> ParsedRequest:
    """A request about its prompt only."""
    return ParsedRequest(
        dialect=dialect,
        model=limits.model,
        prompts=[prompt],
        n=1,
        max_tokens_param="max_tokens",
        seed=0,
        options=m.GenerationOptions(max_tokens=0),
        stream=False,
        include_usage=False,
        prompt_options=options,
        prompt_param=prompt_param,
        images=list(images),
    )


def parsed_request_of(
    body: Body | Request,
    num: int,
    prompts: Callable[[], list[m.Prompt]],
    max_tokens: int | None,
    limits: RequestLimits,
    dialect: Dialect,
    *,
    max_tokens_param: str = "max_tokens",
    best_of: int | None = None,
    details: TokenDetailOptions = TokenDetailOptions(),  # noqa: B008 - frozen
    with_pieces: bool = True,
    images: ChatImages | None = None,
) -> ParsedRequest:
    """Check a body. `prompts` creates the prompts, and adds to `images`; it is called after their number was checked.
    `with_pieces`: the reply has the text of tokens. Raises ApiError."""
    model = check_task("generate", body.model, limits)
    check_counts(body, limits.caps)
    num_sequences = _num_sequences(body.n or 1, best_of, limits, stream=bool(body.stream))
    n = body.n or 1
    is_scored = num_sequences > n
    _check_num_sequences(num_sequences, num, "best_of" if is_scored else "n", limits)
    stream_options = _stream_options(body)
    options = msgspec.structs.replace(
        generation_options(body, max_tokens, limits),
        n=num_sequences,
        priority=priority_of(body.priority, limits),
        cache_salt=body.cache_salt or "",
        prediction="" if body.prediction is None else body.prediction.text,
        adapter_id=limits.adapter_id(model),
    )
    if options.logprob_token_ids and details.num_top is None:
        raise invalid("logprob_token_ids", "'logprob_token_ids' is only allowed together with 'logprobs'")
    if options.logprob_token_ids and max_tokens == 0:
        raise invalid("logprob_token_ids", "'logprob_token_ids' is not allowed with max_tokens = 0: there is no output")
    options = with_beam_search(options, body)
    options = with_details(options, details, is_scored=is_scored, with_pieces=with_pieces)
    check_num_allowed(options, num * num_sequences)
    prompt_list = prompts()
    check_budget(options, prompt_list, limits.formats)
    check_prompt_bytes(prompt_list, limits.caps.max_prompt_bytes, dialect)
    return ParsedRequest(
        dialect=dialect,
        model=model,
        prompts=prompt_list,
        images=[] if images is None else images.found,
        n=n,
        max_tokens_param=max_tokens_param,
        seed=seed_of(body.seed),
        options=options,
        prompt_options=m.PromptOptions(
            body.add_special_tokens,
            truncate=check_truncate(body.truncate_prompt_tokens, limits.max_prompt_tokens),
            truncates_right=body.truncation_side == "right",
            with_pieces=options.with_pieces and details.prompt_logprobs_num_top >= 0,
        ),
        stream=bool(body.stream),
        include_usage=bool(stream_options.include_usage),
        continuous_usage=bool(stream_options.include_usage and stream_options.continuous_usage_stats),
        request_id=request_ids.checked(body.request_id, "request_id"),
        timings=bool(body.timings),
        timeout_s=body.timeout_s,
        details=details,
    )


def _num_sequences(n: int, best_of: int | None, limits: RequestLimits, *, stream: bool) -> int:
    """Sequences to generate for each prompt."""
    for name, value, most in (("n", n, limits.caps.max_n), ("best_of", best_of or 1, limits.caps.max_best_of)):
        if value > most:
            raise invalid(name, f"'{name}' must be at most {most} (limits.max_{name})", "invalid_value")
    if best_of is None or best_of == n:
        return n
    if best_of < n:
        raise invalid("best_of", f"'best_of' must be at least n = {n}, not {best_of}", "invalid_value")
    if stream:
        message = f"'best_of' must equal n = {n} with stream = true: the best sequences are known at the end only"
        raise invalid("best_of", message, "invalid_value")
    return best_of


def _check_num_sequences(num_sequences: int, num_prompts: int, each: str, limits: RequestLimits) -> None:
    """Check `num_sequences` for each prompt, which the field `each` sets."""
    if num_sequences * num_prompts <= limits.max_sequences:
        return
    what = f"{each} = {num_sequences}"
    if num_prompts > 1:
        what = f"{num_prompts} prompts × {what} sequences"
    most = f"{limits.max_sequences} open sequences (gateway.max_open_sequences)"
    message = f"{what} exceeds the limit of {most}"
    raise invalid(each if num_sequences > limits.max_sequences else "prompt", message)


def check_task(task: Task, model: str | None, limits: RequestLimits) -> str:
    """As `check_model`. Raises ApiError, which names the model's tasks, if this is none of them."""
    name = check_model(model, limits)
    if task not in limits.tasks:
        has = ", ".join(limits.tasks)
        message = f"the model '{limits.model}' can't be asked to {_TASK_WORDS[task]} (task {task}): its tasks are {has}"
        raise invalid("model", message, "unsupported_task")
    return name


_TASK_WORDS: dict[Task, str] = {
    "generate": "generate text",
    "embed": "embed texts",
    "token_embed": "embed tokens",
    "classify": "classify texts",
    "token_classify": "classify tokens",
    "score": "score pairs of texts",
}


def check_num_messages(num_messages: int, limits: RequestLimits) -> None:
    """Check the number of messages, tool calls and parts: templates write about a token for each at least."""
    if limits.max_prompt_tokens is not None and num_messages > limits.max_prompt_tokens:
        message = (
            f"this model's maximum context length is {limits.max_prompt_tokens} tokens, and the chat has "
            f"{num_messages} messages, tool calls and parts of contents, of at least one token each"
        )
        raise invalid("messages", message, "context_length_exceeded")


def priority_of(priority: int | None, limits: RequestLimits) -> int:
    """Raises ApiError."""
    if priority and not limits.has_priorities:
        message = f"got priority {priority}, but priorities are disabled: they require schedule.policy = priority"
        raise invalid("priority", message, "invalid_value")
    return priority or 0


def check_model(model: str | None, limits: RequestLimits) -> str:
    """Returns the name of the model, one of its aliases or of its adapters; by default the model's. Raises ApiError,
    404, also for one that the client's API key may not use."""
    name = limits.model if model is None else model
    if (name == limits.model or name in limits.aliases or name in limits.adapters) and limits.allows(name):
        return name
    raise unknown_model(str(name)[:100], limits)


def unknown_model(shown_name: str, limits: RequestLimits) -> ApiError:
    """404, in the same words for a name that there is not and for one that the client's key may not use."""
    if limits.allowed:
        message = (
            f"the model '{shown_name}' does not exist, or this API key has no access to it; GET /v1/models lists those "
            "that it has"
        )
    else:
        message = f"the model '{shown_name}' does not exist; this server has '{limits.model}'"
        if limits.adapters:
            message += " and adapters of it, which GET /v1/models lists"
    return ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")


def _stream_options(body: Body | Request) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise invalid("stream_options", "'stream_options' is only allowed together with stream = true")
    return body.stream_options
