"""Parses and checks the bodies of POST /v1/messages and /v1/messages/count_tokens, and translates them to the request
that /v1/chat/completions makes. Pure: as build.py."""

import msgspec

from pipeline.client.protocol.generation import JsonSchemaFormat, ResponseFormat
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.bodies import (
    MESSAGES_UNSUPPORTED_FIELDS,
    CountTokensBody,
    MessagesBody,
    OutputFormat,
    ThinkingDisabled,
    ThinkingEnabled,
)
from pipeline.stages.gateway.apis.anthropic.conversation import num_parts, prompt_of
from pipeline.stages.gateway.apis.anthropic.events import MESSAGES
from pipeline.stages.gateway.apis.anthropic.names import FIELDS, own_field
from pipeline.stages.gateway.apis.anthropic.tools import in_body, left_out
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import Body, with_unsupported
from pipeline.stages.gateway.parsing.build import (
    check_model,
    check_num_messages,
    parsed_request_of,
    prompt_only,
    with_reply,
)
from pipeline.stages.gateway.parsing.chat.images import ChatImages
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits, shown_types
from pipeline.stages.gateway.parsing.prompt_fields import check_prompt_bytes
from pipeline.text.formats.chat_formats import ChatFormats

_messages = msgspec.json.Decoder(with_unsupported(MessagesBody, MESSAGES_UNSUPPORTED_FIELDS))
_counts = msgspec.json.Decoder(with_unsupported(CountTokensBody, MESSAGES_UNSUPPORTED_FIELDS))


def parse_messages(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /v1/messages. Raises ApiError."""
    decoded = decode(_messages, body, MESSAGES_UNSUPPORTED_FIELDS)
    try:
        return _parsed(decoded, limits)
    except ApiError as error:
        raise _with_own_field(error) from error


def parse_count_tokens(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /v1/messages/count_tokens: a request about its prompt only. Raises ApiError."""
    decoded = decode(_counts, body, MESSAGES_UNSUPPORTED_FIELDS)
    check_model(decoded.model, limits)
    images = limits.images()
    prompt = _prompt(decoded, limits, images)
    check_prompt_bytes([prompt], limits.caps.max_prompt_bytes, MESSAGES)
    return prompt_only(prompt, m.PromptOptions(any_length=True), "messages", limits, MESSAGES, images.found)


def _parsed(decoded: MessagesBody, limits: RequestLimits) -> ParsedRequest:
    config = decoded.output_config
    body = Body(
        model=decoded.model,
        stream=decoded.stream,
        stop=list(decoded.stop_sequences or []),
        temperature=decoded.temperature,
        top_p=decoded.top_p,
        top_k=decoded.top_k,
        thinking_token_budget=_budget(decoded, limits),
        response_format=None if config is None or config.format is None else _response_format(config.format),
    )
    images = limits.images()
    parsed = parsed_request_of(
        body, 1, lambda: [_prompt(decoded, limits, images)], decoded.max_tokens, limits, MESSAGES, images=images
    )
    parsed = msgspec.structs.replace(
        parsed, prompt_param="messages", left_out=shown_types(left_out(decoded.tools or ()))
    )
    if (grammar := parsed.options.grammar) is not None:
        parsed = _with_grammar(parsed, _own_grammar(grammar, decoded))
    _check_tool_format(parsed, limits.formats)
    parsed = with_reply(parsed, limits, with_reasoning=_shows_reasoning(decoded))
    if (grammar := parsed.options.grammar) is not None:
        parsed = _with_grammar(parsed, _own_grammar(grammar, decoded))
    return parsed


def _prompt(decoded: CountTokensBody, limits: RequestLimits, images: ChatImages) -> m.ChatPrompt:
    check_num_messages(num_parts(decoded.messages), limits)
    return prompt_of(decoded, limits.caps, images)


def _shows_reasoning(decoded: MessagesBody) -> bool:
    thinking = decoded.thinking
    if thinking is None:
        return True
    return not isinstance(thinking, ThinkingDisabled) and thinking.display != "omitted"


def _budget(decoded: MessagesBody, limits: RequestLimits) -> int | None:
    """None for models that can't reason: agents send it to every model."""
    if limits.formats.reasoning is None or not isinstance(decoded.thinking, ThinkingEnabled):
        return None
    return decoded.thinking.budget_tokens


def _response_format(form: OutputFormat) -> ResponseFormat:
    if form.type != "json_schema":
        raise invalid("output_config.format.type", "'output_config.format.type' must be json_schema", "invalid_value")
    return ResponseFormat("json_schema", JsonSchemaFormat(schema=form.schema))


def _check_tool_format(parsed: ParsedRequest, formats: ChatFormats) -> None:
    (prompt,) = parsed.prompts
    assert isinstance(prompt, m.ChatPrompt)
    if prompt.tools and prompt.tool_choice == "auto" and formats.tools is None:
        what = (
            'no tool calls are parsed: chat.tool_call_parser is "none", or the model has no chat template; tool_choice '
            '{"type": "any"} or {"type": "tool"} works without one'
        )
        raise unsupported("tools", what)


def _own_grammar(grammar: m.Grammar, decoded: MessagesBody) -> m.Grammar:
    """The grammar with the path that its field has here, for errors of ingest."""
    return msgspec.structs.replace(grammar, param=own_field(in_body(grammar.param, decoded.tools or ())))


def _with_grammar(parsed: ParsedRequest, grammar: m.Grammar) -> ParsedRequest:
    return msgspec.structs.replace(parsed, options=msgspec.structs.replace(parsed.options, grammar=grammar))


def _with_own_field(error: ApiError) -> ApiError:
    """The error with the name that the field has here."""
    if error.param not in FIELDS:
        return error
    param = own_field(error.param)
    return ApiError(error.status, error.message.replace(f"'{error.param}'", f"'{param}'"), param, error.code)
