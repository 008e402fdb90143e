"""The tool-call formats of DeepSeek V3 and R1, and of V3.1. The parser accepts both.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>find
    ```json
    {"text": "a"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>                                         V3, R1

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{"text": "a"}<｜tool▁call▁end｜>           V3.1
    <｜tool▁calls▁end｜>

Source: the chat templates of deepseek-ai/DeepSeek-V3 and DeepSeek-V3.1. A template that never mentions `tools` does not
show them, so `auto` selects the generic format for it.
"""

import re
from collections.abc import Collection

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.sections import Header, SectionFormat, SectionMarks, SectionParser
from pipeline.text.formats.tool_format import shows_tools

MARKS = SectionMarks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
CODE = "```json"
_NAME = re.compile(r"[^\s`]+")


class DeepSeekV31(SectionFormat):
    name = "deepseek_v31"
    form = MARKS
    opening = MARKS.section
    marks = MARKS.all

    def detects(self, template: str) -> bool:
        return MARKS.arguments in template and CODE not in template and shows_tools(template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "DeepSeekParser":
        return DeepSeekParser(MARKS.seen(marks), marks.hidden)

    def _call(self, lark: LarkBuilder, call: CallRule) -> str:
        begin = lark.sequence(MARKS.call, call.name, MARKS.arguments)
        return f"{begin} {call.arguments} {lark.mark(MARKS.call_end)}"


class DeepSeekV3(DeepSeekV31):
    name = "deepseek_v3"

    def detects(self, template: str) -> bool:
        return MARKS.arguments in template and CODE in template and shows_tools(template)

    def _call(self, lark: LarkBuilder, call: CallRule) -> str:
        begin = lark.sequence(MARKS.call, "function", MARKS.arguments, call.name, "\n", CODE, "\n")
        end = lark.sequence("\n```", MARKS.call_end)
        return f"{begin} {call.arguments} {end}"

    def _between(self, lark: LarkBuilder) -> str:
        return lark.text("\n")


class DeepSeekParser(SectionParser):
    def _header(self, text: str) -> Header | None:
        kind, mark, name = text.partition(self._form.arguments)
        if not mark:
            return None
        if words := name.removesuffix(CODE).strip():  # V3: the name follows the kind
            return Header(words) if _NAME.fullmatch(words) else None
        name = kind.strip()
        return Header(name) if _NAME.fullmatch(name) else None
