"""Tool calls as Python: the formats of Llama 4 and 3.2 with such prompts, of Gemma 3 with vLLM's template, LFM2 and
OLMo 3.

    [find(text="a", n=5), now()]                                                   Llama, Gemma 3
    <|tool_call_start|>[find(text="a", n=5), now()]<|tool_call_end|>               LFM2
    <function_calls>find(text="a", n=5)                                            OLMo 3
    now()</function_calls>

Llama may write `<|python_start|>` and `<|python_end|>` around the list. Without a mark, the list must begin the reply
and name a tool of the request.
Sources: https://github.com/meta-llama/llama-models/blob/main/models/llama3_2/text_prompt_format.md,
allenai/Olmo-3-7B-Instruct and LiquidAI/LFM2.5-8B-A1B (chat templates)
"""

import re
from collections.abc import Collection, Mapping

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.grammar.own_syntax import json_text, listed, parameters
from pipeline.text.formats.grammar.schema_types import Types, property_types, quoted
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.loose_json import LooseValue
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, skip_space, starts_with
from pipeline.text.formats.tool_format import ToolFormat, shows_tools

PYTHON_START, PYTHON_END = "<|python_start|>", "<|python_end|>"
LFM_START, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
CALLS_START, CALLS_END = "<function_calls>", "</function_calls>"
SPREAD = "**"
_NAME = re.compile(r"[A-Za-z_][\w.\-]*")
_ARGUMENT = re.compile(r"([A-Za-z_]\w*)[ \t\r\n]*=")
_ARGUMENT_SO_FAR = re.compile(r"[A-Za-z_]\w*[ \t\r\n]*")


class Pythonic(ToolFormat):
    name = "pythonic"
    is_typed = True
    aliases = ("llama4_pythonic",)
    marks = (PYTHON_START, PYTHON_END)

    def detects(self, template: str) -> bool:
        return shows_tools(template) and ("[func_name1(" in template or "[function_name1(" in template)

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> "PythonicParser":
        return PythonicParser(marks.of(PYTHON_START), marks.of(PYTHON_END), names, marks.hidden)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([_call(lark, call) for call in calls])
        more = f" ({lark.text(', ')} {one})*" if parallel else ""
        return f"{lark.text('[')} {one}{more} {lark.text(']')}"

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        rule = lark.rule(self.grammar(lark, calls, parallel=parallel))
        text = lark.text_unlike(r"\s*\[", PYTHON_START)
        if not lark.stands_apart(PYTHON_START):
            return f"{text} | {rule}"
        return f"{text} ({lark.mark(PYTHON_START)} {rule} {lark.mark(PYTHON_END)})? | {rule}"


class Lfm2(ToolFormat):
    name = "lfm2"
    is_typed = True
    opening = LFM_START
    marks = (LFM_START, LFM_END)

    def detects(self, template: str) -> bool:
        return shows_tools(template) and "List of tools: " in template and "<|im_start|>" in template

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> "PythonicParser":
        return PythonicParser(marks.of(LFM_START), marks.of(LFM_END), names, marks.hidden, needs_mark=True)

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([_call(lark, call) for call in calls])
        more = f" ({lark.text(', ')} {one})*" if parallel else ""
        return f"{lark.mark(LFM_START)} {lark.text('[')} {one}{more} {lark.text(']')} {lark.mark(LFM_END)}"


class Olmo3(ToolFormat):
    name = "olmo3"
    is_typed = True
    opening = CALLS_START
    marks = (CALLS_START, CALLS_END)

    def detects(self, template: str) -> bool:
        return CALLS_START in template

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> "PythonicParser":
        return PythonicParser(
            marks.of(CALLS_START), marks.of(CALLS_END), names, marks.hidden, has_brackets=False, needs_mark=True
        )

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([_call(lark, call) for call in calls])
        more = f" ({lark.text(chr(10))} {one})*" if parallel else ""
        return f"{lark.mark(CALLS_START)} {one}{more} {lark.mark(CALLS_END)}"


def _call(lark: LarkBuilder, call: CallRule) -> str:
    """A call. Values are JSON, which the parser reads as well as Python."""
    members = parameters(call.schema)
    if members is None or not all(one.name.isidentifier() for one in members):
        return f"{lark.text(f'{call.name}({SPREAD}')} {call.arguments} {lark.text(')')}"
    each = [(f"{lark.text(f'{one.name}=')} {json_text(lark, one)}", one.is_required) for one in members]
    return f"{lark.text(f'{call.name}(')} {listed(lark, each, lark.text(', '))} {lark.text(')')}"


class PythonicParser(CallParser):
    """`has_brackets`: calls are a list. Otherwise, they are lines. Unless calls need a mark, a list needs none at the
    start of the reply."""

    def __init__(
        self,
        start: str,
        end: str,
        names: Mapping[str, str],
        hidden: Collection[str],
        *,
        has_brackets: bool = True,
        needs_mark: bool = False,
    ) -> None:
        super().__init__((start,), hidden, names)
        self._end = end
        self._schemas = names
        self._has_brackets = has_brackets
        self._is_marked = False
        self._in_list = False
        self._types: Mapping[str, Types] = {}
        self._is_first = True
        """The call has no arguments so far."""
        self._is_spread = False
        self._value = LooseValue()
        if not needs_mark:
            self._read = self._after_mark

    # ---------------------------------------------------------------------------------------------- before the call

    def _outside(self, text: str, at: int, out: list[Event]) -> int:
        end = super()._outside(text, at, out)
        if self._read == self._after_mark:
            self._is_marked = True
            self._in_list = not self._has_brackets
        return end

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        """At a list's start or, in a list, before a call."""
        char = text[at]
        if char in SPACE or (char == "[" and not self._in_list):
            self._candidate.append(char)
            self._in_list |= char == "["
            return at + 1
        return self._call(text, at, out) if self._in_list else self._give_up(at, out)

    def _call(self, text: str, at: int, out: list[Event]) -> int:
        """A name, `(`, and the start of an argument or `)`."""
        name = _NAME.match(text, at)
        if name is None or name.end() - at > MAX_NAME_CHARS or not (self._is_marked or self._may_be_name(name, text)):
            return self._give_up(at, out)
        if name.end() == len(text):
            return self._hold(text, at)
        if text[name.end()] != "(":
            return self._give_up(at, out)
        inside = skip_space(text, name.end() + 1)
        if inside - at > 2 * MAX_NAME_CHARS:
            return self._give_up(at, out)
        if inside == len(text):
            return self._hold(text, at)
        match self._argument_at(text, inside):
            case None:
                return self._give_up(at, out)
            case "":
                return self._hold(text, at)
        self._begin_call(name[0], out)
        self._types = property_types(self._schemas.get(name[0], ""))
        self._is_first = True
        self._is_spread = False
        self._read = self._in_call
        return inside

    def _may_be_name(self, name: "re.Match[str]", text: str) -> bool:
        """Whether this is a tool's name, or might become one."""
        if name.end() < len(text):
            return name[0] in self._names
        return any(one.startswith(name[0]) for one in self._names)

    def _argument_at(self, text: str, at: int) -> str | None:
        """`)`, `=` for a named argument, or `**`; "" if more text is needed, None for anything else."""
        if text[at] == ")":
            return ")"
        if (spread := starts_with(text, at, (SPREAD,))) is not None:
            return spread
        if _ARGUMENT.match(text, at):
            return "="
        begun = _ARGUMENT_SO_FAR.match(text, at)
        return "" if begun and begun.end() == len(text) and begun.end() - at <= MAX_NAME_CHARS else None

    def _give_up(self, at: int, out: list[Event]) -> int:
        self._in_list = self._is_marked = False
        self._no_call(out)
        return at

    # -------------------------------------------------------------------------------------------------- in the call

    def _in_call(self, text: str, at: int, out: list[Event]) -> int:
        """Before an argument."""
        if text[at] in SPACE:
            return at + 1
        match self._argument_at(text, at):
            case "":
                return self._hold(text, at)
            case ")":
                self._write("{}" if self._is_first else "}", out)
                self._end_call(out)
                return at + 1
            case "**" if self._is_first:
                self._is_spread = True
                self._value = LooseValue(is_python=True, types=self._types)
                self._read = self._in_value
                return at + len(SPREAD)
            case "=":
                argument = _ARGUMENT.match(text, at)
                assert argument is not None
                self._write(f"{'{' if self._is_first else ', '}{quoted(argument[1])}: ", out)
                self._is_first = False
                self._value = LooseValue(is_python=True, types={"": self._types.get(argument[1])})
                self._read = self._in_value
                return argument.end()
        return self._break(at, out)

    def _in_value(self, text: str, at: int, out: list[Event]) -> int:
        end, written = self._value.push(text, at)
        self._write(written, out)
        if self._value.is_broken:
            self._write(self._value.closing(), out)
            if not self._is_spread:
                self._write("}", out)
            self._end_broken(out)
            return end
        if not self._value.is_whole:
            return self._hold(text, end)
        self._read = self._after_value
        return end

    def _after_value(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in SPACE:
            return at + 1
        if text[at] == "," and not self._is_spread:
            self._read = self._in_call
            return at + 1
        if text[at] == ")":
            if not self._is_spread:
                self._write("}", out)
            self._end_call(out)
            return at + 1
        match None if self._is_spread else self._argument_at(text, at):
            case "":
                return self._hold(text, at)
            case "=":  # the comma is missing, as in vLLM's template for Gemma 3
                self._read = self._in_call
                return at
        return self._break(at, out)

    def _break(self, at: int, out: list[Event]) -> int:
        """Text that can't be part of the call: its arguments end here."""
        if not self._is_spread:
            self._write("{}" if self._is_first else "}", out)
        self._end_broken(out)
        return at

    def _end_broken(self, out: list[Event]) -> None:
        self._end_call(out)
        self._in_list = self._is_marked = False
        self._read = self._outside

    # ----------------------------------------------------------------------------------------------- after the call

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        char = text[at]
        if char in SPACE:
            self._candidate.append(char)
            return at + 1
        if char == "," and self._in_list and self._has_brackets:
            self._candidate.append(char)
            self._read = self._after_mark
            return at + 1
        if char == "]" and self._in_list and self._has_brackets:
            self._candidate.clear()
            self._in_list = False
            return at + 1
        match starts_with(text, at, (self._end,)):
            case "":
                return self._hold(text, at)
            case self._end:
                self._candidate.clear()
                self._in_list = self._is_marked = False
                self._read = self._outside
                return at + len(self._end)
        if self._in_list and not self._has_brackets:
            self._candidate.clear()
            self._read = self._after_mark
            return at
        return self._give_up(at, out)
