"""A call in reasoning without an end is a call, as in vLLM and SGLang; a thought about a format is none."""

import json

import pytest

from tests.text.formats.replies import NAMES, Reply, formats, joined, read

XML = "<tool_call>\n<function=find>\n<parameter=text>\na</think>b\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>find\n<arg_key>text</arg_key>\n<arg_value>a</think>b</arg_value>\n</tool_call>"
JSON = '<tool_call>\n{"name": "find", "arguments": {"text": "a</think>b"}}\n</tool_call>'
SEED = XML.replace("tool_call>", "seed:tool_call>").replace("\na</", "a</").replace("b\n</", "b</")
CALLS = {
    "qwen3_coder": ("qwen3", XML),
    "glm45": ("glm45", GLM),
    "hermes": ("qwen3", JSON),
    "seed_oss": ("seed_oss", SEED),
}
EACH = [(form, *one) for form, one in CALLS.items()]


def reply(form: str, reasoning: str, text: str, *, are_special: bool = False, choice: str = "auto") -> Reply:
    """The same in one piece and by characters."""
    made = formats(form, reasoning)
    if are_special and made.tools is not None and made.reasoning is not None:
        made = formats(form, reasoning, (*made.tools.marks, *made.reasoning.marks))
    tail = made.reasoning.start if made.reasoning is not None else ""
    whole = read(made.parser(choice, NAMES, tail), [text])
    assert read(made.parser(choice, NAMES, tail), text) == whole
    return whole


@pytest.mark.parametrize(("form", "reasoning", "call"), EACH, ids=CALLS)
@pytest.mark.parametrize("behind", ["", "\n</think>", "\n</think>\n\n", "\n</think>\n\nDone", "\nDone </think>"])
def test_a_call_ends_reasoning_that_has_no_end(form: str, reasoning: str, call: str, behind: str) -> None:
    behind = behind.replace("think", "seed:think") if form == "seed_oss" else behind
    found = reply(form, reasoning, f"I look for it.\n\n{call}{behind}")
    assert (found.reasoning, found.num_ended) == ("I look for it.", 1)
    assert [(name, json.loads(arguments)) for name, arguments in found.calls] == [("find", {"text": "a</think>b"})]
    assert found.content.strip() == (
        "Done </think>".replace("think", "seed:think" if form == "seed_oss" else "think")
        if behind.startswith("\nDone")
        else behind[-4:].strip()
        if behind.endswith("Done")
        else ""
    )


@pytest.mark.parametrize(("form", "reasoning", "call"), EACH, ids=CALLS)
def test_marks_that_are_special_tokens_do_the_same(form: str, reasoning: str, call: str) -> None:
    call = call.replace("</think>", "")
    found = reply(form, reasoning, f"I look.\n{call}\n", are_special=True)
    assert (found.reasoning, len(found.calls), found.content) == ("I look.", 1, "")


@pytest.mark.parametrize(("form", "reasoning", "call"), EACH, ids=CALLS)
@pytest.mark.parametrize(
    "thought", ["{}", "`{}`, and so on", "{} <function=lost>", "{}\n\n{{", '{} {{"name": "lost", "a": 1}}']
)
def test_a_mark_that_begins_no_call_is_a_thought(form: str, reasoning: str, call: str, thought: str) -> None:
    mark = call[: call.index(">") + 1]
    end = "</seed:think>" if form == "seed_oss" else "</think>"
    found = reply(form, reasoning, f"I write {thought.format(mark)}.{end}\n\n{call}")
    assert found.reasoning == f"I write {thought.format(mark)}."
    assert [name for name, _ in found.calls] == ["find"]
    cut = reply(form, reasoning, f"I write {thought.format(mark)}")
    assert (cut.reasoning, cut.calls) == (f"I write {thought.format(mark)}", [])


def test_calls_that_are_required_stand_behind_the_reasoning() -> None:
    found = reply(
        "qwen3_coder", "qwen3", f"I look.\n{XML.replace('a</think>b', 'b')}</think>\n\n{XML}", choice="required"
    )
    assert len(found.calls) == 1 and XML.replace("a</think>b", "b") in found.reasoning


def test_a_name_that_begins_another_one_is_another() -> None:
    names = {"find": "", "find_all": ""}
    made = formats("hermes", "qwen3")
    for name in names:
        call = f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'
        xml = f"<tool_call>\n<function={name}>\n</function>\n</tool_call>"
        for parser, text in (
            (made.parser("auto", names, "<think>"), call),
            (formats("qwen3_coder", "qwen3").parser("auto", names, "<think>"), xml),
        ):
            assert read(parser, f"Hm.\n{text}").calls == [(name, "{}")]


@pytest.mark.parametrize("form", CALLS)
def test_no_more_than_a_call_s_beginning_is_held_back(form: str) -> None:
    made = formats(form, CALLS[form][0])
    mark = CALLS[form][1][: CALLS[form][1].index(">") + 1]
    assert made.reasoning is not None
    parser = made.parser("auto", NAMES, made.reasoning.start)
    given = f"Hm {mark}{' ' * 1000}"
    shown = joined(parser.push(given)).reasoning
    assert len(given) - len(shown) < 10
