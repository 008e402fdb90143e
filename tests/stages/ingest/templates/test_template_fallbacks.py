"""Forms of a chat for templates that refuse or shorten the usual one: nothing of it is lost, and others are as they
were."""

import dataclasses
from pathlib import Path

import pytest

from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates import template_fallbacks
from pipeline.stages.ingest.templates.budget import Budget
from pipeline.stages.ingest.templates.chat_templates import SHORT_STEPS, ChatTemplates
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure
from pipeline.stages.ingest.templates.template_inspection import TemplateTraits
from tests.stages.ingest.templates.chats import TEMPLATES

A, B, C = (ToolCall(name, f"f_{name}", "{}") for name in "abc")
USER, LAST = ChatMessage("user", "Hi"), ChatMessage("user", "and now?")

ALL = (
    "{% for m in messages %}[{{ m.role }}:{{ m.reasoning }}:{{ m.content }}"
    "{% for c in m.tool_calls %}<{{ c.id }}>{% endfor %}]{% endfor %}"
)
ONE_CALL = "{% for m in messages %}{% if m.tool_calls|length > 1 %}{{ raise_exception('one') }}{% endif %}{% endfor %}"
FIRST_CALL = (
    "{% for m in messages %}[{{ m.role }}:{{ m.content }}"
    "{% if m.tool_calls %}<{{ m.tool_calls[0].function.name }}>{% endif %}]{% endfor %}"
)
ONE_TEXT = (
    "{% for m in messages %}{% if m.tool_calls and m.content and m.reasoning %}{{ raise_exception('text') }}{% endif %}"
    "{% endfor %}"
)


def result(call: ToolCall, text: str) -> ChatMessage:
    return ChatMessage("tool", text, call.name, tool_call_id=call.id)


def calls(*some: ToolCall, content: str | None = None, reasoning: str | None = None) -> ChatMessage:
    return ChatMessage("assistant", content, tool_calls=list(some), reasoning=reasoning)


def shape(prompt: ChatPrompt) -> str:
    """The calls and results in order: `a` is a call, `=x` the text of a result."""
    texts = [
        f"={one.content}" if one.role == "tool" else "".join(call.id for call in one.tool_calls) or one.role[0]
        for one in prompt.messages
    ]
    return " ".join(texts)


@pytest.mark.parametrize(
    ("messages", "apart"),
    [
        ([USER, calls(A, B), result(A, "1"), result(B, "2")], "u a =1 b =2"),
        ([USER, calls(A, B), result(B, "2"), result(A, "1"), LAST], "u a =1 b =2 u"),
        ([USER, calls(A, B, C), result(B, "2")], "u a b =2 c"),
        ([USER, calls(A, B)], "u a b"),
        ([calls(A, B), result(C, "3"), result(A, "1")], "a =1 b =3"),
        ([calls(A, B), result(A, "1"), result(A, "2"), result(B, "3")], "a =1 =2 b =3"),
        ([calls(A, A), result(A, "1"), result(A, "2")], "a =1 a =2"),
        ([calls(A, B, A), result(A, "1"), result(B, "2"), result(A, "3"), result(A, "4")], "a =1 b =2 a =3 =4"),
        ([calls(A, A), result(A, "1")], "a =1 a"),
        ([calls(A), result(A, "1"), calls(B, C), result(B, "2"), USER, result(C, "3")], "a =1 b =2 c u =3"),
    ],
)
def test_each_call_has_its_results_behind_it(messages: list[ChatMessage], apart: str) -> None:
    made = template_fallbacks.with_calls_apart(ChatPrompt(messages))
    assert shape(made) == apart
    assert all(len(one.tool_calls) < 2 for one in made.messages)


def test_what_is_said_beside_calls_stays_with_the_first_once() -> None:
    said = calls(A, B, content="text", reasoning="thought")
    first, second = template_fallbacks.with_calls_apart(ChatPrompt([said])).messages
    assert (first.content, first.reasoning, first.tool_calls) == ("text", "thought", [A])
    assert (second.content, second.reasoning, second.tool_calls) == (None, None, [B])
    assert said.tool_calls == [A, B], "the prompt is another one"


def test_results_are_looked_at_once_however_many_there_are() -> None:
    some = [ToolCall(f"c{i}", "f", "{}") for i in range(20_000)]
    results = [result(call, call.id) for call in reversed(some)]
    made = template_fallbacks.with_calls_apart(ChatPrompt([calls(*some), *results]))
    pairs = zip(made.messages[::2], made.messages[1::2], strict=True)
    assert all(call.tool_calls[0].id == answer.content for call, answer in pairs)


def test_a_text_beside_reasoning_and_calls_becomes_the_end_of_the_reasoning() -> None:
    others = [USER, calls(A, content="x"), calls(A, reasoning="y"), ChatMessage("assistant", "x", reasoning="y")]
    prompt = ChatPrompt([*others, calls(A, content="text", reasoning="thought")])
    assert template_fallbacks.has_reasoned_call(prompt) and not template_fallbacks.has_reasoned_call(ChatPrompt(others))
    *same, last = template_fallbacks.with_one_text(prompt).messages
    assert same == others
    assert (last.content, last.parts, last.reasoning) == (None, None, "thought\n\ntext")


@pytest.mark.parametrize(
    ("message", "is_empty"),
    [
        (ChatMessage("assistant", ""), True),
        (ChatMessage("assistant", None, reasoning="thought"), True),
        (ChatMessage("assistant", "text"), False),
        (calls(A), False),
        (ChatMessage("user", ""), False),
    ],
)
def test_an_empty_reply_has_neither_text_nor_calls(message: ChatMessage, is_empty: bool) -> None:
    assert template_fallbacks.has_empty_reply(ChatPrompt([message])) == is_empty


def test_only_one_trait_differs_for_empty_parts() -> None:
    traits = TemplateTraits(parts=True, developer=True)
    assert template_fallbacks.with_empty_parts(traits) == dataclasses.replace(traits, empty_parts=True)


def rendered(source: str, *messages: ChatMessage) -> str:
    chats = ChatTemplates({"default": ChatTemplate(source)}, "", 10.0)
    return chats.text(ChatPrompt(list(messages)), max_chars=10_000, now_s=0.0, is_short=True)


def test_a_template_that_takes_a_chat_gets_it_as_it_is() -> None:
    said = calls(A, B, content="text", reasoning="thought")
    assert rendered(ALL, said, result(A, "1")) == "[assistant:thought:text<a><b>][tool::1]"


def test_a_template_that_refuses_several_calls_or_drops_some_gets_them_apart() -> None:
    said = [calls(A, B), result(A, "1"), result(B, "2")]
    assert rendered(ONE_CALL + ALL, *said) == "[assistant::<a>][tool::1][assistant::<b>][tool::2]"
    assert rendered(FIRST_CALL, *said) == "[assistant:<f_a>][tool:1][assistant:<f_b>][tool:2]"


def test_a_template_that_refuses_a_text_beside_reasoning_gets_one_text() -> None:
    said = calls(A, content="text", reasoning="thought")
    assert rendered(ONE_TEXT + ALL, said) == "[assistant:thought\n\ntext:<a>]"


def test_what_a_template_refuses_in_every_form_is_refused() -> None:
    with pytest.raises(TemplateFailure, match="never"):
        rendered("{{ raise_exception('never') }}", calls(A, B))


def test_forms_are_tried_once_with_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ONE_CALL + ONE_TEXT + ALL)
    chats = ChatTemplates({"default": template}, "", 10.0)
    prompt = ChatPrompt([USER, calls(A, B, content="text", reasoning="thought")])
    budgets: list[int] = []
    monkeypatch.setattr(
        "pipeline.stages.ingest.templates.chat_templates.Budget",
        lambda steps, *more: (budgets.append(steps), Budget(steps, *more))[1],
    )
    for num_more in (2 * 2 + 1, 1, 1):  # two forms with two tries each, then the chat itself
        budgets.clear()
        chats.text(prompt, max_chars=10_000, now_s=0.0, is_short=True)
        assert budgets == [SHORT_STEPS] * num_more


QWEN35 = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
NO_SYSTEM = QWEN35.replace(" and not loop.first", "")
SYSTEM, LATER = ChatMessage("system", "Be brief."), ChatMessage("system", "It rains.")


def written(source: str, *messages: ChatMessage) -> str:
    templates = ChatTemplates({"default": ChatTemplate(source)}, "", timeout_s=10.0)
    return templates.text(ChatPrompt(list(messages)), max_chars=1000, now_s=0.0, is_short=True)


@pytest.mark.parametrize("source", [QWEN35, FIRST_SYSTEM])
def test_system_messages_that_a_template_takes_at_the_start_alone_are_joined_there(source: str) -> None:
    developer = ChatMessage("developer", LATER.content)
    for later in (LATER, developer):
        assert written(source, SYSTEM, USER, later, LAST) == "<system>Be brief.\n\nIt rains.<user>Hi<user>and now?"
    assert written(source, USER, LATER, LAST) == "<system>It rains.<user>Hi<user>and now?"
    assert written(source, SYSTEM, LATER, USER) == "<system>Be brief.\n\nIt rains.<user>Hi"
    assert written(source, SYSTEM, USER) == "<system>Be brief.<user>Hi"


def test_system_messages_stay_where_they_are_if_the_template_takes_them() -> None:
    text = written("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", SYSTEM, USER, LATER, LAST)
    assert text == "<system>Be brief.<user>Hi<system>It rains.<user>and now?"
    with pytest.raises(TemplateFailure, match="System message must be"):
        written(NO_SYSTEM, SYSTEM, USER, LATER, LAST)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_no_real_template_leaves_out_a_later_system_message(path: Path) -> None:
    templates = ChatTemplates({"default": ChatTemplate(path.read_text("utf-8"))}, "", timeout_s=10.0)
    later, reply = ChatMessage("system", "It rains."), ChatMessage("assistant", "a")
    for messages in ([SYSTEM, USER, reply, later, LAST], [USER, reply, later, LAST]):
        try:
            text = templates.text(ChatPrompt(messages), max_chars=100_000, now_s=0.0, is_short=False)
        except TemplateFailure:
            continue  # it takes none at all
        assert text.count("It rains.") == 1 and text.count("and now?") == 1
