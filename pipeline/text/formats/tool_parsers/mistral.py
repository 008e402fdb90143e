"""The two tool-call formats of Mistral's models. The parser accepts both.

    [TOOL_CALLS] [{"name": "find", "arguments": {"text": "a"}}]                    tokenizers v3 and v7
    [TOOL_CALLS]find[ARGS]{"text": "a"}[TOOL_CALLS]find[ARGS]{"text": "b"}         v11, maybe with [CALL_ID]…, and v13

Source: https://github.com/mistralai/mistral-common (tokens/tokenizers/instruct.py)
"""

import re
from collections.abc import Collection
from random import Random

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, SPACE, CallObject
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.list_calls import ListParser
from pipeline.text.formats.parsing.reply_marks import CHARACTERS, ReplyMarks
from pipeline.text.formats.tool_format import ToolFormat

START = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"
_NAME_END = re.compile(rf"[\s\[{{{CHARACTERS}]")
_ID_END = re.compile(rf"[\[{{{CHARACTERS}]")
_ID_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


class Mistral(ToolFormat):
    name = "mistral"
    opening = START
    marks = (START, ARGS, CALL_ID)

    def detects(self, template: str) -> bool:
        return START in template

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "MistralParser":
        return MistralParser(marks, names)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        if ARGS in lark.template:
            rules = [f"{lark.mark(START)} {lark.text(call.name)} {lark.mark(ARGS)} {call.arguments}" for call in calls]
            return f"{lark.one_of(rules)}{'+' if parallel else ''}"
        one = lark.one_of([lark.object_of(call, "arguments") for call in calls])
        more = f" ({lark.text(', ')} {one})*" if parallel else ""
        return f"{lark.mark(START)} {lark.text(' ')}? {lark.text('[')} {one}{more} {lark.text(']')}"

    def call_id(self, key: int) -> str:
        """Nine letters and digits, because Mistral's templates refuse other ids."""
        return "".join(Random(key).choices(_ID_LETTERS, k=9))


class MistralParser(ListParser):
    def __init__(self, marks: ReplyMarks, names: Collection[str]) -> None:
        super().__init__(marks.each((START,)), marks.hidden, names)
        self._arguments, self._call_id = marks.each((ARGS, CALL_ID))

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        char = text[at]
        if char in SPACE:
            self._candidate.append(char)
            return at + 1
        if char == "[":
            self._open_list()
            self._read = self._before_object
            return at + 1
        if char == "{":
            self._in_list = False
            self._open(CallObject(self._num_calls))
            return at
        self._read = self._name
        return at

    def _name(self, text: str, at: int, out: list[Event]) -> int:
        """A name, perhaps an id, and the start of the arguments."""
        end = _NAME_END.search(text, at)
        if end is None and len(text) - at <= MAX_NAME_CHARS:
            return self._hold(text, at)
        if end is None or end.start() == at or end.start() - at > MAX_NAME_CHARS:
            self._no_call(out)
            return at
        name, index = text[at : end.start()], end.start()
        if text.startswith(self._call_id, index):
            begin = _ID_END.search(text, index + len(self._call_id))
            if begin is None and len(text) - index <= MAX_NAME_CHARS:
                return self._hold(text, at)
            if begin is None or begin.start() - index > MAX_NAME_CHARS:
                self._no_call(out)
                return at
            index = begin.start()
        elif self._call_id.startswith(text[index:]):
            return self._hold(text, at)
        if text.startswith(self._arguments, index):
            index += len(self._arguments)
        elif self._arguments.startswith(text[index:]):
            return self._hold(text, at)
        elif text[index] != "{":
            self._no_call(out)
            return at
        self._candidate.append(self._without_hidden(text[at:index]))
        self._in_list = False
        self._open(CallObject.of_arguments(self._num_calls, name))
        return index

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        end = self._after_item(text, at) if self._in_list else None
        if end is None:
            self._no_call(out)
            return at
        if not self._in_list:
            self._read = self._outside
        return end
