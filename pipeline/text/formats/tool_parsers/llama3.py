"""The tool-call format of Llama 3.1 to 3.3 and Llama 4, for tools given as JSON.

    {"name": "find", "parameters": {"text": "a"}}

Calls stand at the start of the reply or after `<|python_tag|>`. `;` separates several calls; Llama 4 uses no separator.
An object without the mark is a call only if it names a tool of the request. Other text after the mark is code for
Llama's built-in tools, and is content here.
https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from collections.abc import Collection

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import SPACE
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.tool_format import ToolFormat

START = "<|python_tag|>"
OBJECT = r"\s*\{"
HEADS = ("<|start_header_id|>", "<|header_start|>")
"""The tokens that start a message, in Llama 3 and Llama 4."""


class Llama3(ToolFormat):
    name = "llama3"
    aliases = ("llama3_json", "llama4_json")
    marks = (START,)

    def detects(self, template: str) -> bool:
        return START in template or (any(head in template for head in HEADS) and '"parameters": ' in template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "Llama3Parser":
        return Llama3Parser(marks.each((START,)), marks.hidden, names)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([lark.object_of(call, "parameters") for call in calls])
        between = "" if HEADS[1] in lark.template else lark.text("; ")
        return f"{one} ({between} {one})*" if parallel else one

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        rule = lark.rule(self.grammar(lark, calls, parallel=parallel))
        text = lark.text_unlike(OBJECT, START)
        return f"{text} ({lark.mark(START)} {rule})? | {rule}" if lark.stands_apart(START) else f"{text} | {rule}"


class Llama3Parser(CallParser):
    def __init__(self, starts: Collection[str], hidden: Collection[str], names: Collection[str]) -> None:
        super().__init__(tuple(starts), hidden, names)
        self._read = self._bare

    def _bare(self, text: str, at: int, out: list[Event]) -> int:
        """At the start of the reply or after `;`, where a call needs no mark."""
        return self._before_object(text, at, out, self._names)

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in ";{":
            is_next = text[at] == "{"
            self._candidate += [] if is_next else [";"]
            self._read = self._bare
            return at if is_next else at + 1
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at
