"""The tool-call format of Hermes, Qwen 2.5 and Qwen 3.

    <tool_call>
    {"name": "find", "arguments": {"text": "a"}}
    </tool_call>

Source: https://github.com/NousResearch/Hermes-Function-Calling. Qwen 3 Coder and GLM write XML between the same marks,
which is another format.
"""

from collections.abc import Collection

from pipeline.text.formats.call_object import SPACE
from pipeline.text.formats.calls import CallParser
from pipeline.text.formats.events import Event
from pipeline.text.formats.lark import CallRule, LarkBuilder
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

    def parser(self, names: Collection[str], hidden: Collection[str]) -> "HermesParser":
        return HermesParser((START,), hidden, names)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        line = lark.text("\n")
        begin, end = f"{lark.mark(START)} {line}", f"{line} {lark.mark(END)}"
        one = lark.one_of([f"{begin} {lark.object_of(call, 'arguments')} {end}" for call in calls])
        return f"{one} ({line} {one})*" if parallel else one


class HermesParser(CallParser):
    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """Up to the end mark. Small models write one brace too many, or forget the mark."""
        if text[at] in SPACE or text[at] == "}":
            return at + 1
        if text.startswith(END, at):
            self._read = self._outside
            return at + len(END)
        if END.startswith(text[at:]):
            return self._hold(text, at)
        self._read = self._outside
        return at
