"""Models whose templates ask for Hermes's calls in their own words: EXAONE 4 and ERNIE 4.5. The templates here have
what theirs have of calls and reasoning."""

import json

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.reasoning import ReasoningStage
from tests.text.formats.replies import NAMES, Reply, read
from tests.text.formats.test_grammars import ADDED, FULL

EXAONE = (
    "{%- if tools %}{{- '[|system|]\\n<tool>' + tools | tojson + '</tool>' }}"
    '{{- "Like <tool_call>{\\"name\\": function_1_name, \\"arguments\\": {...}}</tool_call>" }}{%- endif %}'
    "{{- '[|assistant|]\\n<think>\\n\\n</think>\\n\\n' }}"
)
ERNIE = (
    "{%- if tools %}{{- tools | tojson }}{{- '<tool_call>\\n{\"name\": ...}\\n</tool_call>' }}{%- endif %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' }}{# <think>\\n\\n</think>\\n\\n<response>\\n\\n</response> #}"
)
TOOLS = json.dumps([{"type": "function", "function": {"name": "now"}}])
CALLED = Reply("", "Hm.", [("now", "{}")], 1)


def formats(template: str) -> ChatFormats:
    found = ChatFormats.of(template, ChatSettings())
    return ChatFormats(found.tools, found.reasoning, template, ADDED)


@pytest.mark.parametrize(
    ("template", "reasoning", "call"),
    [
        (EXAONE, "qwen3", '<tool_call>{"name": "now", "arguments": {}}</tool_call>'),
        (ERNIE, "ernie45", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ],
    ids=["exaone", "ernie"],
)
def test_calls_are_enforced_and_read_as_the_template_writes_them(template: str, reasoning: str, call: str) -> None:
    form = formats(template)
    assert form.tools is not None and form.reasoning is not None
    assert (form.tools.name, form.reasoning.name) == ("hermes", reasoning)
    assert form.reasoning.stage_of("assistant\n<think>\n") is ReasoningStage.OPEN
    assert form.reasoning.stage_of("<think>\n\n</think>\n\n") is ReasoningStage.OVER
    grammar = form.calls("required", "", TOOLS, parallel=True).lark()
    for num in (1, 2):
        assert FULL.takes(grammar, "\n".join([call] * num))
    assert not FULL.takes(grammar, call.replace("now", "then"))
    assert FULL.takes(form.after_reasoning(grammar, "<think>\n"), f"Hm.\n</think>\n\n{call}")
    for reply in (f"Hm.\n</think>\n\n{call}", f"Hm.\n</think>\n\n{call}\n"):
        for pieces in ([reply], reply):
            assert read(form.parser("auto", NAMES, "<think>\n"), pieces) == CALLED


def test_the_marks_around_ernies_answer_are_removed() -> None:
    form = formats(ERNIE)
    whole = f"Hm.\n</think>\n\n<response>\nI look.\n</response>\n{CALL}"
    for pieces in ([whole], whole):
        assert read(form.parser("auto", NAMES, "<think>\n"), pieces) == Reply("I look.", "Hm.", [("now", "{}")], 1)
    for text in ("<response>\nYes.\n</response>", "<response>Yes.</response>", "Yes."):
        assert read(form.parser("auto", NAMES, "<think>\n"), f"Hm.</think>\n\n{text}") == Reply("Yes.", "Hm.")
    assert read(form.parser("auto", NAMES, "</think>"), "Write <response>.") == Reply("Write <response>.")


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
