"""Bodies of Ollama's API, parsed with the limits of a small model."""

import json
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.ollama.parsing import parse_chat, parse_generate
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken

FORMATS = ChatFormats.of("{{ messages }}", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3"))
LIMITS = RequestLimits(model="tiny", max_sequences=64, formats=FORMATS, max_prompt_tokens=512, hidden_size=8)
PLAIN = msgspec.structs.replace(LIMITS, formats=ChatFormats())
FILLS = msgspec.structs.replace(
    LIMITS,
    formats=ChatFormats(
        added={text: AddedToken(i, text) for i, text in enumerate(("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))}
    ),
)
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
GENERATE: dict[str, Any] = {"model": "tiny", "prompt": "Hi"}
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 40}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
CALL = {"function": {"name": "find", "arguments": {"x": 1.50}}}


def parse(body: Any, limits: RequestLimits = LIMITS) -> ParsedRequest:
    parser = parse_chat if "messages" in body else parse_generate
    return parser(json.dumps(body).encode(), limits)


def calls(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


def prompt_of(*messages: Any, **fields: Any) -> m.ChatPrompt:
    (prompt,) = parse(CHAT | {"messages": messages} | fields).prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt


def refused(body: Any, limits: RequestLimits = LIMITS) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse(body, limits)
    return error.value
