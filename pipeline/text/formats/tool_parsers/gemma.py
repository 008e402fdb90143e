"""The tool-call formats of Gemma 4 and FunctionGemma.

    <|tool_call>call:find{text:<|"|>a<|"|>,n:5}<tool_call|>                                Gemma 4
    <start_function_call>call:find{text:<escape>a<escape>,n:5}<end_function_call>          FunctionGemma

Sources: the chat template of google/gemma-4-31B-it;
https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices
"""

import re
from collections.abc import Collection, Mapping, Sequence

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.grammar.own_syntax import Parameter, json_text, listed, parameters, text_body
from pipeline.text.formats.grammar.schema_types import property_types
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.loose_json import LooseValue
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat

CALL = "call:"
_NAME = re.compile(r"[\w.\-:]+")
"""With colons, the last part is the name: some models write namespaces before it, as in `call:google:mcp:find`."""
_KEY = re.compile(r"\w+")
JSON_TYPES = frozenset({"integer", "number", "boolean", "null"})


class GemmaFormat(ToolFormat):
    is_typed = True

    def __init__(self, name: str, start: str, end: str, quote: str, stop: str) -> None:
        self.name = name
        self.start, self.end, self.quote = start, end, quote
        self.opening = start
        self.marks = (start, end, quote, stop)
        self.stops = (stop,)

    def detects(self, template: str) -> bool:
        return self.start in template

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> "GemmaParser":
        return GemmaParser(marks.each((self.start, self.end, self.quote)), names, marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([self._call(lark, call) for call in calls])
        return f"{one}{'+' if parallel else ''}"

    def _call(self, lark: LarkBuilder, call: CallRule) -> str:
        begin = lark.sequence(self.start, CALL, call.name)
        inside = self._object(lark, parameters(call.schema)) or call.arguments
        return f"{begin} {inside} {lark.sequence(self.end)}"

    def _object(self, lark: LarkBuilder, members: list[Parameter] | None) -> str | None:
        """An object; None if this syntax can't express it."""
        written = [] if members is None else [(self._member(lark, one), one.is_required) for one in members]
        if members is None or any(body is None for body, _ in written):
            return None
        inside = listed(lark, [(str(body), is_required) for body, is_required in written], lark.text(","))
        return f"{lark.text('{')} {inside} {lark.text('}')}"

    def _member(self, lark: LarkBuilder, parameter: Parameter) -> str | None:
        if not _KEY.fullmatch(parameter.name) or (value := self._value(lark, parameter)) is None:
            return None
        return f"{lark.text(f'{parameter.name}:')} {value}"

    def _value(self, lark: LarkBuilder, parameter: Parameter) -> str | None:
        if parameter.is_text:
            body = text_body(parameter.schema)
            if body is None or self.quote in str(parameter.schema.get("enum", parameter.schema.get("const", ""))):
                return None
            return f"{lark.sequence(self.quote)} {lark.text_until(body, self.quote)}"
        if parameter.types is not None and parameter.types <= JSON_TYPES:
            return json_text(lark, parameter)
        if parameter.types == frozenset({"object"}):
            return self._object(lark, parameters(parameter.text))
        if (items := parameter.items) is None or (one := self._value(lark, items)) is None:
            return None
        rule = lark.rule(one)
        return f"{lark.text('[')} ({rule} ({lark.text(',')} {rule})*)? {lark.text(']')}"


GEMMA4 = GemmaFormat("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")
FUNCTION_GEMMA = GemmaFormat(
    "functiongemma", "<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"
)


class GemmaParser(CallParser):
    def __init__(self, marks: Sequence[str], names: Mapping[str, str], hidden: Collection[str]) -> None:
        """`marks`: the start and the end of a call, and the quotation mark."""
        start, self._end, self._quote = marks
        super().__init__((start,), hidden)
        self._schemas = names
        self._value = LooseValue()

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        """`call:`, the name and `{`."""
        begin = at
        while begin < len(text) and text[begin] in SPACE:
            begin += 1
        match starts_with(text, begin, (CALL,)) if begin < len(text) else "":
            case "" if len(text) - at <= MAX_NAME_CHARS:
                return self._hold(text, at)
            case "" | None:
                self._no_call(out)
                return at
        begin += len(CALL)
        name = _NAME.match(text, begin)
        end = name.end() if name else begin
        if end == len(text) and end - begin <= MAX_NAME_CHARS:
            return self._hold(text, at)
        if name is None or end - begin > MAX_NAME_CHARS or text[end] != "{":
            self._no_call(out)
            return at
        called = name[0].rpartition(":")[2] if name[0] not in self._schemas else name[0]
        if called != name[0] and called not in self._schemas:
            self._no_call(out)
            return at
        self._begin_call(called, out)
        types = property_types(self._schemas.get(called, ""))
        self._value = LooseValue(self._quote, types=types)
        self._read = self._in_arguments
        return end

    def _in_arguments(self, text: str, at: int, out: list[Event]) -> int:
        end, written = self._value.push(text, at)
        self._write(written, out)
        if self._value.is_broken:
            self._write(self._value.closing(), out)
        if self._value.is_whole or self._value.is_broken:
            self._end_call(out)
            return end
        return self._hold(text, end)

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        """Up to the end mark, which may be missing."""
        if text[at] in SPACE or text[at] == "}":
            return at + 1
        match starts_with(text, at, (self._end,)):
            case "":
                return self._hold(text, at)
            case self._end:
                at += len(self._end)
        self._read = self._outside
        return at
