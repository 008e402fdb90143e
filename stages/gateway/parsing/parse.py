"""From the bytes of a request's body to what is asked for, checked. Pure: no sockets, no state.

Every function here returns or raises `ApiError` with a 4xx, whatever the bytes are. What needs the tokenizer or the
vocabulary (a text that is too long, ids that the model does not have) is ingest's to judge. What can't be served
whatever its words are (too many prompts, ids or messages) is refused here, before anything is made of each of them: one
body of a legal size may hold a million, and while they are gone through nobody else is served.
"""

import contextlib
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, assert_never

import msgspec

from pipeline.client import protocol as p
from pipeline.config.settings import Limits as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway import errors
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.http import request_ids
from pipeline.stages.gateway.parsing import zmq_fields
from pipeline.stages.gateway.parsing.bodies import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    B,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    ParamsBody,
    StreamOptions,
    TokenizeBody,
    is_neutral,
    with_unsupported,
)
from pipeline.stages.gateway.parsing.conversation import (
    ReplyForm,
    calls_grammar,
    chat_prompt,
    given_of_chat,
    num_parts,
    reply_form,
)
from pipeline.stages.gateway.parsing.embedding_options import EmbeddingOptions
from pipeline.stages.gateway.parsing.prompt_fields import (
    check_num_ids,
    check_prompt_bytes,
    check_truncate,
    most_ids,
    num_prompts,
    packed,
    prompts_of,
)
from pipeline.stages.gateway.parsing.sampling_fields import (
    check_counts,
    check_num_allowed,
    sampling_of,
    seed_of,
    text_of,
)
from pipeline.stages.gateway.parsing.structured_outputs import grammar_of
from pipeline.stages.gateway.parsing.token_detail_options import IdDetails, check_num_top, with_details
from pipeline.text.formats.chat_formats import ChatFormats

DEFAULT_COMPLETION_TOKENS = 16


class Limits(msgspec.Struct):
    model: str
    """The name that requests must give."""
    max_sequences: int
    """Sequences that may be open at once: a call for more can never be served."""
    has_priorities: bool = False
    """Whether the scheduler's policy looks at them."""
    max_prompt_tokens: int | None = None
    """Longest prompt that anything is computed from; None before `Start` has said it, as the next two."""
    vocab_size: int | None = None
    hidden_size: int | None = None
    """Numbers of an embedding."""
    caps: Caps = Caps()
    """How much one request may ask for."""
    formats: ChatFormats = ChatFormats()
    """How the model writes calls and reasoning."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One client call, checked. `sampling.seed` is left to who opens the requests: each prompt gets its own."""

    is_chat: bool
    model: str
    prompts: list[m.Prompt]
    n: int
    """Sequences that are returned for each prompt."""
    max_tokens: int | None
    max_tokens_param: str
    """The field that said so."""
    seed: int | None
    """u64; None draws one"""
    sampling: m.Sampling
    text: m.TextOptions
    stream: bool
    include_usage: bool
    outputs: list[bytes] = []
    """int32; output ids that the client has already, one entry a sequence; none of them for a fresh request"""
    echo: bool = False
    """The prompt's text comes before the output's."""
    prompt_options: m.PromptOptions = m.PromptOptions()
    prompt_param: str = "prompt"
    """The field that holds the prompts."""
    request_id: str | None = None
    """The client's own."""
    timings: bool = False
    """The reply says where its time went."""
    received_s: float = 0.0
    """When the client began to ask, by time.monotonic(); 0 where nobody has noted it."""
    priority: int = 0
    cache_salt: str = ""
    timeout_s: float | None = None
    """From then to its end; None where it does not say."""
    best_of: int | None = None
    """Sequences that are generated for each prompt, of which the n best are returned; None: n, and all are."""
    grammar: m.Grammar | None = None
    """What the output is to match."""
    bad_words: list[str] = []
    details: IdDetails = IdDetails()
    """What is told of ids."""
    hides_output: bool = False
    """One id is generated that nobody asked for, because the prompt's log probabilities need a forward pass."""
    continuous_usage: bool = False
    """Each event of the stream says how much has been used by then."""
    is_tokens_only: bool = False
    """The reply has ids and no text."""
    embedding: EmbeddingOptions | None = None
    """The reply has the prompts' embeddings."""
    reply: ReplyForm | None = None
    """What is looked for in the output; None where that is nothing."""
    scope: str = ""
    """Of the API key that its client has shown (`Keys.scope_of`): requests of other scopes neither abort it nor find
    its prefix-cache blocks. Empty where there is no key."""

    @property
    def num_sequences(self) -> int:
        """Sequences that are generated for each prompt."""
        return self.best_of or self.n

    @property
    def is_lookup(self) -> bool:
        """Whether it is about the prompt alone, and has no output."""
        return self.prompt_options.any_length


_chats = msgspec.json.Decoder(with_unsupported(ChatBody, CHAT_NEUTRAL))
_tokenizes = msgspec.json.Decoder(TokenizeBody)
_detokenizes = msgspec.json.Decoder(DetokenizeBody)
_completions = msgspec.json.Decoder(with_unsupported(CompletionBody, COMPLETION_NEUTRAL))


def read_chat(body: bytes) -> ChatBody:
    """As it stands there. Raises ApiError."""
    return decode(_chats, body, CHAT_NEUTRAL)


def read_completion(body: bytes) -> CompletionBody:
    """As it stands there. Raises ApiError."""
    return decode(_completions, body, COMPLETION_NEUTRAL)


def parse_chat(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /v1/chat/completions. Raises ApiError."""
    chat = read_chat(body)

    def prompts() -> list[m.Prompt]:
        _check_num_messages(num_parts(chat.messages), limits)
        return [chat_prompt(chat, chat.messages, limits.caps)]

    details = details_of(chat, _chat_num_top(chat, limits), limits)
    if chat.max_completion_tokens is None:
        ask = ask_of(chat, 1, prompts, chat.max_tokens, limits, is_chat=True, details=details)
    else:
        ask = ask_of(
            chat,
            1,
            prompts,
            chat.max_completion_tokens,
            limits,
            is_chat=True,
            max_tokens_param="max_completion_tokens",
            details=details,
        )
    return _with_reply(ask, chat, limits.formats)


def _with_reply(ask: Ask, chat: ChatBody, formats: ChatFormats) -> Ask:
    """The same with what its reply is to be, and what is looked for in it."""
    (prompt,) = ask.prompts
    assert isinstance(prompt, m.ChatPrompt)
    shows_specials = chat.skip_special_tokens is False
    form = reply_form(
        prompt, formats, shows_specials=shows_specials, with_reasoning=chat.include_reasoning is not False
    )
    if form is None:
        return ask
    replace = msgspec.structs.replace
    skip = ask.text.skip_special_tokens and not formats.needs_specials(form.tool_choice)
    return replace(
        ask,
        reply=form,
        text=replace(ask.text, skip_special_tokens=skip),
        grammar=calls_grammar(prompt, formats, ask.grammar),
        prompt_options=replace(ask.prompt_options, with_tail=formats.reasoning is not None),
    )


def _chat_num_top(chat: ChatBody, limits: Limits) -> int | None:
    if not chat.logprobs:
        if chat.top_logprobs:
            raise invalid("top_logprobs", "'top_logprobs' is only allowed together with logprobs = true")
        return None
    return check_num_top("top_logprobs", chat.top_logprobs or 0, limits.caps)


def details_of(body: Body, num_top: int | None, limits: Limits, *, echo: bool = False) -> IdDetails:
    """What a reply is to tell of ids. Raises ApiError."""
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "'prompt_logprobs' is not allowed together with stream = true")
    return IdDetails(
        num_top=num_top,
        prompt_num_top=check_num_top("prompt_logprobs", body.prompt_logprobs, limits.caps),
        with_echo=echo and num_top is not None,
        with_ids=bool(body.return_token_ids),
        names_ids=bool(body.return_tokens_as_token_ids),
    )


def parse_completion(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /v1/completions. Raises ApiError."""
    completion = read_completion(body)
    max_tokens = DEFAULT_COMPLETION_TOKENS if completion.max_tokens is None else completion.max_tokens
    echo = bool(completion.echo)
    if max_tokens == 0 and not echo:
        raise invalid("max_tokens", "'max_tokens' must be an integer >= 1, unless echo is true", "invalid_value")
    if echo and completion.truncate_prompt_tokens is not None:
        message = "'truncate_prompt_tokens' is not allowed together with echo, which repeats the prompt as it was given"
        raise invalid("truncate_prompt_tokens", message)
    num_top = check_num_top("logprobs", completion.logprobs, limits.caps)
    ask = ask_of(
        completion,
        num_prompts(completion.prompt),
        lambda: prompts_of(completion.prompt, most_ids(completion.truncate_prompt_tokens, limits.max_prompt_tokens)),
        max_tokens,
        limits,
        is_chat=False,
        best_of=completion.best_of,
        details=details_of(completion, num_top, limits, echo=echo),
    )
    return _with_echo(ask) if echo else ask


def _with_echo(ask: Ask) -> Ask:
    """The same with the prompt before the output. Log probabilities of the prompt alone take a step of the model."""
    options = msgspec.structs.replace(
        ask.prompt_options,
        with_text=isinstance(ask.prompts[0], m.IdsPrompt),
    )
    ask = msgspec.structs.replace(ask, echo=True, prompt_options=options)
    if ask.max_tokens == 0 and ask.details.prompt_record_num_top >= 0:
        return msgspec.structs.replace(ask, max_tokens=1, hides_output=True)
    return ask


def parse_tokenize(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /tokenize. Raises ApiError."""
    asked = decode(_tokenizes, body, {})
    check_model(asked.model, limits)
    prompt: m.Prompt
    match asked.prompt, asked.messages:
        case str(text), None:
            if (name := given_of_chat(asked)) is not None:
                raise invalid(name, f"'{name}' is only allowed together with 'messages'")
            prompt = m.TextPrompt(text)
        case None, list(messages):
            prompt = chat_prompt(asked, messages, limits.caps)
        case None, None:
            raise invalid("prompt", "'prompt' or 'messages' is required")
        case _:
            raise invalid("messages", "'messages' is not allowed together with 'prompt'")
    options = m.PromptOptions(asked.add_special_tokens, any_length=True, with_token_strs=bool(asked.return_token_strs))
    return _lookup(prompt, options, "prompt", limits)


def parse_detokenize(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /detokenize. Raises ApiError."""
    asked = decode(_detokenizes, body, {})
    check_model(asked.model, limits)
    options = m.PromptOptions(any_length=True, with_text=True)
    return _lookup(m.IdsPrompt(packed(asked.tokens)), options, "tokens", limits)


def _lookup(prompt: m.Prompt, options: m.PromptOptions, prompt_param: str, limits: Limits) -> Ask:
    """A call that asks about its prompt alone."""
    return Ask(
        is_chat=isinstance(prompt, m.ChatPrompt),
        model=limits.model,
        prompts=[prompt],
        n=1,
        max_tokens=0,
        max_tokens_param="max_tokens",
        seed=0,
        sampling=m.Sampling(),
        text=m.TextOptions(),
        stream=False,
        include_usage=False,
        prompt_options=options,
        prompt_param=prompt_param,
    )


def parse_generate(generate: p.Generate, limits: Limits) -> Ask:
    """Read a request that came over ZeroMQ. The same rules, and the same words. Raises ApiError."""
    params = generate.params
    fields = {name: getattr(params, name) for name in p.Params.__struct_fields__}
    fields |= {name: getattr(generate, name) for name in ("priority", "cache_salt", "timeout_s")}
    structured = fields.pop("structured_outputs")
    try:
        body = msgspec.convert({"model": generate.model or limits.model, **fields}, ParamsBody)
    except msgspec.ValidationError as error:
        raise errors.of_validation(error) from error
    body.structured_outputs = zmq_fields.structured_of(structured)
    most = most_ids(params.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompt_limits = msgspec.structs.replace(limits, max_prompt_tokens=most)
    ask = ask_of(
        body,
        1,
        lambda: [_prompt_of(generate.prompt, prompt_limits)],
        params.max_tokens,
        limits,
        is_chat=isinstance(generate.prompt, p.ChatPrompt),
        best_of=body.best_of,
        details=details_of(body, check_num_top("logprobs", body.logprobs, limits.caps), limits),
    )
    if generate.received and ask.num_sequences > ask.n:
        message = f"'received' is not allowed with best_of above n: none of its {ask.num_sequences} sequences is sent"
        raise invalid("received", message, "invalid_value")
    if generate.received and len(generate.received) != ask.n:
        message = f"'received' must have the ids of each of n = {ask.n} sequences, not of {len(generate.received)}"
        raise invalid("received", message, "invalid_value")
    (prompt,) = ask.prompts
    grammar = calls_grammar(prompt, limits.formats, ask.grammar) if isinstance(prompt, m.ChatPrompt) else ask.grammar
    return msgspec.structs.replace(
        ask,
        stream=True,
        outputs=[_whole_ids(ids, f"received[{i}]") for i, ids in enumerate(generate.received)],
        request_id=request_ids.checked(generate.name, "name"),
        timings=generate.timings,
        grammar=grammar,
    )


def _prompt_of(prompt: p.Prompt, limits: Limits) -> m.Prompt:
    """A prompt that came over ZeroMQ."""
    match prompt:
        case p.TextPrompt(text):
            return m.TextPrompt(text)
        case p.TokensPrompt(ids):
            check_num_ids(len(ids) // 4, "prompt", limits.max_prompt_tokens)
            return m.IdsPrompt(_whole_ids(ids, "prompt"))
        case p.ChatPrompt():
            _check_num_messages(sum(1 + len(one.tool_calls) for one in prompt.messages), limits)
            return zmq_fields.chat_of(prompt, limits.caps)
        case _:
            assert_never(prompt)


def _whole_ids(packed: bytes, param: str) -> bytes:
    if len(packed) % 4:
        raise invalid(param, f"'{param}' must be packed int32: {len(packed)} bytes are no whole number of ids")
    return packed


def decode(decoder: "msgspec.json.Decoder[B]", body: bytes, neutral: Mapping[str, tuple[Any, ...]]) -> B:
    """A body as its struct. Raises ApiError where it is none, or asks for what is not supported."""
    with _uncollected():
        request = _decode(decoder, body)
    for name, values in neutral.items():
        if (value := getattr(request, name)) is not None and not is_neutral(value, values):
            raise unsupported(name)
    return request


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What a body is decoded to has no cycles, but may be a million lists: looking through them again and again while
    they are made takes four times as long as making them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _decode(decoder: "msgspec.json.Decoder[B]", body: bytes) -> B:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise errors.of_validation(error, decoder.type, body) from error
    except UnicodeDecodeError as error:
        raise invalid(None, "the body is not valid UTF-8", "invalid_json") from error
    except msgspec.DecodeError as error:
        raise errors.of_malformed(error, body, json.loads) from error
    except RecursionError as error:
        raise invalid(None, "the body's JSON is nested too deeply", "invalid_json") from error


def ask_of(
    body: Body,
    num: int,
    prompts: Callable[[], list[m.Prompt]],
    max_tokens: int | None,
    limits: Limits,
    *,
    is_chat: bool,
    max_tokens_param: str = "max_tokens",
    best_of: int | None = None,
    details: IdDetails = IdDetails(),  # noqa: B008 - frozen
    with_pieces: bool = True,
) -> Ask:
    """What a body asks for, checked. `prompts` makes the prompts; it is called once it is certain that so many may be
    asked for. `with_pieces`: the reply names tokens by their text. Raises ApiError."""
    check_model(body.model, limits)
    check_counts(body, limits.caps)
    num_sequences = _num_sequences(body.n or 1, best_of, limits, stream=bool(body.stream))
    n = body.n or 1
    is_scored = num_sequences > n
    _check_num_sequences(num_sequences, num, "best_of" if is_scored else "n", limits)
    options = _stream_options(body)
    sampling, text = with_details(
        sampling_of(body, max_tokens, limits.vocab_size),
        text_of(body),
        details,
        is_scored=is_scored,
        with_pieces=with_pieces,
    )
    check_num_allowed(sampling, num * num_sequences)
    made = prompts()
    check_prompt_bytes(made, limits.caps.max_prompt_bytes)
    return Ask(
        is_chat=is_chat,
        model=body.model,
        prompts=made,
        n=n,
        best_of=num_sequences if is_scored else None,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        seed=seed_of(body.seed),
        sampling=sampling,
        text=text,
        prompt_options=m.PromptOptions(
            body.add_special_tokens,
            truncate=check_truncate(body.truncate_prompt_tokens, limits.max_prompt_tokens),
            with_pieces=text.with_pieces and details.prompt_record_num_top >= 0,
        ),
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.include_usage and options.continuous_usage_stats),
        request_id=request_ids.checked(body.request_id, "request_id"),
        timings=bool(body.timings),
        priority=priority_of(body.priority, limits),
        cache_salt=body.cache_salt or "",
        timeout_s=body.timeout_s,
        grammar=grammar_of(body, limits.caps),
        bad_words=body.bad_words or [],
        details=details,
    )


def _num_sequences(n: int, best_of: int | None, limits: Limits, *, stream: bool) -> int:
    """How many are generated for each prompt."""
    for name, value, most in (("n", n, limits.caps.max_n), ("best_of", best_of or 1, limits.caps.max_best_of)):
        if value > most:
            raise invalid(name, f"'{name}' must be at most {most}, which is limits.max_{name}", "invalid_value")
    if best_of is None or best_of == n:
        return n
    if best_of < n:
        raise invalid("best_of", f"'best_of' must be at least n = {n}, not {best_of}", "invalid_value")
    if stream:
        message = f"with stream = true 'best_of' must equal n = {n}: the best of {best_of} are known at their end"
        raise invalid("best_of", message, "invalid_value")
    return best_of


def _check_num_sequences(num_sequences: int, num_prompts: int, each: str, limits: Limits) -> None:
    """`num_sequences` for each prompt, which the field `each` asks for."""
    if num_sequences * num_prompts <= limits.max_sequences:
        return
    what = f"{each} = {num_sequences}"
    if num_prompts > 1:
        what = f"{num_prompts} prompts × {what} sequences"
    most = f"({limits.max_sequences}): gateway.max_open_requests says how many"
    message = f"{what} is more than this server takes at once {most}"
    raise invalid(each if num_sequences > limits.max_sequences else "prompt", message)


def _check_num_messages(num_messages: int, limits: Limits) -> None:
    """Templates write at least a token for each message."""
    if limits.max_prompt_tokens is not None and num_messages > limits.max_prompt_tokens:
        message = (
            f"this model's maximum context length is {limits.max_prompt_tokens} tokens, and the chat has "
            f"{num_messages} messages, with at least a token each"
        )
        raise invalid("messages", message, "context_length_exceeded")


def priority_of(priority: int | None, limits: Limits) -> int:
    """Raises ApiError."""
    if priority and not limits.has_priorities:
        message = f"got priority {priority}, but this server has no priorities: that takes schedule.policy = priority"
        raise invalid("priority", message, "invalid_value")
    return priority or 0


def check_model(model: str | None, limits: Limits) -> None:
    """Raises ApiError, 404."""
    if model not in (None, limits.model):
        message = f"the model '{str(model)[:100]}' does not exist; this server has '{limits.model}'"
        raise ApiError(HTTPStatus.NOT_FOUND, message, "model", "model_not_found")


def _stream_options(body: Body) -> StreamOptions:
    if body.stream_options is None:
        return StreamOptions()
    if not body.stream:
        raise invalid("stream_options", "'stream_options' is only allowed together with stream = true")
    return body.stream_options
