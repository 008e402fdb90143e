"""Replies that are a series of messages, each with a header: those of gpt-oss and Muse Glimmer.

    <|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>     gpt-oss
     to=self<|message|>Simple.<|eom|><|start|>assistant to=user<|message|>4<|eot|>                          Muse Glimmer

The prompt ends within the header of the first one. Reasoning, text and calls alternate, so one parser reads all of
them. The files in `tool_parsers/` have what headers and calls look like.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto

import msgspec

from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event, Reasoning
from pipeline.text.formats.parsing.marks import Marks
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with

MAX_HEADER_CHARS = 4 * MAX_NAME_CHARS


class Part(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()
    """After the end of a message"""


class MessageParser(ABC):
    """Streaming parser of a whole reply. `content` parses the answer's text. Without `with_calls` or `with_reasoning`,
    these are content. `part` is where the reply begins."""

    def __init__(
        self,
        syntax: "MessageSyntax",
        content: CallParser,
        marks: ReplyMarks,
        *,
        with_calls: bool,
        with_reasoning: bool,
        part: Part = Part.HEADER,
        names: Collection[str] | Mapping[str, str] = (),
    ) -> None:
        """`names` are the tools', perhaps with the schemas of their arguments."""
        self._content = content
        self._names = names
        self._reply_marks = marks
        self._marks = marks.each(syntax.marks)
        self._start, self._message = marks.each((syntax.start, syntax.message))
        self._inner = marks.each(syntax.inner)
        self._body_end = Marks.of(frozenset(marks.each((syntax.start, *syntax.inner, *syntax.ends))))
        self._header_starts = (self._start, *self._inner, self._message, "to=")
        self._with_calls = with_calls
        self._with_reasoning = with_reasoning
        self._part = part
        self._is_first = part is Part.HEADER
        """Nothing has been read of a reply that should begin with a header."""
        self._rest = ""
        self._space: list[str] = []
        """White space before anything else"""
        self._num_calls = 0
        self._separator = {Part.REASONING: "", Part.CONTENT: ""}
        """What precedes the next text of this kind: a line break between messages."""
        self._has_text = {Part.REASONING: False, Part.CONTENT: False}

    def push(self, text: str) -> list[Event]:
        """Add text. Returns the events that are now certain."""
        out: list[Event] = []
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            end = self._step(text, at, out)
            if end is None:
                self._rest = text[at:]
                break
            at = end
        return out

    def finish(self) -> list[Event]:
        """End the reply. Returns the remaining events."""
        out: list[Event] = []
        rest, self._rest = self._rest, ""
        match self._part:
            case Part.HEADER if self._is_first:
                self._emit(Part.CONTENT, "".join(self._space), out)
            case Part.HEADER if self._is_no_header(rest):
                self._emit(Part.CONTENT, "".join(self._space) + rest, out)
            case Part.REASONING | Part.CONTENT:
                self._emit(self._part, rest, out)
            case Part.CALL:
                self._call_cut(rest, out)
        return out + self._content.finish()

    # ------------------------------------------------------------------------------------------ what a format defines

    @abstractmethod
    def _begin(self, text: str, at: int, end: int) -> None:
        """Begin the message whose header is `text[at:end]`."""

    @abstractmethod
    def _in_call(self, text: str, at: int, out: list[Event]) -> int | None:
        """Continue a call's message. Returns the offset after what was read; None if that needs more text."""

    @abstractmethod
    def _call_cut(self, rest: str, out: list[Event]) -> None:
        """The reply ends in a call's message, of which `rest` has not been read."""

    # --------------------------------------------------------------------------------------------------------- states

    def _step(self, text: str, at: int, out: list[Event]) -> int | None:
        match self._part:
            case Part.HEADER:
                return self._header(text, at, out)
            case Part.BETWEEN:
                return self._between(text, at)
            case Part.CALL:
                return self._in_call(text, at, out)
        return self._body(text, at, out)

    def _header(self, text: str, at: int, out: list[Event]) -> int | None:
        if self._is_first:
            if text[at] in SPACE:
                self._space.append(text[at])
                return at + 1
            start = starts_with(text, at, self._header_starts)
            if start == "":
                return None
            self._is_first = False
            if start is None:  # the model doesn't know the format
                self._part = Part.CONTENT
                self._emit(Part.CONTENT, "".join(self._space), out)
                return at
        end = text.find(self._message, at, at + MAX_HEADER_CHARS)
        if end < 0 and len(text) - at < MAX_HEADER_CHARS:
            return None
        if end < 0:
            self._begin_text(is_thought=False)
            self._emit(Part.CONTENT, "".join(self._space), out)
            # The mark that began the header would begin it again.
            return at + len(starts_with(text, at, self._inner) or "")
        self._space.clear()
        self._begin(text, at, end)
        return end + len(self._message)

    def _is_no_header(self, text: str) -> bool:
        """Whether a reply that ends with this text begins with a recipient that is none."""
        has_mark = any(mark in text for mark in self._marks) or self._body_end.held(text) < len(text)
        return text.startswith("to=") and not has_mark and len(text.split()) > 1

    def _begin_text(self, *, is_thought: bool) -> None:
        self._part = Part.REASONING if is_thought and self._with_reasoning else Part.CONTENT
        if self._has_text[self._part]:
            self._separator[self._part] = "\n"

    def _body(self, text: str, at: int, out: list[Event]) -> int | None:
        found = self._body_end.find(text, at)
        held = found.start() if found else self._body_end.held(text, at)
        if held > at:
            self._emit(self._part, text[at:held], out)
            return held
        return None if found is None else self._message_ended(found[0], at)

    def _message_ended(self, mark: str, at: int) -> int:
        """Returns the offset where the next part continues."""
        self._part = Part.HEADER if mark == self._start or mark in self._inner else Part.BETWEEN
        return at if mark in self._inner else at + len(mark)

    def _between(self, text: str, at: int) -> int | None:
        if text[at] in SPACE:
            return at + 1
        if any(mark.startswith(text[at:]) and mark != text[at:] for mark in self._marks):
            return None
        for mark in self._marks:
            if text.startswith(mark, at):
                return self._message_ended(mark, at)
        self._begin_text(is_thought=False)
        return at

    def _emit(self, part: Part, text: str, out: list[Event]) -> None:
        if not text:
            return
        text = self._separator[part] + text
        self._separator[part] = ""
        self._has_text[part] = True
        if part is Part.REASONING:
            out.append(Reasoning(text))
        else:
            out += self._content.push(text)


class MessageSyntax(msgspec.Struct, frozen=True):
    """How a model family writes messages."""

    parser: Callable[..., MessageParser]
    marks: tuple[str, ...]
    start: str
    """Before the role"""
    message: str
    """Behind the header"""
    end: str
    """Behind a message that another one follows"""
    ends: tuple[str, ...]
    """Behind any message"""
    thought: str
    """In the header of reasoning, and in no other"""
    answer: str
    """The header of an answer, from where a prompt ends"""
    inner: tuple[str, ...] = ()
    """Marks that also begin a header, and are a part of it"""
    role: str = "assistant"

    @property
    def begin(self) -> str:
        """How a prompt ends, and what precedes each message but the first."""
        return f"{self.start}{self.role}"
