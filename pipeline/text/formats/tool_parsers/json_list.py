"""Tool calls as a list of JSON objects after a mark: the formats of Granite 3 and Phi-4-mini.

    <|tool_call|>[{"name": "find", "arguments": {"text": "a"}}, {"name": "now", "arguments": {}}]  Granite 3.1 to 3.3
    <tool_call>[{"name": "find", "arguments": {"text": "a"}}]                                      Granite 3.0
    functools[{"name": "find", "arguments": {"text": "a"}}]                                        Phi-4-mini
    <|tool_call|>{"name": "find", "arguments": {"text": "a"}}<|/tool_call|>                             Phi-4-mini

Sources: ibm-granite/granite-3.3-2b-instruct (chat template), microsoft/Phi-4-mini-instruct (model card)
"""

from collections.abc import Collection, Sequence

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.list_calls import ListParser
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat, shows_tools

TOKEN = "<|tool_call|>"
END = "<|/tool_call|>"
TAG = "<tool_call>"
FUNCTOOLS = "functools"


class Granite(ToolFormat):
    name = "granite"
    opening = TOKEN
    marks = (TOKEN, TAG)

    def detects(self, template: str) -> bool:
        return TOKEN in template and "<|start_of_role|>" in template and shows_tools(template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "JsonListParser":
        return JsonListParser(marks.each((TOKEN, TAG)), ("</tool_call>",), marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        return f"{lark.mark(TOKEN)} {_list(lark, calls, parallel=parallel)}"


class Phi4Mini(ToolFormat):
    name = "phi4_mini_json"
    marks = (TOKEN, END)

    def detects(self, template: str) -> bool:
        return shows_tools(template) and (f"{FUNCTOOLS}[" in template or (TOKEN in template and END in template))

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "JsonListParser":
        return JsonListParser((marks.of(TOKEN), f"{FUNCTOOLS}["), marks.each((END,)), marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        if f"{FUNCTOOLS}[" in lark.template or TOKEN not in lark.template:
            return f"{lark.text(FUNCTOOLS)} {_list(lark, calls, parallel=parallel)}"
        one = lark.one_of([lark.object_of(call, "arguments") for call in calls])
        return f"({lark.mark(TOKEN)} {one} {lark.mark(END)}){'+' if parallel else ''}"

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str | None:
        opening = f"{FUNCTOOLS}["
        if opening in lark.template or not lark.stands_apart(TOKEN):
            items = _items(lark, calls, parallel=parallel)
            return f"{lark.text_without(opening)} | {lark.text_until('/(?s:.*)/', opening)} {items} {lark.text(']')}"
        return f"{lark.text_without(opening)} ({self.grammar(lark, calls, parallel=parallel)})?"


def _list(lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
    return f"{lark.text('[')} {_items(lark, calls, parallel=parallel)} {lark.text(']')}"


def _items(lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
    one = lark.one_of([lark.object_of(call, "arguments") for call in calls])
    return f"{one} ({lark.text(', ')} {one})*" if parallel else one


class JsonListParser(ListParser):
    """A mark that ends in `[` opens the list itself. `ends` are marks that may follow."""

    def __init__(self, starts: Sequence[str], ends: Sequence[str], hidden: Collection[str]) -> None:
        super().__init__(starts, hidden)
        self._list_ends = ends

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        end = super()._outside(text, at, out)
        self._in_list = self._read == self._after_mark and text[end - 1] == "["
        return end

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] == "[" and not self._in_list:
            self._open_list()
            return at + 1
        return self._before_object(text, at, out)

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
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
