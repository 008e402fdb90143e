"""Parses requests that arrive over ZeroMQ, by the rules of HTTP's bodies. Pure."""

import functools
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import Meta, Raw

from pipeline.client import protocol as p
from pipeline.config.settings import LimitSettings as Caps
from pipeline.http_server import request_ids
from pipeline.http_server.bodies.json_depth import check_depth, check_large
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.stages.gateway.apis.openai.reply import CHAT, COMPLETION
from pipeline.stages.gateway.apis.pooling.parsing import task_request
from pipeline.stages.gateway.errors import ApiError, invalid, of_validation
from pipeline.stages.gateway.parsing.beam_search import check_grammar
from pipeline.stages.gateway.parsing.build import check_num_messages, details_of, parsed_request_of
from pipeline.stages.gateway.parsing.chat.conversation import (
    calls_grammar,
    chat_prompt,
    given_of_chat,
    num_parts,
    pair_kwargs,
)
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.pooling import prefix_of
from pipeline.stages.gateway.parsing.prompt_fields import check_num_ids, most_ids
from pipeline.stages.gateway.parsing.token_detail_options import check_num_top

_NULL = b"\xc0"
"""In MessagePack"""


class ReceivedGenerate(p.WireMessage, frozen=True, tag="generate"):
    """A `p.Generate` of which only what its refusal needs is decoded: the rest may be a million objects."""

    request_id: p.RequestId
    request: Raw
    credits: Annotated[int, Meta(ge=0)]
    received: Raw = Raw()
    name: str | None = None


ReceivedMessage = p.Hello | ReceivedGenerate | p.Abort | p.Credit | p.Ping | p.SetSleep | p.AskSleep | p.Bye
"""A `p.ClientMessage` as the server decodes it."""

_requests: MessageDecoder[p.Request] = MessageDecoder(p.Request)
_received: MessageDecoder[list[bytes]] = MessageDecoder(list[bytes])


def parse_generate(generate: ReceivedGenerate, limits: RequestLimits) -> ParsedRequest:
    """Check a request, with the rules and errors of HTTP. Raises ApiError."""
    request, received = _request_of(generate.request, limits.caps), _received_of(generate.received)
    if request.task is not None or request.pooling is not None:
        return _pooled(generate, request, received, limits)
    for name in ("dimensions", "pair", "prompt_name", "use_activation", "instruction"):
        if getattr(request, name) is not None:
            raise invalid(name, f"'{name}' needs 'task' or 'pooling'", "invalid_value")
    most = most_ids(request.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompt_limits = msgspec.structs.replace(limits, max_prompt_tokens=most)
    # `logprob_token_ids` alone request logprobs, as in vLLM's SamplingParams.
    num_top = 0 if request.logprobs is None and request.logprob_token_ids else request.logprobs
    images = limits.images(fetches=False)
    parsed = parsed_request_of(
        request,
        1,
        lambda: [_prompt_of(request, prompt_limits, images)],
        request.max_tokens,
        limits,
        COMPLETION if request.messages is None else CHAT,
        best_of=request.best_of,
        details=details_of(request, check_num_top("logprobs", num_top, limits.caps), limits),
        images=images,
    )
    _check_received(received, parsed)
    (prompt,) = parsed.prompts
    options = parsed.options
    if isinstance(prompt, m.ChatPrompt):
        grammar = calls_grammar(prompt, limits.formats, options.grammar, limits.caps)
        options = msgspec.structs.replace(options, grammar=grammar)
        check_grammar(options)
    return msgspec.structs.replace(
        parsed,
        stream=True,
        outputs=[_whole_ids(ids, f"received[{i}]") for i, ids in enumerate(received)],
        request_id=request_ids.checked(generate.name, "name"),
        options=options,
    )


def _pooled(
    generate: ReceivedGenerate, request: p.Request, received: list[bytes], limits: RequestLimits
) -> ParsedRequest:
    """Check a request for what the model's pooler makes. Raises ApiError."""
    if request.messages is not None:
        raise invalid("prompt", "'task' and 'pooling' need a text or token ids as prompt, not a chat")
    if received:
        raise invalid("received", "'received' is not allowed with 'task' or 'pooling'", "invalid_value")
    if request.images:
        raise invalid("images", "'images' is not allowed with 'task' or 'pooling'", "invalid_value")
    if request.pooling is not None and request.task not in (None, "embed"):
        raise invalid("pooling", f"'pooling' is not allowed with task = {request.task}", "invalid_value")

    kwargs, instruction = "", request.instruction
    has_template = request.pair is not None and limits.pooler.pairs is not None
    if request.pair is not None:
        if instruction is None and has_template and request.prompt_name is not None:
            instruction = prefix_of(limits, ("prompt_name", request.prompt_name))
        kwargs = pair_kwargs(request.chat_template_kwargs, instruction)
        request = msgspec.structs.replace(request, chat_template_kwargs=Raw())
    elif request.instruction is not None:
        raise invalid("instruction", "'instruction' needs 'pair'", "invalid_value")

    def prompts(most: int | None) -> list[m.Prompt]:
        prompt = _prompt_of(request, msgspec.structs.replace(limits, max_prompt_tokens=most), ChatImages())
        if isinstance(prompt, m.TextPrompt):
            prefix = "" if has_template else prefix_of(limits, ("prompt_name", request.prompt_name))
            return [m.TextPrompt(prefix + prompt.text, request.pair, kwargs)]
        for name in ("pair", "prompt_name"):
            if getattr(request, name) is not None:
                raise invalid(name, f"'{name}' is not allowed with token ids as prompt", "invalid_value")
        return [prompt]

    return task_request(
        request,
        request.task or "embed",
        prompts,
        "prompt",
        limits,
        request_id=request_ids.checked(generate.name, "name"),
        pooling=request.pooling,
        timings=bool(request.timings),
    )


def _prompt_of(request: p.Request, limits: RequestLimits, images: ChatImages) -> m.Prompt:
    """The prompt. Raises ApiError."""
    if request.images and request.prompt is None:
        raise invalid("images", "'images' needs 'prompt', a text with a placeholder for each of them", "invalid_value")
    if request.messages is not None:
        if request.prompt is not None or request.prompt_token_ids is not None:
            raise invalid("messages", "'messages' is not allowed together with another prompt", "invalid_value")
        check_num_messages(num_parts(request.messages), limits)
        return chat_prompt(request, request.messages, limits.caps, images)
    if (name := given_of_chat(request)) is not None:
        raise invalid(name, f"'{name}' is only allowed together with 'messages'")
    match request.prompt, request.prompt_token_ids:
        case str(text), None:
            for index, image in enumerate(request.images or ()):
                images.check(at := f"images[{index}]", "user", "a text without images")
                images.add_url(f"{at}.url", image.url, image.detail, f"{at}.detail")
            return m.TextPrompt(text)
        case None, bytes(ids):
            check_num_ids(len(ids) // 4, "prompt", limits.max_prompt_tokens)
            return m.IdsPrompt(_whole_ids(ids, "prompt"))
        case None, None:
            raise invalid("prompt", "'prompt', 'prompt_token_ids' or 'messages' is required")
    raise invalid("prompt", "'prompt' is not allowed together with 'prompt_token_ids'", "invalid_value")


def _check_received(received: list[bytes], parsed: ParsedRequest) -> None:
    """Raises ApiError if the request can't continue after outputs."""
    if not received:
        return
    problem = f"must have one entry for each of n = {parsed.n} sequences, not {len(received)}"
    if parsed.options.use_beam_search:
        problem = "is not allowed with use_beam_search: sequences are not streamed then"
    elif parsed.num_sequences > parsed.n:
        problem = "is not allowed with best_of > n: sequences are not streamed then"
    elif len(received) == parsed.n:
        return
    raise invalid("received", f"'received' {problem}", "invalid_value")


def _whole_ids(packed: bytes, param: str) -> bytes:
    if len(packed) % 4:
        raise invalid(param, f"'{param}' must be packed int32: {len(packed)} is not a multiple of 4 bytes")
    return packed


# ------------------------------------------------------------------------------------------------------------- decoding


def _request_of(data: Raw, caps: Caps) -> p.Request:
    """Decode a request. Raises ApiError."""
    try:
        request = _requests.decode(data)
    except msgspec.ValidationError as error:
        raise of_validation(error, p.Request) from error
    except msgspec.DecodeError as error:
        raise invalid("request", f"'request' is malformed: {error}", "malformed") from error
    _to_json(request, "", caps)
    return request


def _received_of(data: Raw) -> list[bytes]:
    if not data:
        return []
    try:
        return _received.decode(data)
    except msgspec.DecodeError as error:
        raise invalid("received", "'received' must be an array of binary: packed ids", "invalid_type") from error


def _to_json(fields: msgspec.Struct, at: str, caps: Caps) -> None:
    """Replace the MessagePack in fields of type `Raw` by JSON, as over HTTP. Raises ApiError."""
    for name, is_raw in _raw_fields(type(fields)):
        value = getattr(fields, name)
        if not is_raw:
            if value is not None:
                _to_json(value, f"{at}{name}.", caps)
        elif data := bytes(value):
            setattr(fields, name, _json_of(data, f"{at}{name}", caps))


@functools.cache
def _raw_fields(kind: type[msgspec.Struct]) -> list[tuple[str, bool]]:
    """Names of a struct's fields that are `Raw` (True), or structs with such fields (False)."""
    found = []
    for name, hint in get_type_hints(kind).items():
        parts = get_args(hint) or (hint,)
        if name not in kind.__struct_fields__:
            continue
        if Raw in parts:
            found.append((name, True))
        elif any(_has_raw(part) for part in parts):
            found.append((name, False))
    return found


def _has_raw(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct) and bool(_raw_fields(kind))


def _json_of(data: bytes, param: str, caps: Caps) -> Raw:
    """The JSON in a text: that of an object or an array, which is checked. Any other text stands for itself."""
    if data == _NULL:
        return Raw(b"null")
    try:
        text = msgspec.msgpack.decode(data, type=str).strip()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(param, f"'{param}' must be a string: JSON text", "invalid_type") from error
    if not text.startswith(("{", "[")):
        return Raw(msgspec.json.encode(text))
    json = text.encode()
    try:
        check = check_large if len(json) > LARGE_BYTES else check_depth
        check(json, caps.max_json_depth)
    except ApiError as error:
        if error.code != "invalid_json":
            raise
        message = f"'{param}' is nested too deeply: the limit is {caps.max_json_depth} levels"
        raise invalid(param, message, "invalid_json") from None
    try:
        return msgspec.json.decode(json, type=Raw)  # checks it, and makes no objects of it
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(param, f"'{param}' is not valid JSON: {error}", "invalid_value") from error
