"""Reasoning formats: models write their reasoning between two marks, before the answer.

    <think>
    The user wants …
    </think>

    The answer is …

Some templates open the reasoning behind the last message. Some also close it there if no reasoning is requested. Others
leave it to the model. So the last mark there determines how the reply starts (`stage_of`); if the reply continues a
message, its text does (`stage_after`). Marks anywhere else in a prompt are text.
"""

from enum import Enum

import msgspec

from pipeline.text.formats.parsing.call_start import CallStart
from pipeline.text.formats.parsing.events import Event, Reasoning
from pipeline.text.formats.parsing.marks import Marks
from pipeline.text.formats.parsing.messages import MessageSyntax
from pipeline.text.formats.parsing.specials import SpecialTokenFilter
from pipeline.text.formats.parsing.text_scan import starts_with
from pipeline.text.formats.tool_parsers import harmony, muse_glimmer
from pipeline.text.formats.tool_parsers.apertus import START as APERTUS_CALLS
from pipeline.text.formats.tool_parsers.kimi_k2 import MARKS as KIMI_MARKS

LINE = "\n"
KIMI_CALLS = KIMI_MARKS.section
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
    """How a reply starts if the template writes neither mark behind the last message."""
    others: tuple[tuple[str, str], ...] = ()
    """Other pairs of marks, which models of the family also write."""
    unclosed_before: tuple[str, ...] = ()
    """Marks that end the reasoning if the model forgets to, and are not part of it: those of calls."""
    wrappers: tuple[str, ...] = ()
    """Marks around the answer after reasoning; they are removed."""
    signs: tuple[str, ...] = ()
    """Texts in the chat templates of the family, besides the end mark. `auto` requires all of them."""
    aliases: tuple[str, ...] = ()
    """Other names of it in `chat.reasoning_parser`."""
    messages: MessageSyntax | None = None
    """How replies are written that are a series of messages."""

    def detects(self, template: str) -> bool:
        """Whether a chat template uses this format."""
        return any(end in template for _, end in self.pairs) and all(sign in template for sign in self.signs)

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """All pairs of marks."""
        return ((self.start, self.end), *self.others)

    @property
    def marks(self) -> tuple[str, ...]:
        """If they are special tokens, detokenize must keep special tokens in the text."""
        return tuple(mark for pair in self.pairs for mark in pair)

    def pair_of(self, template: str) -> tuple[str, str]:
        """The pair of marks that grammars have, for models with this chat template."""
        return next((pair for pair in self.pairs if pair[1] in template), (self.start, self.end))

    @property
    def stage_marks(self) -> tuple[str, ...]:
        """`stage_of` looks for these."""
        return tuple(mark for pair in self.pairs for mark in pair)

    @property
    def prompt_ends(self) -> tuple[str, ...]:
        """If a prompt ends with one of these and white space, and the template has written it, `stage_of` needs
        nothing else."""
        return tuple(mark.rstrip() for mark in self.stage_marks)

    def stage_of(self, tail: str) -> ReasoningStage:
        """How a reply starts if the template writes this behind the last message."""
        start = max(tail.rfind(start) for start, _ in self.pairs)
        end = max(tail.rfind(end) for _, end in self.pairs)
        if start == end:  # neither
            return self.default_stage
        return ReasoningStage.OPEN if start > end else ReasoningStage.OVER

    def stage_after(self, opening: str, text: str) -> ReasoningStage:
        """How a reply starts that continues the message `text`. The template writes `opening` before it. Reasoning
        stands before an answer, so a mark within an answer is text."""
        if not text.strip():
            return self.stage_of(opening)
        begins = text.lstrip().startswith(tuple(start for start, _ in self.pairs))
        is_marked = any(mark in opening for mark in self.stage_marks)
        stage = self.stage_of(opening) if is_marked and not begins else ReasoningStage.OPTIONAL
        parser = self.parser(stage)
        parser.push(text, [])
        return parser.stage

    def tail_of(self, stage: ReasoningStage) -> str:
        """A text of which `stage_of` returns this stage, if the format has it."""
        return {ReasoningStage.OPEN: self.start, ReasoningStage.OVER: self.end}.get(stage, "")

    def parser(self, stage: ReasoningStage, call: CallStart | None = None) -> "ReasoningParser":
        """A parser of a reply that starts at this stage. Reasoning also ends where a call begins as in `call`."""
        return ReasoningParser(self, stage, call)


class _Gemma4(ReasoningFormat, frozen=True):
    @property
    def marks(self) -> tuple[str, ...]:
        return (GEMMA_CHANNEL, self.end)


class MessageReasoning(ReasoningFormat, frozen=True):
    """For replies that are a series of messages: see parsing/messages.py, which reads the whole reply."""

    @property
    def syntax(self) -> MessageSyntax:
        assert self.messages is not None
        return self.messages

    def detects(self, template: str) -> bool:
        is_harmony = self.syntax is harmony.SYNTAX
        return harmony.is_harmony(template) if is_harmony else muse_glimmer.is_muse_glimmer(template)

    @property
    def marks(self) -> tuple[str, ...]:
        return self.syntax.marks

    @property
    def stage_marks(self) -> tuple[str, ...]:
        return (self.syntax.start, self.syntax.message, self.syntax.end)

    @property
    def prompt_ends(self) -> tuple[str, ...]:
        return (self.syntax.begin,)

    def stage_of(self, tail: str) -> ReasoningStage:
        start, message = self.syntax.start, self.syntax.message
        header, is_body, _ = tail[max(tail.rfind(start), 0) :].partition(message)
        if not is_body or self.syntax.end in tail[tail.rfind(message) :]:
            return ReasoningStage.OPTIONAL
        return ReasoningStage.OPEN if self.syntax.thought in header else ReasoningStage.OVER

    def stage_after(self, opening: str, text: str) -> ReasoningStage:
        return self.stage_of(opening + text)

    def tail_of(self, stage: ReasoningStage) -> str:
        return {ReasoningStage.OPEN: self.start, ReasoningStage.OVER: self.syntax.answer}.get(stage, "")


GEMMA_CHANNEL = "<|channel>"
THINK = ("<think>", "</think>")
ERNIE_WRAPPERS = ("<response>", "</response>", "\n</response>")
OPEN, OVER, OPTIONAL = ReasoningStage.OPEN, ReasoningStage.OVER, ReasoningStage.OPTIONAL

FORMATS: tuple[ReasoningFormat, ...] = (
    MessageReasoning(
        "openai_gptoss",
        harmony.ANALYSIS_BEGIN,
        harmony.END,
        OPTIONAL,
        aliases=("gpt_oss", "openai"),
        messages=harmony.SYNTAX,
    ),
    MessageReasoning(
        "muse_glimmer", muse_glimmer.THOUGHT_BEGIN, muse_glimmer.EOM, OPTIONAL, messages=muse_glimmer.SYNTAX
    ),
    _Gemma4("gemma4", f"{GEMMA_CHANNEL}thought\n", "<channel|>", OPTIONAL),
    ReasoningFormat(
        "deepseek_v3", *THINK, OPTIONAL, signs=("<｜Assistant｜>", "thinking is defined"), aliases=("deepseek_v31",)
    ),
    ReasoningFormat("deepseek_r1", *THINK, OPEN, signs=("<｜Assistant｜>",)),
    ReasoningFormat("glm45", *THINK, OPTIONAL, signs=("<|observation|>",), aliases=("glm47",)),
    ReasoningFormat("kimi_k2", *THINK, OPTIONAL, signs=(KIMI_CALLS,), unclosed_before=(KIMI_CALLS,)),
    ReasoningFormat(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        OPTIONAL,
        others=(("Here's my thought process:", "Here's my response:"), THINK),
        wrappers=("<response>", "</response>"),
        signs=("<|start_of_role|>", "thought"),
    ),
    ReasoningFormat("ernie45", *THINK, OPTIONAL, wrappers=ERNIE_WRAPPERS, signs=("<response>",)),
    ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>", OPTIONAL, unclosed_before=(APERTUS_CALLS,)),
    ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>", OPTIONAL),
    ReasoningFormat("qwen3", *THINK, OPTIONAL),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]", OPTIONAL),
)
"""The first format that detects a template is used."""


class ReasoningParser:
    """Streaming parser that splits a reply into reasoning and the rest. It drops empty lines next to the marks, because
    templates write them."""

    def __init__(self, form: ReasoningFormat, stage: ReasoningStage, call: CallStart | None = None) -> None:
        self._form = form
        self._call = call
        self.late_ends: tuple[str, ...] = ()
        """End marks that the model may still write, since a call has ended the reasoning."""
        self.stage = stage
        """Where the text ends that has been pushed."""
        self._starts = tuple(start for start, _ in form.pairs)
        called = () if call is None else (call.mark,)
        self._end = Marks.of(frozenset((*(end for _, end in form.pairs), *form.unclosed_before, *called)))
        self._wrappers: SpecialTokenFilter | None = None
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
        if self.stage is ReasoningStage.OVER and not self._is_just_over:
            return text if self._wrappers is None else self._wrappers.push(text)
        text, self._rest = self._rest + text, ""
        if self._is_first and self.stage is not ReasoningStage.OVER:
            text = self._first(text)
            if self._is_first:
                return ""
        if self.stage is ReasoningStage.OPEN:
            text = self._reason(text, out)
        if self.stage is ReasoningStage.OVER:
            if self._wrappers is not None:
                text = self._wrappers.push(text)
            if self._is_just_over:
                text = text.lstrip(LINE)
                self._is_just_over = not text
        return text

    def finish(self, out: list[Event]) -> str:
        """End the reply: append remaining reasoning to `out`, and return the remaining other text."""
        rest = "".join(self._space) + self._rest
        self._space, self._rest = [], ""
        if self.stage is not ReasoningStage.OPEN:
            return rest if self._wrappers is None else self._wrappers.push(rest) + self._wrappers.finish()
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
        start = starts_with(word, 0, self._starts)
        if start:
            self.stage, word = ReasoningStage.OPEN, word.removeprefix(start)
            self._space.clear()
        elif start == "":
            self._space.append(space)
            self._rest = word
            return ""
        else:
            self.stage = ReasoningStage.OPEN if self.stage is ReasoningStage.OPEN else ReasoningStage.OVER
            word = "".join(self._space) + space + word
            self._space.clear()
        self._is_first = False
        return word

    def _reason(self, text: str, out: list[Event]) -> str:
        found, begins_call = self._end.find(text), False
        while found and self._call is not None and found[0] == self._call.mark:
            if (follows := self._call.follows(text, found.end())) is not False:
                begins_call = True
                break
            found = self._end.find(text, found.end())
        held = found.start() if found else self._end.held(text)
        if found and begins_call and follows is None:
            found = None
        if thought := text[:held]:
            self._think(thought, out)
        if found is None:
            self._rest = text[held:]
            return ""
        self._space.clear()
        self.stage = ReasoningStage.OVER
        self._is_just_over = True
        if self._form.wrappers:
            self._wrappers = SpecialTokenFilter(frozenset(self._form.wrappers))
        if begins_call:
            self.late_ends = tuple(end for _, end in self._form.pairs)
        return text[found.start() if begins_call or found[0] in self._form.unclosed_before else found.end() :]

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
