"""What ends a reasoning whose budget is used, in the words of each family's template."""

import numpy as np
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from pipeline.text.formats.reasoning import ReasoningStage
from pipeline.text.formats.reasoning_budget import budget_of, end_of
from tests.stages.ingest.templates.chats import TEMPLATES
from tests.text.formats.replies import read
from tests.text.formats.test_templates import FORMATS

REASONS = {name: reasoning for name, (_, reasoning) in FORMATS.items() if reasoning is not None}
MESSAGE = " Time is up."


def formats_of(template: str, specials: tuple[str, ...] = ()) -> ChatFormats:
    added = [AddedToken(id=number, content=text, special=True) for number, text in enumerate(specials, 1000)]
    return ChatFormats.of((TEMPLATES / f"{template}.jinja").read_text(), ChatSettings(), added)


def encoded(text: str) -> list[int]:
    return list(map(ord, text))


def text_of(ids: bytes) -> str:
    return "".join(map(chr, np.frombuffer(ids, "<i4")))


@pytest.mark.parametrize("template", REASONS)
@pytest.mark.parametrize("stage", [ReasoningStage.OPEN, ReasoningStage.OPTIONAL])
def test_what_was_thought_and_the_answer_are_separated(template: str, stage: ReasoningStage) -> None:
    formats = formats_of(template)
    assert formats.reasoning is not None
    budget = budget_of(formats, stage, 5, MESSAGE, encoded)
    assert budget is not None and budget.num_tokens == 5 and budget.is_open == (stage is ReasoningStage.OPEN)
    opening = "" if budget.is_open else formats.reasoning.start
    parser = formats.parser(tail=formats.reasoning.tail_of(stage))
    reply = read(parser, [opening, "Hm", text_of(budget.closing_ids), "Yes."], {})
    assert reply.reasoning.strip() == "Hm Time is up." and reply.content.strip() == "Yes."


@pytest.mark.parametrize("template", REASONS)
def test_the_end_is_one_that_the_mask_worker_sees(template: str) -> None:
    formats = formats_of(template)
    budget = budget_of(formats, ReasoningStage.OPEN, 5, "", encoded)
    assert budget is not None
    assert any(end.decode() in text_of(budget.closing_ids) for end in budget.ends)


def test_nothing_is_limited_behind_the_reasoning() -> None:
    assert budget_of(formats_of("qwen3"), ReasoningStage.OVER, 5, "", encoded) is None
    assert budget_of(formats_of("qwen2.5"), ReasoningStage.OPEN, 5, "", encoded) is None


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("qwen3", "\n</think>\n\n"),
        ("qwen3.5", "\n</think>\n\n"),
        ("deepseek-r1-distill", "</think>"),
        ("smollm3", "</think>"),  # its template only writes an empty reasoning
        ("gemma4", "\n<channel|>"),
        ("seed-oss", "</seed:think>"),
    ],
)
def test_the_end_is_written_as_in_the_template(template: str, end: str) -> None:
    formats = formats_of(template)
    assert formats.reasoning is not None
    assert end_of(formats.reasoning, formats.template) == end


def test_special_tokens_in_marks_differ_from_text() -> None:
    formats = formats_of("gpt-oss", ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|e"))
    budget = budget_of(formats, ReasoningStage.OPTIONAL, 5, "", encoded)
    assert budget is not None and budget.anywhere
    assert budget.starts == [b"\xff<|channel|>analysis\xff<|message|>"]
    assert budget.ends == [b"\xff<|end|>"]
    assert text_of(budget.closing_ids) == "<|end|><|start|>assistant<|channel|>final<|message|>"
    budget = budget_of(formats, ReasoningStage.OPTIONAL, 5, "", encoded, has_tools=True)
    assert budget is not None and text_of(budget.closing_ids) == "<|end|><|start|>assistant"


def test_calls_end_the_reasoning_of_a_family_that_forgets_its_end() -> None:
    budget = budget_of(formats_of("kimi-k2-thinking"), ReasoningStage.OPEN, 5, "", encoded)
    assert budget is not None and budget.ends == [b"</think>", b"<|tool_calls_section_begin|>"]
