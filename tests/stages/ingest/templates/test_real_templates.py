"""Our output of real models' templates equals that of transformers, byte for byte."""

import json
from typing import Any

import pytest

from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits
from tests.stages.ingest.templates.chats import TEMPLATES, Chat, by_transformers, prompt, render

SOURCES = {path.name.removesuffix(".jinja"): path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a <city> & its 'surroundings'\n – daily",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 7]}},
            "required": ["city"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "description": "", "parameters": {"type": "object"}}}

WHERE = '{"city": "Ürgüp", "days": 7}'
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": WHERE}}
ASKED: Chat = [
    {"role": "user", "content": "How is the weather in Ürgüp?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "blue"}', "tool_call_id": "call12345", "name": "weather"},
]

CHATS: dict[str, Chat] = {
    "one": [{"role": "user", "content": " Hi <|im_end|> {{ there }} \n"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "💥 é"},
    ],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "first"}, {"type": "text", "text": " second "}]}],
    "called": ASKED,
    "called and answered": [*ASKED, {"role": "assistant", "content": "Blue."}, {"role": "user", "content": "Thanks"}],
    "reasoned": [
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "4", "reasoning_content": "It is easy."},
        {"role": "user", "content": "really?"},
    ],
}


TAKE_JSON = {"deepseek-r1-distill"}
"""Templates that write the arguments of a tool call unchanged."""

TAKE_PARTS = {
    *("gemma3", "gemma4", "glm4.6", "glm4.7-flash", "granite4.0", "kimi-k2", "kimi-k2-thinking", "llama4"),
    *("lfm2.5", "ministral3", "mistral3", "muse-glimmer", "qwen3.5"),
}
"""Templates that iterate over content parts; for the others, transformers gets text."""


TAKE_THINKING = {"ministral3"}
"""Templates that get reasoning as a part of the content."""


REFUSING = {"gemma2", "hermes3.tool_use", "kimi-k2-thinking", "seed-oss"}
"""Templates that do not accept every chat below. Kimi K2 Thinking's calls a method that the sandbox forbids."""

FAIL_ON_NONE = {
    *("gemma3", "glm4.6", "glm4.7-flash", "gpt-oss", "granite3.3", "lfm2", "lfm2.5", "llama4", "ministral3", "phi3.5")
}
"""Templates that fail on a content of None, or write it. They don't test for it, so we pass them a text."""


def joined(messages: Chat) -> Chat:
    def text(content: Any) -> Any:
        return "\n".join(part["text"] for part in content) if isinstance(content, list) else content

    return [message | {"content": text(message["content"])} for message in messages]


def with_thinking(messages: Chat) -> Chat:
    def parts(message: dict[str, Any]) -> Any:
        reasoning, content = message.get("reasoning_content"), message["content"]
        if not reasoning:
            return content
        text = {"type": "text", "text": content or ""}
        return [{"type": "thinking", "thinking": reasoning}, *(content if isinstance(content, list) else [text])]

    return [message | {"content": parts(message)} for message in messages]


def same(name: str, messages: Chat, **options: Any) -> None:
    source = SOURCES[name]
    for_them = messages if name in TAKE_PARTS else joined(messages)
    for_them = with_thinking(for_them) if name in TAKE_THINKING else for_them
    try:
        expected = by_transformers(source, for_them, with_json=name in TAKE_JSON, **options)
    except Exception:  # noqa: BLE001 - whatever transformers raises
        assert name in REFUSING
        with pytest.raises((TemplateFailure, BadChat)):
            render(source, prompt(messages, **options))
        return
    assert render(source, prompt(messages, **options)) == expected


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_chat_is_rendered_as_by_transformers(name: str, chat: str) -> None:
    for generates in (True, False):
        same(name, CHATS[chat], add_generation_prompt=generates)
        same(name, CHATS[chat], add_generation_prompt=generates, tools=[WEATHER])
        same(name, CHATS[chat], add_generation_prompt=generates, tools=[WEATHER, TIME])


@pytest.mark.parametrize("name", SOURCES)
def test_a_tool_call_without_content_is_rendered_as_by_transformers(name: str) -> None:
    chat = [ASKED[0], ASKED[1] | {"content": None}, ASKED[2]]
    if name in FAIL_ON_NONE:
        chat_prompt = prompt(chat, tools=[WEATHER], add_generation_prompt=True)
        assert render(SOURCES[name], chat_prompt) == by_transformers(
            SOURCES[name], ASKED, tools=[WEATHER], add_generation_prompt=True
        )
    else:
        same(name, chat, add_generation_prompt=True, tools=[WEATHER])


@pytest.mark.parametrize("name", TAKE_THINKING)
def test_reasoning_is_a_part_of_the_content_for_templates_that_read_it_there(name: str) -> None:
    reply = {"role": "assistant", "content": "4", "reasoning_content": "It is easy."}
    for changes in ({}, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, {"content": None}):
        chat: Chat = [{"role": "user", "content": "2 + 2"}, reply | changes, {"role": "user", "content": "really?"}]
        same(name, chat, add_generation_prompt=True)
        assert "[THINK]It is easy.[/THINK]" in render(SOURCES[name], prompt(chat, add_generation_prompt=True))
    same(name, [ASKED[0], ASKED[1] | {"reasoning_content": "I ask."}, ASKED[2]], add_generation_prompt=True)
    same(name, [ASKED[0], reply], add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize("ending", ["Once upon", "Once upon a \n ", "a\nb"])
@pytest.mark.parametrize("name", SOURCES)
def test_continuing_a_message_agrees_with_transformers(name: str, ending: str) -> None:
    chat: Chat = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": ending}]
    same(name, chat, add_generation_prompt=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3", {"enable_thinking": True}),
        ("gemma4", {"enable_thinking": True}),
        ("glm4.6", {"enable_thinking": False}),
        ("glm4.7-flash", {"enable_thinking": False}),
        ("gpt-oss", {"reasoning_effort": "high", "model_identity": "You are Größe.", "builtin_tools": ["python"]}),
        ("granite3.3", {"thinking": True, "controls": {"length": "short"}}),
        ("smollm3", {"enable_thinking": False}),
        ("seed-oss", {"thinking_budget": 512}),
        ("deepseek-v3.1", {"thinking": True}),
        ("llama3.1", {"date_string": "1 Apr 2025", "custom_tools": [WEATHER]}),
        ("llama3.2", {"tools_in_user_message": False}),
        ("llama4", {"tools_in_user_message": False}),
        ("command-r7b", {"enable_citations": True, "add_generation_prompt_": 1}),
    ],
)
def test_template_kwargs_of_the_client_reach_the_template(name: str, kwargs: dict[str, Any]) -> None:
    for tools in ([WEATHER, TIME], None):
        same(name, CHATS["system"], add_generation_prompt=True, tools=tools, kwargs=kwargs)


def test_documents_reach_the_template() -> None:
    documents = [{"title": "Ürgüp", "text": "A town"}]
    options: Any = {"documents": documents, "tools": [WEATHER], "add_generation_prompt": True}
    expected = by_transformers(SOURCES["command-r7b"], CHATS["one"], **options)
    chat_prompt = prompt(CHATS["one"], tools=[WEATHER], documents=json.dumps(documents))
    assert render(SOURCES["command-r7b"], chat_prompt) == expected
    assert "A town" in expected


def test_inspection_finds_the_traits_of_real_templates() -> None:
    all_traits = {name: ChatTemplate(source).traits for name, source in SOURCES.items()}
    assert {name for name, traits in all_traits.items() if traits.parts} == TAKE_PARTS
    assert {name for name, traits in all_traits.items() if traits.none} == {
        *("apertus", "deepseek-r1-distill", "deepseek-v3.1", "kimi-k2", "kimi-k2-thinking", "muse-glimmer"),
        "qwen3.5",
    }
    assert {name for name, traits in all_traits.items() if traits.json_arguments} == TAKE_JSON
    assert all_traits["qwen3"] == TemplateTraits(text_too=True)
