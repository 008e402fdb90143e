"""Parses and checks the bodies of Ollama's API, and translates them to the requests that OpenAI's routes make. Pure: as
parsing/build.py.

A request without messages, prompt or input is parsed too. It has no prompts, and its handler answers it at once.
"""

from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.client.protocol.conversation import MessageParam
from pipeline.client.protocol.generation import JsonSchemaFormat, ResponseFormat
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.embeddings.parsing import EmbeddingsBody, embeddings_request_of
from pipeline.stages.gateway.apis.ollama import bodies as b
from pipeline.stages.gateway.apis.ollama.conversation import message_with, messages_of
from pipeline.stages.gateway.apis.ollama.fields import OllamaFields
from pipeline.stages.gateway.apis.ollama.names import renamed
from pipeline.stages.gateway.apis.ollama.reply import OllamaDialect
from pipeline.stages.gateway.apis.openai.parsing import chat_request_of
from pipeline.stages.gateway.apis.openai.reply import COMPLETION
from pipeline.stages.gateway.errors import ApiError, invalid, shown, unsupported
from pipeline.stages.gateway.parsing.bodies import Body, ChatBody, has_no_effect, with_unsupported
from pipeline.stages.gateway.parsing.build import (
    chat_num_top,
    check_num_messages,
    details_of,
    parsed_request_of,
    prompt_only,
)
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.fill_in import fill_in_tokens
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits

TEMPERATURE, TOP_P, TOP_K = 0.8, 0.9, 40
"""Ollama's defaults"""
RANDOM_SEED = -1
"""Ollama's word for a random seed, and its default."""
MAX_TOKENS = "options.num_predict"

_chats = msgspec.json.Decoder(with_unsupported(b.OllamaChatBody, b.OLLAMA_UNSUPPORTED_FIELDS))
_generates = msgspec.json.Decoder(with_unsupported(b.OllamaGenerateBody, b.OLLAMA_GENERATE_UNSUPPORTED_FIELDS))
_embeds = msgspec.json.Decoder(b.OllamaEmbedBody)
_embeddings = msgspec.json.Decoder(b.OllamaEmbeddingsBody)
_shows = msgspec.json.Decoder(b.OllamaShowBody)


def parse_chat(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /api/chat. Raises ApiError."""
    chat = decode(_chats, body, b.OLLAMA_UNSUPPORTED_FIELDS)
    check_name(chat.model, limits)
    reply_fields = OllamaFields(route="chat", model=chat.model)
    if not chat.messages:
        return _no_prompt(reply_fields, chat.keep_alive, limits)
    check_num_messages(sum(1 + len(one.images or ()) for one in chat.messages), limits)
    messages = messages_of(chat.messages, limits.images())
    last = chat.messages[-1]
    fields = _fields(chat, limits) | {"continue_final_message": last.role == "assistant" and not last.tool_calls}
    return _chat(reply_fields, ChatBody(messages=messages, tools=chat.tools, **fields), limits)


def parse_generate(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /api/generate. Raises ApiError."""
    decoded = decode(_generates, body, b.OLLAMA_GENERATE_UNSUPPORTED_FIELDS)
    check_name(decoded.model, limits)
    reply_fields = OllamaFields(route="generate", model=decoded.model)
    if decoded.images:
        limits.images().check("images[0]", "user", "the text in 'prompt', and no 'images'")
        if decoded.raw or decoded.suffix or not limits.formats.template:
            what = "they need a chat template, and a prompt without 'raw' and 'suffix'"
            raise unsupported("images", what)
    if not decoded.prompt and not decoded.suffix and not decoded.images:
        return _no_prompt(reply_fields, decoded.keep_alive, limits)
    prompt = decoded.prompt or ""
    if decoded.raw:
        return _text(reply_fields, prompt, decoded, limits, "raw = true")
    if decoded.suffix:
        tokens = fill_in_tokens(limits.formats.added, "suffix")
        return _text(reply_fields, tokens.prompt(prompt, decoded.suffix), decoded, limits, "a suffix")
    if not limits.formats.template:
        return _text(reply_fields, prompt, decoded, limits, "a model without a chat template")
    messages = [MessageParam("system", decoded.system)] if decoded.system else []
    messages.append(message_with("user", prompt, decoded.images) if decoded.images else MessageParam("user", prompt))
    return _chat(reply_fields, ChatBody(messages=messages, **_fields(decoded, limits)), limits)


def parse_embed(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /api/embed. Raises ApiError."""
    decoded = decode(_embeds, body, {})
    truncate = None if decoded.truncate is False else -1
    return _embedding(
        OllamaFields(route="embed", model=decoded.model), decoded.input, truncate, decoded.dimensions, limits
    )


def parse_embeddings(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /api/embeddings. Raises ApiError."""
    decoded = decode(_embeddings, body, {})
    reply_fields = OllamaFields(route="embeddings", model=decoded.model)
    return _embedding(reply_fields, decoded.prompt or "", -1, None, limits, "prompt")


def read_show(body: bytes, limits: RequestLimits) -> b.OllamaShowBody:
    """Read the body of POST /api/show. Raises ApiError."""
    decoded = decode(_shows, body, {})
    name = decoded.model or decoded.name
    if not name:
        raise invalid("model", "'model' is required")
    check_name(name, limits)
    return decoded


def check_name(name: str, limits: RequestLimits) -> str:
    """Returns the name of the model, or of one of its adapters. Names are compared without regard to case, as Ollama
    does. Raises ApiError, 404."""
    folded = name.casefold().removesuffix(b.TAG)
    for known in limits.names:
        if folded == known.casefold().removesuffix(b.TAG):
            return known
    has = (
        "this API key has no other than GET /v1/models lists" if limits.allowed else f"this server has '{limits.model}'"
    )
    message = f"model '{shown(name)}' not found; {has}"
    raise ApiError(HTTPStatus.NOT_FOUND, message, code="model_not_found")


def _no_prompt(reply_fields: OllamaFields, keep_alive: float | str | None, limits: RequestLimits) -> ParsedRequest:
    """A request to load the model, which has happened, or to unload it, which changes nothing."""
    reply_fields = msgspec.structs.replace(reply_fields, unloads=keep_alive in (0, "0", "0s"))
    return _of(reply_fields, prompt_only(m.TextPrompt(""), m.PromptOptions(), "", limits, COMPLETION), prompts=[])


def _chat(reply_fields: OllamaFields, chat: ChatBody, limits: RequestLimits) -> ParsedRequest:
    try:
        parsed = chat_request_of(chat, limits)
    except ApiError as error:
        raise _own(error, reply_fields, limits) from error
    param = "messages" if reply_fields.route == "chat" else "prompt"
    return _of(reply_fields, _bounded(parsed), max_tokens_param=MAX_TOKENS, prompt_param=param)


def _text(
    reply_fields: OllamaFields, prompt: str, decoded: b.OllamaGenerateBody, limits: RequestLimits, why: str
) -> ParsedRequest:
    """A request whose prompt is used as it is."""
    for name in ("system", "think"):
        if getattr(decoded, name):
            raise invalid(
                name, f"'{name}' is not allowed together with {why}: there is no chat template", "invalid_value"
            )
    if decoded.raw and decoded.suffix:
        raise invalid("suffix", "'suffix' is not allowed together with raw = true", "invalid_value")
    fields = _fields(decoded, limits)
    chat = ChatBody(messages=[], **fields)
    body = Body(**{name: fields[name] for name in fields if name in Body.__struct_fields__})
    try:
        details = details_of(body, chat_num_top(chat, limits), limits)
        parsed = parsed_request_of(
            body,
            1,
            lambda: [m.TextPrompt(prompt)],
            body.max_tokens,
            limits,
            COMPLETION,
            max_tokens_param=MAX_TOKENS,
            details=details,
        )
    except ApiError as error:
        raise _own(error, reply_fields, limits) from error
    return _of(reply_fields, _bounded(parsed))


def _of(reply_fields: OllamaFields, parsed: ParsedRequest, **changes: Any) -> ParsedRequest:
    """The request with a reply of this API."""
    return msgspec.structs.replace(parsed, dialect=OllamaDialect(reply_fields, parsed.dialect.id_prefix), **changes)


def _bounded(parsed: ParsedRequest) -> ParsedRequest:
    """The request, with an output that ends at the context's end if `num_predict` is larger."""
    options = msgspec.structs.replace(parsed.prompt_options, lowers_max_tokens=True)
    return msgspec.structs.replace(parsed, prompt_options=options)


def _embedding(
    reply_fields: OllamaFields,
    texts: str | list[str],
    truncate: int | None,
    dimensions: int | None,
    limits: RequestLimits,
    param: str = "input",
) -> ParsedRequest:
    name = check_name(reply_fields.model, limits)
    if not texts:
        return _of(reply_fields, prompt_only(m.TextPrompt(""), m.PromptOptions(), "", limits, COMPLETION), prompts=[])
    inputs: Any = texts  # lists are invariant
    body = EmbeddingsBody(model=name, input=inputs, truncate_prompt_tokens=truncate, dimensions=dimensions)
    parsed = embeddings_request_of(body, limits)
    return _of(reply_fields, parsed, prompt_param=param, max_tokens_param=param)


# --------------------------------------------------------------------------------------------------------------- fields


def _fields(body: b.OllamaBody, limits: RequestLimits) -> dict[str, Any]:
    """The fields of a chat request, but for its messages and tools."""
    return (
        {
            "model": check_name(body.model, limits),
            "stream": body.stream is not False,
            "response_format": _response_format(body.format),
            "logprobs": body.logprobs,
            "top_logprobs": body.top_logprobs,
        }
        | _sampling(body.options or b.OllamaOptions())
        | _thinking(body, limits)
    )


def _sampling(options: b.OllamaOptions) -> dict[str, Any]:
    for name, values in b.OPTIONS_UNSUPPORTED_FIELDS.items():
        if not has_no_effect(getattr(options, name), values):
            raise unsupported(f"options.{name}")
    repetition = 1.0 if options.repeat_penalty is None else options.repeat_penalty
    presence, frequency = options.presence_penalty or 0.0, options.frequency_penalty or 0.0
    if options.repeat_last_n == 0:
        repetition, presence, frequency = 1.0, 0.0, 0.0
    elif options.repeat_last_n not in (None, -1) and (repetition, presence, frequency) != (1.0, 0.0, 0.0):
        what = "penalties count all tokens: -1 does, and 0 turns them off"
        raise unsupported("options.repeat_last_n", what)
    return {
        "temperature": TEMPERATURE if options.temperature is None else options.temperature,
        "top_p": TOP_P if options.top_p is None else options.top_p,
        "top_k": TOP_K if options.top_k is None else options.top_k,
        "min_p": 0.0 if options.min_p is None else options.min_p,
        "seed": None if options.seed == RANDOM_SEED else options.seed,
        "max_tokens": None if options.num_predict is None or options.num_predict <= 0 else options.num_predict,
        "stop": options.stop,
        "thinking_token_budget": options.thinking_token_budget,
        "repetition_penalty": repetition,
        "presence_penalty": presence,
        "frequency_penalty": frequency,
    }


def _thinking(body: b.OllamaBody, limits: RequestLimits) -> dict[str, Any]:
    """The template's arguments. Raises ApiError if the model can't reason and should."""
    if body.think and limits.formats.reasoning is None:
        raise invalid("think", f'"{shown(body.model)}" does not support thinking', "unsupported")
    match body.think:
        case None:
            return {}
        case False:
            return {"reasoning_effort": "none", "include_reasoning": False}
        case True:
            kwargs: dict[str, Any] = {"enable_thinking": True}
        case level:
            kwargs = {"enable_thinking": True, "reasoning_effort": level}
    return {"chat_template_kwargs": Raw(msgspec.json.encode(kwargs))}


def _response_format(raw: Raw) -> ResponseFormat | None:
    text = bytes(raw)
    if text in (b"", b"null", b'""'):
        return None
    if text == b'"json"':
        return ResponseFormat("json_object")
    if not text.startswith(b"{"):
        raise invalid("format", "'format' must be json or a JSON schema, which is an object", "invalid_value")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=raw))


def _own(error: ApiError, reply_fields: OllamaFields, limits: RequestLimits) -> ApiError:
    """The error as Ollama's clients expect it."""
    if error.param == "tools" and error.code == "unsupported":
        why = 'it has no chat template, or chat.tool_call_parser is "none"'
        what = f'"{shown(reply_fields.model)}" does not support tools: {why}'
        return unsupported("tools", what)
    return renamed(error, reply_fields)
