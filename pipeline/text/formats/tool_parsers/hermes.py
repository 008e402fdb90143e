"""The tool-call format of Hermes, Qwen 2.5 and Qwen 3, EXAONE 4 and ERNIE 4.5.

    <tool_call>
    {"name": "find", "arguments": {"text": "a"}}
    </tool_call>

EXAONE 4 writes a call in one line. Qwen 3 Coder and GLM write XML between the same marks, which is another format.
Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from collections.abc import Collection

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import SPACE
from pipeline.text.formats.parsing.call_start import CallStart
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.tool_format import ToolFormat

START = "<tool_call>"
END = "</tool_call>"


class Hermes(ToolFormat):
    name = "hermes"
    aliases: tuple[str, ...] = ("qwen3_json", "granite4")
    opening = START
    marks = (START, END)

    def detects(self, template: str) -> bool:
        return START in template and "<function=" not in template and "<arg_key>" not in template

    def call_start(self, names: Collection[str], marks: ReplyMarks) -> CallStart:
        return CallStart(marks.of(START), ("{", '"name"', ":"), (",", "}"), tuple(f'"{name}"' for name in names))

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "HermesParser":
        return HermesParser(marks, names)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        opened = self._opened(lark, calls)
        one = f"{lark.mark(START)} {opened}"
        return f"{one} ({self._next(lark, opened)})*" if parallel else one

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        if lark.stands_apart(START):
            return f"{lark.text_without(START)} ({self.grammar(lark, calls, parallel=parallel)})?"
        opened = self._opened(lark, calls)
        more = f" ({self._next(lark, opened)})*" if parallel else ""
        return f"{lark.text_without(START)} | {lark.text_until('/(?s:.*)/', START)} {opened}{more}"

    def _opened(self, lark: LarkBuilder, calls: list[CallRule]) -> str:
        """Add a rule for a call without its mark."""
        line = "" if f"{START}{{" in lark.template else lark.text("\n")
        return lark.one_of([f"{line} {lark.object_of(call, 'arguments')} {line} {lark.mark(END)}" for call in calls])

    def _next(self, lark: LarkBuilder, opened: str) -> str:
        return f"{lark.text(chr(10))} {lark.mark(START)} {opened}"


class HermesParser(CallParser):
    def __init__(self, marks: ReplyMarks, names: Collection[str]) -> None:
        super().__init__(marks.each((START,)), marks.hidden, names)
        self._end = marks.of(END)

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """Up to the end mark. Small models write one brace too many, or forget the mark."""
        if text[at] in SPACE or text[at] == "}":
            return at + 1
        if text.startswith(self._end, at):
            self._read = self._outside
            return at + len(self._end)
        if self._end.startswith(text[at:]):
            return self._hold(text, at)
        self._read = self._outside
        return at
