"""Tool calls in sections: each call has a header and arguments as JSON, between tokens of their own.

    <section> <call> header <arguments> {"text": "a"} <end of call> <call> … <end of call> <end of section>

DeepSeek and Kimi write these (`tool_parsers/deepseek.py`, `kimi_k2.py`). Models may leave out the section's tokens.
"""

from abc import abstractmethod
from collections.abc import Collection

import msgspec

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat

DROPPED = SPACE + "`}"


class SectionMarks(msgspec.Struct, frozen=True):
    section: str
    call: str
    arguments: str
    call_end: str
    section_end: str

    @property
    def all(self) -> tuple[str, ...]:
        return (self.section, self.call, self.arguments, self.call_end, self.section_end)

    def seen(self, marks: ReplyMarks) -> "SectionMarks":
        """What a parser looks for."""
        return SectionMarks(*marks.each(self.all))


class Header(msgspec.Struct, frozen=True):
    """A call's name and id (see `CallBegun`)."""

    name: str
    id: str = ""


class SectionFormat(ToolFormat):
    """A subclass sets `form`, and `opening` and `marks` from it."""

    form: SectionMarks

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([self._call(lark, call) for call in calls])
        more = f" ({self._between(lark)} {one})*" if parallel else ""
        return f"{lark.mark(self.form.section)} {one}{more} {lark.mark(self.form.section_end)}"

    @abstractmethod
    def _call(self, lark: LarkBuilder, call: CallRule) -> str:
        """A grammar of one call."""

    def _between(self, lark: LarkBuilder) -> str:
        """A grammar of what separates calls."""
        return ""


class SectionParser(CallParser):
    def __init__(self, marks: SectionMarks, hidden: Collection[str]) -> None:
        super().__init__((marks.section, marks.call), hidden)
        self._form = marks
        self._in_section = False

    @abstractmethod
    def _header(self, text: str) -> Header | None:
        """The header of a call; None if it is invalid. `text` is what stands between the call's token and `{`, without
        white space around it."""

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        end = super()._outside(text, at, out)
        if self._read == self._after_mark:
            self._in_section = text.startswith(self._form.section, end - len(self._form.section))
            if not self._in_section:
                self._read = self._in_header
        return end

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        """In a section, before a call."""
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        match starts_with(text, at, (self._form.call,)):
            case None:
                self._no_call(out)
                return at
            case "":
                return self._hold(text, at)
        self._candidate.append(self._without_hidden(self._form.call))
        self._read = self._in_header
        return at + len(self._form.call)

    def _in_header(self, text: str, at: int, out: list[Event]) -> int:
        end = text.find("{", at)
        if end < 0 and len(text) - at <= 2 * MAX_NAME_CHARS:
            return self._hold(text, at)
        header = self._header(text[at:end].strip()) if end >= 0 else None
        if header is None or not 0 < len(header.name) <= MAX_NAME_CHARS:
            self._no_call(out)
            return at
        self._candidate.append(self._without_hidden(text[at:end]))
        self._open(CallObject.of_arguments(self._num_calls, header.name, header.id))
        return end

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """Up to the end of the call. The end of a code block is dropped, and so is one brace too many."""
        if text[at] in DROPPED:
            return at + 1
        match starts_with(text, at, (self._form.call_end,)):
            case "":
                return self._hold(text, at)
            case self._form.call_end:
                at += len(self._form.call_end)
        self._read = self._between_calls
        return at

    def _between_calls(self, text: str, at: int, out: list[Event]) -> int:
        marks = (self._form.call, self._form.section_end) if self._in_section else (self._form.call,)
        match starts_with(text, at, marks):
            case "":
                return self._hold(text, at)
            case self._form.call:
                self._candidate.append(self._without_hidden(self._form.call))
                self._read = self._in_header
                return at + len(self._form.call)
            case self._form.section_end:
                self._candidate.clear()
                self._in_section = False
                self._read = self._outside
                return at + len(self._form.section_end)
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at

    def finish(self) -> list[Event]:
        if self._read in (self._after_call, self._between_calls):  # the end tokens are missing
            self._rest = ""
            self._candidate.clear()
        return super().finish()
