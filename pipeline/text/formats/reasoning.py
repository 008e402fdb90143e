"""How models write what they think before they answer: between two marks.

    <think>
    The user wants …
    </think>

    The answer is …

Some templates open the reasoning in the prompt already, some close it there at once when no reasoning is asked for, and
some leave it to the model: so where a reply begins is told by the last mark of its prompt (`stage_of`).
"""

from enum import Enum

import msgspec

from pipeline.text.formats.events import Event, Reasoning
from pipeline.text.formats.marks import Marks

LINE = "\n"
SPACE = " \t\r\n"


class ReasoningStage(Enum):
    """Where a reply begins."""

    OPEN = "in the reasoning"
    OVER = "behind it"
    UNSAID = "before it, if the model opens it"


class ReasoningFormat(msgspec.Struct, frozen=True):
    name: str
    """As in `chat.reasoning_parser`."""
    start: str
    end: str
    unsaid: ReasoningStage
    """How a reply begins whose prompt has neither mark at its end."""

    def detects(self, template: str) -> bool:
        """Whether a chat template is of a model that reasons so."""
        return self.end in template

    def stage_of(self, prompt_tail: str) -> ReasoningStage:
        """Where the reply to a prompt begins that ends so."""
        start, end = prompt_tail.rfind(self.start), prompt_tail.rfind(self.end)
        if start == end:  # neither
            return self.unsaid
        return ReasoningStage.OPEN if start > end else ReasoningStage.OVER

    def parser(self, stage: ReasoningStage) -> "ReasoningParser":
        return ReasoningParser(self, stage)


class _DeepSeek(ReasoningFormat, frozen=True):
    def detects(self, template: str) -> bool:
        return self.end in template and "<｜Assistant｜>" in template


FORMATS: tuple[ReasoningFormat, ...] = (
    _DeepSeek("deepseek_r1", "<think>", "</think>", ReasoningStage.OPEN),
    ReasoningFormat("qwen3", "<think>", "</think>", ReasoningStage.UNSAID),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", ReasoningStage.UNSAID),
)
"""The first that detects a template is its own."""


class ReasoningParser:
    """Parts a reply, in pieces, into its reasoning and what follows. Empty lines around the reasoning belong to the
    marks: templates write them."""

    def __init__(self, form: ReasoningFormat, stage: ReasoningStage) -> None:
        self._form = form
        self._stage = stage
        self._end = Marks.of(frozenset((form.end,)))
        self._is_first = True
        """Nothing of the reply has been read that is not white space."""
        self._has_begun = False
        """Reasoning has been given out."""
        self._is_just_over = False
        """Empty lines are still the mark's."""
        self._rest = ""
        self._space: list[str] = []

    def push(self, text: str, out: list[Event]) -> str:
        """Append the reasoning in a text to `out`; returns what of the text is not."""
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
        """What is left at the reply's end; likewise."""
        rest = "".join(self._space) + self._rest
        self._space, self._rest = [], ""
        if self._stage is not ReasoningStage.OPEN:
            return rest
        if rest:
            out.append(Reasoning(rest))
        return ""

    def _first(self, text: str) -> str:
        """Look for the opening mark, which models write even where the prompt has it. Returns what is to be read on."""
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
