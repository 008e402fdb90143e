"""The tool-call format of Apertus: a list of objects with the name of a function as their key.

    <|tools_prefix|>[{"find": {"text": "a"}}, {"now": {}}]<|tools_suffix|>

The results follow in the same message, so the end mark ends a reply. Calls may stand within the reasoning
(`<|inner_prefix|>`), which then goes on after the results.
Source: swiss-ai/Apertus-8B-Instruct (chat template)
"""

import re
from collections.abc import Collection

import msgspec

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.list_calls import ListParser
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat

START, END = "<|tools_prefix|>", "<|tools_suffix|>"
_HEAD = re.compile(r'\{[ \t\r\n]*("(?:[^"\\\n]|\\.)+")[ \t\r\n]*:[ \t\r\n]*')
"""An object up to its first value"""
_HEAD_BEGINS = re.compile(r'\{[ \t\r\n]*("(?:[^"\\\n]|\\.)*(\\|"[ \t\r\n]*(:[ \t\r\n]*)?)?)?')
"""A part of it"""


class Apertus(ToolFormat):
    name = "apertus"
    opening = START
    marks = (START, END)
    stops = (END,)

    def detects(self, template: str) -> bool:
        return START in template and END in template

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "ApertusParser":
        return ApertusParser(marks.of(START), marks.of(END), marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        each = [f"{lark.text(f'{{{lark.text(call.name)}: ')} {call.arguments} {lark.text('}')}" for call in calls]
        one = lark.one_of(each)
        more = f" ({lark.text(', ')} {one})*" if parallel else ""
        return f"{lark.mark(START)} {lark.text('[')} {one}{more} {lark.text(']')} {lark.mark(END)}"


class ApertusParser(ListParser):
    _in_item = False
    """In a call's object, behind its arguments"""

    def __init__(self, start: str, end: str, hidden: Collection[str]) -> None:
        super().__init__((start,), hidden)
        self._list_ends = (end,)

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] == "[" and not self._in_list:
            self._open_list()
            return at + 1
        return self._before_object(text, at, out)

    def _before_object(self, text: str, at: int, out: list[Event], bare_names: Collection[str] | None = None) -> int:
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        head = _HEAD.match(text, at) if text[at] == "{" else None
        if head is None or head.end() == len(text):
            if len(text) - at <= 2 * MAX_NAME_CHARS and _HEAD_BEGINS.fullmatch(text, at):
                return self._hold(text, at)
            self._no_call(out)
            return at
        name = _name(head[1])
        if text[head.end()] != "{" or not 0 < len(name) <= MAX_NAME_CHARS:
            self._no_call(out)
            return at
        self._candidate.append(head[0])
        self._open(CallObject.of_arguments(self._num_calls, name))
        self._in_item = True
        return head.end()

    def _no_call(self, out: list[Event]) -> None:
        self._in_item = False
        super()._no_call(out)

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        if self._in_item:
            if text[at] == "}":
                self._in_item = False
                return at + 1
            if text[at] in SPACE:
                return at + 1
            self._in_item = False  # the brace is missing
        if self._in_list:
            if (after := self._after_item(text, at)) is not None:
                return after
            self._no_call(out)
            return at
        if text[at] in SPACE:
            return at + 1
        match starts_with(text, at, self._list_ends):
            case "":
                return self._hold(text, at)
            case None:
                self._read = self._outside
                return at
            case end:
                self._read = self._outside
                return at + len(end)


def _name(quoted: str) -> str:
    """A JSON string; empty if it is invalid."""
    try:
        return msgspec.json.decode(quoted, type=str)
    except (msgspec.DecodeError, UnicodeError):
        return ""
