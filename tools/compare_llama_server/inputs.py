"""What both servers are asked: texts, with special tokens in them, and chats."""

from collections.abc import Sequence
from typing import Any

from tools.tokenizer_vectors.texts import TEXTS

Chat = list[dict[str, Any]]
Body = dict[str, Any]

PLAIN = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "a ",
    "  a  b\n\n c",
    "Hello, world!",
    "\t",
    "a\r\nb",
    "▁",
    "▁a",
    "a\x00b",
    *TEXTS,
]
"""Texts without special tokens."""
MAX_MARKS = 12
"""Special tokens whose texts are tried in all places."""


def texts_of(marks: Sequence[str]) -> list[str]:
    """Texts with each mark between words, spaces, lines and others."""
    made = [f"a {mark}  \n b{mark} {mark}{mark}\n" for mark in marks]
    for mark in marks[:MAX_MARKS]:
        made += [
            mark,
            f" {mark}",
            f"{mark} ",
            f"{mark} a",
            f"a{mark}",
            f"\n{mark}\n",
            mark[:-1],
            f"{mark[:1]} {mark[1:]}",
        ]
    return [*made, " ".join(marks), "".join(marks)]


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city> & its 'surroundings'",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME = {
    "type": "function",
    "function": {"name": "time", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ürgüp", "days": 7}'},
}
ASKED: Chat = [
    {"role": "user", "content": "How is the weather in Ürgüp?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "call12345", "name": "weather"},
]
TELL: Chat = [{"role": "user", "content": "Tell me a story"}]
CONTINUED = {"continue_final_message": True, "add_generation_prompt": False}

CHATS: dict[str, Body] = {
    "one": {"messages": [{"role": "user", "content": "Hi there"}]},
    "spaces": {"messages": [{"role": "user", "content": "  Hi \n\n"}]},
    "unicode": {"messages": [{"role": "user", "content": "💥 é 漢字 {{ x }} {% y %}"}]},
    "system": {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    "developer": {"messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]},
    "turns": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": " two "}]}]
    },
    "reasoned": {
        "messages": [
            {"role": "user", "content": "2 + 2"},
            {"role": "assistant", "content": "4", "reasoning_content": "It is easy."},
            {"role": "user", "content": "really?"},
        ]
    },
    "no turn for the reply": {"messages": TELL, "add_generation_prompt": False},
    "tools": {"messages": [{"role": "user", "content": "Hello"}], "tools": [WEATHER, TIME]},
    "tools, system": {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "tools": [WEATHER],
    },
    "called": {"messages": ASKED, "tools": [WEATHER]},
    "called, null": {"messages": [ASKED[0], {**ASKED[1], "content": None}, ASKED[2]], "tools": [WEATHER]},
    "answered": {
        "messages": [*ASKED, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Thanks"}],
        "tools": [WEATHER],
    },
    "continued": {"messages": [*TELL, {"role": "assistant", "content": "Once upon"}], **CONTINUED},
    "no thinking": {"messages": TELL, "chat_template_kwargs": {"enable_thinking": False}},
}


def marked(marks: Sequence[str]) -> Body:
    """A chat whose message has special tokens."""
    return {"messages": [{"role": "user", "content": f"a {' b '.join(marks[:MAX_MARKS])} c"}]}
