"""Reasoning formats: models write their reasoning between two marks, before the answer.

    <think>
    The user wants …
    </think>

    The answer is …

Some templates open the reasoning in the prompt. Some also close it there if no reasoning is requested. Others leave it
to the model. So the last mark of the prompt determines how the reply starts (`stage_of`).
"""

from enum import Enum

import msgspec

from pipeline.text.formats.events import Event, Reasoning
from pipeline.text.formats.marks import Marks

LINE = "\n"
SPACE = " \t\r\n"


class ReasoningStage(Enum):
    """The parser's position relative to the reasoning."""

    OPEN = "in the reasoning"
    OVER = "after the reasoning"
    OPTIONAL = "before the reasoning, which the model may open"


class ReasoningFormat(msgspec.Struct, frozen=True):
    name: str
    """As in `chat.reasoning_parser`."""
    start: str
    end: str
    default_stage: ReasoningStage
    """How a reply starts if the prompt's end has neither mark."""

    def detects(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        return self.end in template

    def stage_of(self, prompt_tail: str) -> ReasoningStage:
        """How the reply to a prompt with this end starts."""
        start, end = prompt_tail.rfind(self.start), prompt_tail.rfind(self.end)
        if start == end:  # neither
            return self.default_stage
        return ReasoningStage.OPEN if start > end else ReasoningStage.OVER

    def parser(self, stage: ReasoningStage) -> "ReasoningParser":
        return ReasoningParser(self, stage)


class _DeepSeek(ReasoningFormat, frozen=True):
    def detects(self, template: str) -> bool:
        return self.end in template and "<｜Assistant｜>" in template


FORMATS: tuple[ReasoningFormat, ...] = (
    _DeepSeek("deepseek_r1", "<think>", "</think>", ReasoningStage.OPEN),
    ReasoningFormat("qwen3", "<think>", "</think>", ReasoningStage.OPTIONAL),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ReasoningStage.OPTIONAL),
)
"""The first format that detects a template is used."""


class ReasoningParser:
    """Streaming parser that splits a reply into reasoning and the rest. It drops empty lines next to the marks, because
    templates write them."""

    def __init__(self, form: ReasoningFormat, stage: ReasoningStage) -> None:
        self._form = form
        self._stage = stage
        self._end = Marks.of(frozenset((form.end,)))
        self._is_first = True
        """Only white space has been read so far."""
        self._has_begun = False
        """Reasoning has been emitted."""
        self._is_just_over = False
        """Only empty lines have been read since the end mark."""
        self._rest = ""
        self._space: list[str] = []

    def push(self, text: str, out: list[Event]) -> str:
        """Append the reasoning in a text to `out`. Returns the rest of the text."""
        if self._stage is ReasoningStage.OVER and not self._is_just_over:
            return text
        text, self._rest = self._rest + text, ""
        if self._is_first and self._stage is not ReasoningStage.OVER:
            text = self._first(text)
            if self._is_first:
                return ""
        if self._stage is ReasoningStage.OPEN:
            text = self._reason(text, out)
        if self._stage is ReasoningStage.OVER and self._is_just_over:
            text = text.lstrip(LINE)
            self._is_just_over = not text
        return text

    def finish(self, out: list[Event]) -> str:
        """End the reply: append remaining reasoning to `out`, and return the remaining other text."""
        rest = "".join(self._space) + self._rest
        self._space, self._rest = [], ""
        if self._stage is not ReasoningStage.OPEN:
            return rest
        if rest:
            out.append(Reasoning(rest))
        return ""

    def _first(self, text: str) -> str:
        """Skip the opening mark, which models write even if the prompt has it. Returns the text to parse next."""
        word = text.lstrip(SPACE)
        space = text[: len(text) - len(word)]
        if not word:
            self._space.append(space)
            return ""
        if word.startswith(self._form.start):
            self._stage, word = ReasoningStage.OPEN, word.removeprefix(self._form.start)
            self._space.clear()
        elif self._form.start.startswith(word):
            self._space.append(space)
            self._rest = word
            return ""
        else:
            self._stage = ReasoningStage.OPEN if self._stage is ReasoningStage.OPEN else ReasoningStage.OVER
            word = "".join(self._space) + space + word
            self._space.clear()
        self._is_first = False
        return word

    def _reason(self, text: str, out: list[Event]) -> str:
        found = self._end.find(text)
        held = found.start() if found else self._end.held(text)
        if thought := text[:held]:
            self._think(thought, out)
        if found is None:
            self._rest = text[held:]
            return ""
        self._space.clear()
        self._stage = ReasoningStage.OVER
        self._is_just_over = True
        return text[found.end() :]

    def _think(self, text: str, out: list[Event]) -> None:
        if not self._has_begun:
            text = text.lstrip(LINE)
        words = text.rstrip(LINE)
        if words:
            self._has_begun = True
            out.append(Reasoning("".join(self._space) + words))
            self._space.clear()
        if len(words) < len(text):
            self._space.append(text[len(words) :])
