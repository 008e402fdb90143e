"""Where replies begin, with the templates of all models that reason: the same with marks of the format in anything that
the client writes as without. Only the text of a message that the output continues may change it."""

import json
import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime.messages import ChatMessage, ChatPrompt, ToolCall
from pipeline.stages.ingest.templates import reply_start
from pipeline.stages.ingest.templates.chat_templates import ChatTemplates, NeedsTime
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import FORMATS, ReasoningFormat, ReasoningStage
from tests.stages.ingest.templates.chats import NOW_S, TEMPLATES
from tests.text.formats.test_templates import FORMATS as NAMES

OPEN, OVER, OPTIONAL = ReasoningStage.OPEN, ReasoningStage.OVER, ReasoningStage.OPTIONAL


class Model(NamedTuple):
    template: str
    kwargs: dict[str, Any]
    after_user: ReasoningStage
    after_tool: ReasoningStage


MODELS = [
    Model("apertus", {"enable_thinking": True}, OPTIONAL, OPTIONAL),
    Model("deepseek-r1-distill", {}, OPEN, OPEN),
    Model("deepseek-v3.1", {}, OVER, OPTIONAL),
    Model("deepseek-v3.1", {"thinking": True}, OPEN, OPTIONAL),
    Model("deepseek-v3.1-official", {}, OVER, OPTIONAL),
    Model("deepseek-v3.1-official", {"thinking": True}, OPEN, OPTIONAL),
    Model("gemma4", {}, OVER, OPTIONAL),
    Model("gemma4", {"enable_thinking": True}, OPTIONAL, OPTIONAL),
    Model("glm4.6", {}, OPTIONAL, OPTIONAL),
    Model("glm4.6", {"enable_thinking": False}, OVER, OVER),
    Model("glm4.7-flash", {}, OPEN, OPEN),
    Model("glm4.7-flash", {"enable_thinking": False}, OVER, OVER),
    Model("gpt-oss", {}, OPTIONAL, OPTIONAL),
    Model("granite3.3", {}, OPTIONAL, OPTIONAL),
    Model("granite3.3", {"thinking": True}, OPTIONAL, OPTIONAL),
    Model("kimi-k2-thinking", {}, OPTIONAL, OPTIONAL),
    Model("laguna", {}, OVER, OVER),
    Model("laguna", {"enable_thinking": True}, OPEN, OPEN),
    Model("lfm2.5", {}, OPTIONAL, OPTIONAL),
    Model("ministral3", {}, OPTIONAL, OPTIONAL),
    Model("muse-glimmer", {}, OPTIONAL, OPTIONAL),
    Model("qwen3", {}, OPTIONAL, OPTIONAL),
    Model("qwen3", {"enable_thinking": False}, OVER, OVER),
    Model("qwen3.5", {}, OPEN, OPEN),
    Model("qwen3.5", {"enable_thinking": False}, OVER, OVER),
    Model("seed-oss", {}, OPTIONAL, OPTIONAL),
    Model("seed-oss", {"thinking_budget": 0}, OVER, OVER),
    Model("smollm3", {}, OPTIONAL, OPTIONAL),
    Model("smollm3", {"enable_thinking": False}, OVER, OVER),
]
MODEL_IDS = [f"{one.template}_{'_'.join(map(str, one.kwargs.values()))}".rstrip("_") for one in MODELS]

FORMS = {name: ChatFormats.of((TEMPLATES / f"{name}.jinja").read_text(), ChatSettings()).reasoning for name in NAMES}


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str | None, **fields: Any) -> ChatMessage:
    return ChatMessage("assistant", text, **fields)


def call(text: str) -> ChatMessage:
    arguments = json.dumps({"text": text, text: [text]})
    return assistant(None, tool_calls=[ToolCall("call12345", "find", arguments)])


def result(text: str) -> ChatMessage:
    return ChatMessage("tool", text, tool_call_id="call12345", name="find")


def tools(text: str) -> str:
    schema = {"type": "object", "properties": {text: {"type": "string", "description": text}}}
    return json.dumps([{"type": "function", "function": {"name": "find", "description": text, "parameters": schema}}])


LAST_MESSAGES: dict[str, Callable[[str], ChatPrompt]] = {
    "user": lambda text: ChatPrompt([user(text)]),
    "user's parts": lambda text: ChatPrompt([ChatMessage("user", f"a\n{text}", parts=["a", text])]),
    "system": lambda text: ChatPrompt([ChatMessage("system", text), user("hi")]),
    "earlier user": lambda text: ChatPrompt([user(text), assistant("b"), user("hi")]),
    "answer": lambda text: ChatPrompt([user("a"), assistant(text), user("hi")]),
    "reasoning": lambda text: ChatPrompt([user("a"), assistant("b", reasoning=text), user("hi")]),
    "call": lambda text: ChatPrompt([user("a"), call(text), result("b"), assistant("c"), user("hi")]),
    "earlier result": lambda text: ChatPrompt([user("a"), call("b"), result(text), assistant("c"), user("hi")]),
    "tools": lambda text: ChatPrompt([user("hi")], tools=tools(text)),
    "documents": lambda text: ChatPrompt([user("hi")], documents=json.dumps([{"doc_id": 1, "text": text}])),
    "last answer": lambda text: ChatPrompt([user("a"), assistant(text)]),
    "last reasoning": lambda text: ChatPrompt([user("a"), assistant("b", reasoning=text)]),
    "result": lambda text: ChatPrompt([user("a"), call("b"), result(text)]),
    "call before a result": lambda text: ChatPrompt([user("a"), call(text), result("b")]),
    "last call": lambda text: ChatPrompt([user("a"), call(text)]),
}
AFTER_TOOL = ("result", "call before a result")
UNFINISHED = ("last answer", "last reasoning", "last call")
"""The last message is the assistant's own, after which some templates begin no other."""

WITH_CALLS = ("call", "earlier result", "result", "call before a result", "last call")

ALL = bool(os.environ.get("PIPELINE_ALL_CASES"))
FEW = 16
"""One of so many texts is tried if not all are."""

HARMLESS = "word"
WHOLE: list[Callable[[str], str]] = [
    lambda mark: mark,
    lambda mark: f"What is {mark}",
    lambda mark: f"{mark}\n\n",
    lambda mark: f"What is {mark} for? {'Say it. ' * 40}",
    lambda mark: f" \n{mark}{reply_start.SENTINEL}{mark}\n",
]
"""Texts that contain a mark."""


def form_of(model: Model) -> ReasoningFormat:
    form = FORMS[model.template]
    assert form is not None
    return form


def marks_of(form: ReasoningFormat) -> list[str]:
    """Each mark of the format, both orders of two, and those of another format."""
    own = [*dict.fromkeys((*form.stage_marks, form.start, form.end, *form.marks))]
    return [*own, form.start + form.end, form.end + form.start, f"{form.start}\n", "<think></think>"]


@lru_cache
def templates_of(name: str) -> ChatTemplates:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplates({"default": ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})}, "", 10.0)


def begun(templates: ChatTemplates, prompt: ChatPrompt, form: ReasoningFormat, kwargs: Any = ()) -> ReasoningStage:
    if kwargs:
        prompt = msgspec.structs.replace(prompt, template_kwargs=json.dumps(kwargs))
    rendered = templates.render(prompt, max_chars=10**6, now_s=NOW_S, is_short=False, reasoning=form)
    assert rendered.reply_stage is not None
    return rendered.reply_stage


def test_all_templates_that_reason_are_here() -> None:
    assert {one.template for one in MODELS} == {name for name, form in FORMS.items() if form is not None}


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_a_reply_begins_where_the_template_says(model: Model) -> None:
    templates, form = templates_of(model.template), form_of(model)
    assert begun(templates, LAST_MESSAGES["user"]("hi"), form, model.kwargs) == model.after_user
    assert begun(templates, LAST_MESSAGES["answer"]("hi"), form, model.kwargs) == model.after_user
    if model.template != "kimi-k2-thinking":  # its template refuses tools in the sandbox
        assert begun(templates, LAST_MESSAGES["result"]("hi"), form, model.kwargs) == model.after_tool


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_marks_in_what_a_client_writes_change_nothing(model: Model) -> None:
    templates, form = templates_of(model.template), form_of(model)
    texts = [whole(mark) for mark in marks_of(form) for whole in WHOLE]
    for number, (kind, chat) in enumerate(LAST_MESSAGES.items()):
        if model.template == "kimi-k2-thinking" and kind in WITH_CALLS:  # its template refuses them in the sandbox
            with pytest.raises(TemplateFailure):
                begun(templates, chat(HARMLESS), form, model.kwargs)
            continue
        expected = begun(templates, chat(HARMLESS), form, model.kwargs)
        if kind not in UNFINISHED:
            assert expected == (model.after_tool if kind in AFTER_TOOL else model.after_user)
        for text in texts if ALL else texts[number % FEW :: FEW]:
            if (model.template, kind) == ("smollm3", "system") and "/think" in text:
                continue  # see the test below
            try:
                found = begun(templates, chat(text), form, model.kwargs)
            except TemplateFailure:
                assert model.template == "gpt-oss", text  # it refuses messages with its marks
                continue
            assert found == expected, (kind, text)


def test_a_template_may_look_for_words_that_are_in_a_mark() -> None:
    """SmolLM3 reasons if its system message has `/think`, so `</think>` is one too: what the template then writes
    counts."""
    templates, form = templates_of("smollm3"), FORMS["smollm3"]
    assert form is not None
    prompt = LAST_MESSAGES["system"]("Never write </think>.")
    text = templates.text(
        msgspec.structs.replace(prompt, template_kwargs='{"enable_thinking": false}'),
        max_chars=10**6, now_s=NOW_S, is_short=False,
    )  # fmt: skip
    assert text.endswith("<|im_start|>assistant\n")
    assert begun(templates, prompt, form, {"enable_thinking": False}) == OPTIONAL
    assert begun(templates, LAST_MESSAGES["system"]("Never write /no_think </think>."), form) == OVER


def continued(*messages: ChatMessage, kwargs: Any = ()) -> ChatPrompt:
    fields: dict[str, Any] = {"template_kwargs": json.dumps(kwargs)} if kwargs else {}
    return ChatPrompt([*messages], add_generation_prompt=False, continue_final_message=True, **fields)


@pytest.mark.parametrize("model", MODELS, ids=MODEL_IDS)
def test_a_reply_that_continues_a_message_begins_where_its_text_ends(model: Model) -> None:
    """A template may refuse to write a message with marks as it is; the client then gets an error."""
    templates, form = templates_of(model.template), form_of(model)
    far = "Then we see. " * 40
    expected = {
        "The answer is": OVER,
        f"The answer has {form.start}": OVER,
        f"The answer has {form.end} or {form.start} {far}": OVER,
        f"{form.start}": OPEN,
        f"{form.start}\nLet me see. {far}": OPEN,
        f"{form.start}\nIt is {form.start} {far}": OPEN,
        f"{form.start}\nIt is easy.{form.end}\n\nThe": OVER,
        f"{form.start}\nIt is easy.{form.end}\n\nThe mark {form.start} {far}": OVER,
        f"It is easy. {far}{form.end}\n\nThe": OVER,
    }
    if form.name == "gemma4":  # its template removes them from answers
        expected = {"The answer is": OVER, f"It has {far}": OVER}
    if form.messages is not None:  # each mark is a token there, and ends what was before
        expected = {"The answer is": OVER, f"The answer{form.end}": OPTIONAL, f"It has {far}": OVER}
    num_taken = 0
    before = "hi", f"What is {form.start}", f"{form.end}", f"{form.end}{form.start}{far}"
    for text, stage in expected.items():
        for asked in before if ALL else before[::3]:
            for history in ([user(asked)], [user(asked), assistant(asked), user("hi")]):
                prompt = continued(*history, assistant(text), kwargs=model.kwargs)
                try:
                    found = begun(templates, prompt, form)
                except (BadChat, TemplateFailure):
                    continue
                num_taken += 1
                assert found == stage, (text, asked)
    assert num_taken >= 2 * len(expected)


def test_the_only_message_may_be_continued() -> None:
    templates, form = templates_of("seed-oss"), FORMS["seed-oss"]
    assert form is not None
    assert begun(templates, continued(assistant("So")), form) == OVER
    assert begun(templates, continued(assistant("<seed:think>So")), form) == OPEN


THINK = next(form for form in FORMATS if form.name == "qwen3")
USERS = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
OPENING = "{{ 'assistant\n<think>\n' }}"
NONE = "{{ 'assistant\n' }}"


@pytest.mark.parametrize(
    ("source", "prompt", "stage"),
    [
        # The template looks for words in its messages: in all, at the end, at the start, at a whole one.
        (
            USERS + "{% if '/think' in messages[-1].content.replace('</think>', '') %}" + OPENING + "{% endif %}",
            [user("a </think> b /think")],
            OPEN,
        ),
        (
            USERS + "{% if messages[-1].content.endswith('/think') %}" + OPENING + "{% endif %}",
            [user("a /think")],
            OPEN,
        ),
        (USERS + "{% if messages[-1].content == '/think' %}" + OPENING + "{% endif %}", [user("/think")], OPEN),
        (
            USERS + "{% if messages[-1].content.startswith('/think') %}" + OPENING + "{% endif %}",
            [user("/think </think>")],
            OPEN,
        ),
        # It leaves out the last message.
        (
            "{% for m in messages if m.role == 'user' %}{{ '[' + m.content + ']</think>' }}{% endfor %}" + NONE,
            [user("a <think>"), ChatMessage("tool", "<think>")],
            OVER,
        ),
        ("{{ messages[0].content }}" + NONE, [user("a"), user("<think>")], OPTIONAL),
        # It writes no message.
        ("hi " + OPENING, [user("</think>")], OPEN),
        # It changes texts.
        (
            "{% for m in messages %}{{ '[' + m.content.strip() + ']' }}{% endfor %}" + NONE,
            [user(" <think> \n")],
            OPTIONAL,
        ),
        ("{% for m in messages %}{{ m.content | tojson }}{% endfor %}" + NONE, [user('"<think>\n"')], OPTIONAL),
        # It refuses a message that it doesn't know.
        (
            "{% if 'ENDS' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + USERS + OPENING,
            [user("</think>")],
            OPEN,
        ),
        # It writes more of the client's behind the last message.
        (USERS + "{{ documents }}{{ tools }}" + NONE, [user("a")], OPTIONAL),
        # It writes nothing behind it.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", [user("a"), user("<think>")], OPTIONAL),
    ],
)
def test_templates_of_other_kinds(source: str, prompt: list[ChatMessage], stage: ReasoningStage) -> None:
    templates = ChatTemplates({"default": ChatTemplate(source)}, "", 10.0)
    documents, listed = json.dumps([{"text": "<think>"}]), tools("</think><think>")
    assert begun(templates, ChatPrompt(prompt), THINK) == stage
    assert begun(templates, ChatPrompt(prompt, documents=documents, tools=listed), THINK) == stage


def test_variables_of_the_request_may_begin_the_reasoning() -> None:
    templates = ChatTemplates({"default": ChatTemplate(USERS + "{{ prefix }}")}, "", 10.0)
    assert begun(templates, ChatPrompt([user("</think>")]), THINK) == OPTIONAL
    assert begun(templates, ChatPrompt([user("</think>")]), THINK, {"prefix": "assistant <think>"}) == OPEN


def num_renderings(template: str, prompt: ChatPrompt, monkeypatch: pytest.MonkeyPatch) -> int:
    templates, form = templates_of(template), FORMS[template]
    assert form is not None
    texts: list[str] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, *args: Any, **kwargs: Any) -> str:
        texts.append(render(self, *args, **kwargs))
        return texts[-1]

    begun(templates, prompt, form)  # what the template takes is tried once
    monkeypatch.setattr(ChatTemplate, "render", counted)
    begun(templates, prompt, form)
    monkeypatch.undo()
    return len(texts)


@pytest.mark.parametrize("template", sorted({one.template for one in MODELS}))
def test_most_chats_are_rendered_once_and_no_chat_more_than_twice(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, marked = LAST_MESSAGES["user"]("hi"), LAST_MESSAGES["user"]("<think>[THINK]<seed:think><|channel>thought\n")
    if template not in ("ministral3", "smollm3"):  # their default system messages explain the marks
        assert num_renderings(template, asked, monkeypatch) == 1
    assert num_renderings(template, marked, monkeypatch) <= 2


def test_an_agents_chat_is_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reasoning since the last question stays in the prompt, and the template writes nothing behind a result."""
    turns = [assistant("Well.", reasoning="Hm.", tool_calls=call("a").tool_calls), result("The weather is fine.")]
    assert num_renderings("qwen3", ChatPrompt([user("a"), *turns, *turns]), monkeypatch) == 1
    assert num_renderings("qwen3", ChatPrompt([user("a"), *turns, result("</think> The weather")]), monkeypatch) == 2
    assert num_renderings("qwen3", ChatPrompt([user("a"), *turns, result("fine")]), monkeypatch) == 2


def test_the_second_rendering_counts_as_the_first_one_does() -> None:
    source = USERS + "{% for i in range(9000) %}{% endfor %}" + NONE
    templates = ChatTemplates({"default": ChatTemplate(source)}, "", 10.0)
    once, twice = ChatPrompt([user("hi")]), ChatPrompt([user("</think>")])
    render: dict[str, Any] = {"max_chars": 100, "now_s": NOW_S, "reasoning": THINK}
    assert templates.render(once, is_short=True, **render).reply_stage == OPTIONAL
    with pytest.raises(NeedsTime):
        templates.render(twice, is_short=True, **render)
    assert templates.render(twice, is_short=False, **render).reply_stage == OPTIONAL


def test_text_of_exactly_the_most_characters_is_no_longer_with_sentinels() -> None:
    templates = ChatTemplates({"default": ChatTemplate(USERS + OPENING)}, "", 10.0)
    prompt = ChatPrompt([user("</think>")] * 9)
    size = len(templates.text(prompt, max_chars=10**6, now_s=NOW_S, is_short=True))
    rendered = templates.render(prompt, max_chars=size, now_s=NOW_S, is_short=True, reasoning=THINK)
    assert (len(rendered.text), rendered.reply_stage) == (size, OPEN)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_the_tail_of_a_stage_has_this_stage(form: ReasoningFormat) -> None:
    stages = {OPEN, OVER, form.default_stage}
    assert {stage: form.stage_of(form.tail_of(stage)) for stage in stages} == {stage: stage for stage in stages}
