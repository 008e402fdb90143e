"""The tool-call format of GLM-4 (GLM-4-9B and GLM-4-0414).

    find
    {"text": "a"}

The first line of the reply is a tool's name; `<|assistant|>` separates several calls, and `<|observation|>` ends them.
Source: https://github.com/zai-org/GLM-4, basic_demo (chat template of zai-org/GLM-4-9B-0414)
"""

import re
from collections.abc import Collection

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder, regex
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat, shows_tools

NEXT = "<|assistant|>"
STOP = "<|observation|>"
_NAME = re.compile(r"[\w.\-]+")


class Glm4(ToolFormat):
    name = "glm4"
    marks = (NEXT, STOP)
    stops = (STOP,)

    def detects(self, template: str) -> bool:
        return STOP in template and "<tool_call>" not in template and shows_tools(template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "Glm4Parser":
        return Glm4Parser(marks, names)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        line = lark.text("\n")
        one = lark.one_of([f"{lark.text(call.name)} {line} {call.arguments}" for call in calls])
        return f"{line}? {one} ({lark.mark(NEXT)} {line}? {one})*" if parallel else f"{line}? {one}"

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        # A lexer takes the longest match: a name and its line break are one terminal, which text can't begin with.
        names = "|".join(regex(call.name) for call in calls)
        text = lark.text_unlike(rf"\s*({names})\s*[\n{{]", NEXT)
        lines = [lark.terminal(rf"/\n?{regex(call.name)}\n/") for call in calls]
        one = lark.one_of([f"{line} {call.arguments}" for line, call in zip(lines, calls, strict=True)])
        return f"{text} | {one} ({lark.mark(NEXT)} {one})*" if parallel else f"{text} | {one}"


class Glm4Parser(CallParser):
    def __init__(self, marks: ReplyMarks, names: Collection[str]) -> None:
        super().__init__((), marks.hidden, names)
        self._between = marks.each((NEXT, STOP))
        self._read = self._bare

    def _bare(self, text: str, at: int, out: list[Event]) -> int:
        """At the start of the reply or after `<|assistant|>`: a tool's name, a line break and `{`."""
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        name = _NAME.match(text, at)
        if name is None or name.end() - at > MAX_NAME_CHARS:
            self._no_call(out)
            return at
        if name.end() == len(text) and any(one.startswith(name[0]) for one in self._names):
            return self._hold(text, at)
        if name[0] not in self._names or text[name.end()] not in SPACE:
            self._no_call(out)
            return at
        begin = name.end()
        while begin < len(text) and text[begin] in SPACE and begin - name.end() < MAX_NAME_CHARS:
            begin += 1
        if begin == len(text):
            return self._hold(text, at)
        if text[begin] != "{":
            self._no_call(out)
            return at
        self._candidate.append(text[at:begin])
        self._open(CallObject.of_arguments(self._num_calls, name[0]))
        return begin

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        match starts_with(text, at, self._between):
            case "":
                return self._hold(text, at)
            case str(mark):
                self._candidate.append(self._without_hidden(mark))
                self._read = self._bare
                return at + len(mark)
        self._no_call(out)
        return at
