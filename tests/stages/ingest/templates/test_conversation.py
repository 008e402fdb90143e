"""The variables that a template gets from a chat."""

import json
from typing import Any

import pytest

from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates.conversation import BadChat, variables
from pipeline.stages.ingest.templates.template import TemplateFailure
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits
from tests.stages.ingest.templates.chats import render

PLAIN = TemplateTraits()


def message(given: ChatMessage, traits: TemplateTraits = PLAIN) -> dict[str, Any]:
    (made,) = variables(ChatPrompt([given]), traits)["messages"]
    return dict(made)


def call(arguments: str) -> ChatMessage:
    return ChatMessage("assistant", None, tool_calls=[ToolCall("c1", "f", arguments)])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"b": 1, "a": {"x": [1.5, null, "é"]}}', {"b": 1, "a": {"x": [1.5, None, "é"]}}),
        ("", {}),
        ('{"city": "Par', {}),
        ("[1]", {}),
        ('"text"', {}),
        ("[" * 100_000, {}),
        ('{"n": 1e999}', {}),
    ],
)
def test_arguments_are_always_an_object(text: str, arguments: Any) -> None:
    made = message(call(text))["tool_calls"]
    assert made == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert list(made[0]["function"]["arguments"]) == list(arguments)


def test_arguments_are_text_for_templates_that_concatenate_them() -> None:
    assert (
        message(call('{"a": 1}'), TemplateTraits(json_arguments=True))["tool_calls"][0]["function"]["arguments"]
        == '{"a": 1}'
    )


def test_missing_content_is_none_only_for_templates_that_test_for_none() -> None:
    assert message(call("{}"))["content"] == ""
    assert message(call("{}"), TemplateTraits(none=True))["content"] is None
    assert message(call("{}"), TemplateTraits(parts=True))["content"] == []
    assert message(call("{}"), TemplateTraits(parts=True, text_too=True))["content"] == ""


def test_content_parts_are_passed_to_templates_that_iterate_over_them() -> None:
    in_parts = ChatMessage("user", "a\nb", parts=["a", "b"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message(in_parts)["content"] == "a\nb"
    assert message(in_parts, TemplateTraits(parts=True, text_too=True))["content"] == parts
    assert message(ChatMessage("user", "a"), TemplateTraits(parts=True, text_too=True))["content"] == "a"
    assert message(ChatMessage("user", "a"), TemplateTraits(parts=True))["content"] == parts[:1]
    result = ChatMessage("tool", "a\nb", parts=["a", "b"], tool_call_id="c1")
    assert message(result, TemplateTraits(parts=True, text_too=True)) == {
        "role": "tool",
        "content": "a\nb",
        "tool_call_id": "c1",
    }


def test_reasoning_has_all_of_its_common_names() -> None:
    made = message(ChatMessage("assistant", "4", reasoning="easy"))
    assert made["reasoning_content"] == made["reasoning"] == made["thinking"] == "easy"


def test_developer_messages_are_system_messages_for_templates_without_that_role() -> None:
    chat = [ChatMessage("system", "a"), ChatMessage("user", "hi"), ChatMessage("developer", "b")]
    made = variables(ChatPrompt(chat), PLAIN)["messages"]
    assert made == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "hi"}]
    known = variables(ChatPrompt(chat), TemplateTraits(developer=True))["messages"]
    assert [one["role"] for one in known] == ["system", "user", "developer"]
    source = "{% for m in messages %}{% for p in m.content %}{{ m.role }}:{{ p.text }};{% endfor %}{% endfor %}"
    assert render(source, ChatPrompt(chat)) == "system:a\n\nb;user:hi;"


def test_a_template_gets_tools_unless_tool_choice_is_none() -> None:
    tools = json.dumps([{"type": "function", "function": {"name": "f"}}])
    for choice in ("auto", "required", "named"):
        made = variables(ChatPrompt([], tools=tools, tool_choice=choice), PLAIN)
        assert made["tools"] == [{"type": "function", "function": {"name": "f"}}]
    assert variables(ChatPrompt([], tools=tools, tool_choice="none"), PLAIN)["tools"] is None
    assert variables(ChatPrompt([]), PLAIN)["documents"] is None


@pytest.mark.parametrize(
    "name",
    [
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "documents",
        "messages",
        "tokenize",
        "tools",
    ],
)
def test_kwargs_override_no_field_of_the_request(name: str) -> None:
    with pytest.raises(BadChat, match=f"can't have '{name}'") as caught:
        variables(ChatPrompt([], template_kwargs=json.dumps({name: []})), PLAIN)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"template_kwargs": "[]"}, "chat_template_kwargs"),
        ({"template_kwargs": "{"}, "chat_template_kwargs"),
        ({"template_kwargs": '{"a":' * 50_000}, "chat_template_kwargs"),
        ({"tools": "{}"}, "tools"),
        ({"tools": "[1]"}, "tools"),
        ({"documents": '["text"]'}, "documents"),
        ({"documents": "\ud800"}, "documents"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_an_invalid_chat_is_rejected_with_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadChat) as caught:
        variables(ChatPrompt([ChatMessage("user", "hi")], **fields), PLAIN)
    assert caught.value.param == param


@pytest.mark.parametrize("content", [None, ""])
def test_a_message_of_only_calls_cannot_be_continued(content: str | None) -> None:
    message = ChatMessage("assistant", content, tool_calls=[ToolCall("a", "find", "{}")])
    chat = ChatPrompt([message], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadChat, match="no content"):
        variables(chat, PLAIN)


def test_an_empty_message_is_continued_where_its_content_would_begin() -> None:
    for content in ("", " \n"):
        messages = [ChatMessage("user", "a"), ChatMessage("assistant", content)]
        chat = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
        source = "{% for m in messages %}<{{ m.role }}>\n {{ m.content }}{% endfor %}"
        assert render(source, chat) == f"<user>\n a<assistant>\n {content}"
        assert render(source.replace("m.content", "m.content|trim"), chat) == "<user>\n a<assistant>\n "


def test_a_continued_message_ends_the_prompt_with_any_template() -> None:
    def continued(source: str, *contents: str) -> str:
        messages = [ChatMessage("user", content) for content in contents]
        return render(source, ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))

    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert continued(source, "a", "b ") == "<a><b "
    assert continued(source.replace("content", "content|trim"), "a", " b  ") == "<a><b"
    assert continued(source, "CONTINUE_FINAL_MESSAGE_TAG x", "b") == "<CONTINUE_FINAL_MESSAGE_TAG x><b"
    for cutting in ("{{ messages[0].content }}", "{{ messages[1].content[:1] }}", "{{ messages[1].content|upper }}"):
        with pytest.raises(BadChat, match="changes the last message") as caught:
            continued(cutting, "first", "second")
        assert caught.value.param == "continue_final_message"


def test_template_kwargs_of_the_client_can_only_make_a_template_fail() -> None:
    for kwargs in ({"range": 1}, {"namespace": "x"}, {"raise_exception": 2}, {"strftime_now": []}):
        with pytest.raises(TemplateFailure, match="refused the messages"):
            render(
                "{{ range(3) }}{{ namespace(a=1) }}{{ strftime_now('') }}{{ raise_exception('') }}",
                ChatPrompt([ChatMessage("user", "x")], template_kwargs=json.dumps(kwargs)),
            )
