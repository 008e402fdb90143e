"""Chats as a client writes them, for our templates and for those of transformers."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates import conversation
from pipeline.stages.ingest.templates.budget import Budget
from pipeline.stages.ingest.templates.template import ChatTemplate

TEMPLATES = Path(__file__).parents[3] / "data" / "templates"
NOW_S = 1_750_000_000.0

Chat = list[dict[str, Any]]
"""Messages in OpenAI's format."""


def prompt(messages: Chat, *, tools: list[Any] | None = None, kwargs: Any = None, **fields: Any) -> ChatPrompt:
    return ChatPrompt(
        [_message(message) for message in messages],
        tools=json.dumps(tools) if tools is not None else "",
        template_kwargs=json.dumps(kwargs) if kwargs is not None else "",
        **fields,
    )


def render(source: str, chat: ChatPrompt, *, num_steps: int = 10**6, max_chars: int = 10**6) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    variables = conversation.variables(chat, template.traits)
    text = template.render(variables, max_chars=max_chars, budget=Budget(num_steps), now_s=NOW_S)
    return conversation.up_to_tag(text, chat) if chat.continue_final_message else text


def by_transformers(source: str, messages: Chat, *, with_json: bool = False, **options: Any) -> str:
    """The output of transformers' `apply_chat_template`, called as its documentation describes."""
    from transformers.utils.chat_template_utils import render_jinja_template

    plain = [_for_transformers(message, with_json) for message in messages]
    kwargs = {"bos_token": "<s>", "eos_token": "</s>"} | options.pop("kwargs", {})
    with mock.patch("transformers.utils.chat_template_utils.datetime", Now):
        (text,), _ = render_jinja_template(conversations=[plain], chat_template=source, **kwargs, **options)
    return str(text)


class Now(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Now":
        return cls.fromtimestamp(NOW_S)


def _message(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content")
    parts = [part["text"] for part in content] if isinstance(content, list) else None
    calls = [
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    ]
    return ChatMessage(
        message["role"],
        "\n".join(parts) if parts is not None else content,
        message.get("name"),
        parts,
        calls,
        message.get("tool_call_id"),
        message.get("reasoning_content"),
    )


def _for_transformers(message: dict[str, Any], with_json: bool) -> dict[str, Any]:
    plain = json.loads(json.dumps(message))
    for call in () if with_json else plain.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert isinstance(plain, dict)
    return plain
