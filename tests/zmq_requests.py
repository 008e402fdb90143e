"""Requests over ZeroMQ, and the prompts and fields that they are made of."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.client import protocol as p
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, parse_generate

Fields = Mapping[str, Any]
"""Fields of a `p.Request`."""


def generate(
    request_id: int,
    prompt: str | bytes | Fields = "Hi",
    params: Fields | None = None,
    credits: int = 100,
    received: Sequence[bytes] = (),
    name: str | None = None,
    **fields: Any,
) -> p.Generate:
    """Generate from a text, packed ids or a `chat`."""
    return p.Generate(request_id, request(prompt, **(params or {}), **fields), credits, list(received), name)


def request(prompt: str | bytes | Fields, **fields: Any) -> p.Request:
    match prompt:
        case str():
            return p.Request(prompt=prompt, **fields)
        case bytes():
            return p.Request(prompt_token_ids=prompt, **fields)
    return p.Request(**prompt, **fields)


def chat(messages: list[p.MessageParam], **fields: Any) -> dict[str, Any]:
    """Fields that are texts are JSON text, those of other types than in the struct are written as it."""
    kept = {name: raw(value) if name in RAW else value for name, value in fields.items()}
    return {"messages": messages, **kept}


RAW = ("tools", "tool_choice", "documents", "chat_template_kwargs")


def raw(value: Any) -> msgspec.Raw:
    return p.json_text(value if isinstance(value, str) else json.dumps(value))


def named(tool: str, kind: str = "function") -> dict[str, Any]:
    """A `tool_choice`."""
    return {"type": kind, kind: {"name": tool}}


def call(call_id: str, name: str, arguments: str) -> p.ToolCallParam:
    return p.ToolCallParam(p.FunctionCall(name, arguments), call_id)


def parsed(message: p.Generate, limits: RequestLimits) -> ParsedRequest:
    """The server's reading of a message's bytes. Raises ApiError."""
    data = msgspec.msgpack.encode(message)
    return parse_generate(msgspec.msgpack.decode(data, type=ReceivedGenerate), limits)
