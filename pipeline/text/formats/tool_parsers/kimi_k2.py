"""The tool-call format of Kimi K2.

    <|tool_calls_section_begin|>
    <|tool_call_begin|>functions.find:0<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>
    <|tool_calls_section_end|>                                                        all on one line

`functions.find:0` is the call's id, which the model expects back with the result, so clients get it as such.
Source: docs/tool_call_guidance.md of moonshotai/Kimi-K2-Instruct
"""

import re
from collections.abc import Collection

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.sections import Header, SectionFormat, SectionMarks, SectionParser

MARKS = SectionMarks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
_HEADER = re.compile(r"(?:functions\.)?([\w.\-]+?)(:\d+)?")


class KimiK2(SectionFormat):
    name = "kimi_k2"
    form = MARKS
    opening = MARKS.section
    marks = MARKS.all

    def detects(self, template: str) -> bool:
        return MARKS.section in template

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "KimiK2Parser":
        return KimiK2Parser(MARKS.seen(marks), marks.hidden)

    def _call(self, lark: LarkBuilder, call: CallRule) -> str:
        begin = lark.sequence(MARKS.call, f"functions.{call.name}:")
        return f"{begin} /[0-9]{{1,3}}/ {lark.mark(MARKS.arguments)} {call.arguments} {lark.mark(MARKS.call_end)}"


class KimiK2Parser(SectionParser):
    def _header(self, text: str) -> Header | None:
        head, mark, behind = text.partition(self._form.arguments)
        found = _HEADER.fullmatch(head.strip())
        if found is None or not mark or behind.strip():
            return None
        return Header(found[1], head.strip() if found[2] else "")
