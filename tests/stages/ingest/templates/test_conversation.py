"""What a template is given of a chat."""

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
def test_arguments_are_an_object_whatever_the_model_wrote(text: str, arguments: Any) -> None:
    made = message(call(text))["tool_calls"]
    assert made == [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    assert list(made[0]["function"]["arguments"]) == list(arguments)


def test_arguments_are_text_where_the_template_adds_them_to_text() -> None:
    assert (
        message(call('{"a": 1}'), TemplateTraits(json_arguments=True))["tool_calls"][0]["function"]["arguments"]
        == '{"a": 1}'
    )


def test_nothing_is_none_only_for_a_template_that_asks() -> None:
    assert message(call("{}"))["content"] == ""
    assert message(call("{}"), TemplateTraits(none=True))["content"] is None
    assert message(call("{}"), TemplateTraits(parts=True))["content"] == []
    assert message(call("{}"), TemplateTraits(parts=True, text_too=True))["content"] == ""


def test_parts_are_given_to_a_template_that_goes_through_them() -> None:
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


def test_reasoning_goes_by_each_of_its_names() -> None:
    made = message(ChatMessage("assistant", "4", reasoning="easy"))
    assert made["reasoning_content"] == made["reasoning"] == made["thinking"] == "easy"


def test_developers_are_the_system_to_a_template_that_does_not_know_them() -> None:
    chat = [ChatMessage("system", "a"), ChatMessage("user", "hi"), ChatMessage("developer", "b")]
    made = variables(ChatPrompt(chat), PLAIN)["messages"]
    assert made == [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "hi"}]
    known = variables(ChatPrompt(chat), TemplateTraits(developer=True))["messages"]
    assert [one["role"] for one in known] == ["system", "user", "developer"]
    source = "{% for m in messages %}{% for p in m.content %}{{ m.role }}:{{ p.text }};{% endfor %}{% endfor %}"
    assert render(source, ChatPrompt(chat)) == "system:a\n\nb;user:hi;"


def test_a_template_gets_tools_unless_none_may_be_called() -> None:
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
def test_what_is_no_chat_is_refused_with_the_name_of_its_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadChat) as caught:
        variables(ChatPrompt([ChatMessage("user", "hi")], **fields), PLAIN)
    assert caught.value.param == param


@pytest.mark.parametrize("content", [None, ""])
def test_the_output_goes_on_with_nothing_that_is_not_there(content: str | None) -> None:
    chat = ChatPrompt([ChatMessage("assistant", content)], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(BadChat, match="no content"):
        variables(chat, PLAIN)


def test_the_output_goes_on_behind_the_last_message_whatever_the_template_does_with_it() -> None:
    def going_on(source: str, *contents: str) -> str:
        messages = [ChatMessage("user", content) for content in contents]
        return render(source, ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True))

    source = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert going_on(source, "a", "b ") == "<a><b "
    assert going_on(source.replace("content", "content|trim"), "a", " b  ") == "<a><b"
    assert going_on(source, "CONTINUE_FINAL_MESSAGE_TAG x", "b") == "<CONTINUE_FINAL_MESSAGE_TAG x><b"
    for cutting in ("{{ messages[0].content }}", "{{ messages[1].content[:1] }}", "{{ messages[1].content|upper }}"):
        with pytest.raises(BadChat, match="changes the last message") as caught:
            going_on(cutting, "first", "second")
        assert caught.value.param == "continue_final_message"


def test_names_of_the_client_can_make_a_template_fail_and_no_more() -> None:
    for kwargs in ({"range": 1}, {"namespace": "x"}, {"raise_exception": 2}, {"strftime_now": []}):
        with pytest.raises(TemplateFailure, match="refused the messages"):
            render(
                "{{ range(3) }}{{ namespace(a=1) }}{{ strftime_now('') }}{{ raise_exception('') }}",
                ChatPrompt([ChatMessage("user", "x")], template_kwargs=json.dumps(kwargs)),
            )
