"""The format of gpt-oss ("harmony"): a reply is a series of messages, each in a channel.

    <|channel|>analysis<|message|>The user wants …<|end|>
    <|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>{"text": "a"}<|call|>

    <|channel|>analysis<|message|>Simple.<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>

`analysis` is the reasoning, `final` the answer, and `commentary` has calls, or text for the user before them.
`<|call|>` and `<|return|>` end the reply. The recipient may also stand before the channel. Reasoning and calls
alternate, so one parser reads both; the prompt ends after `<|start|>assistant`.
Source: https://cookbook.openai.com/articles/openai-harmony
"""

import re
from collections.abc import Mapping
from typing import Any

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject, ObjectState
from pipeline.text.formats.parsing.calls import CallParser, NoCalls
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Event
from pipeline.text.formats.parsing.messages import MessageParser, MessageSyntax, Part
from pipeline.text.formats.parsing.reply_marks import CHARACTERS, ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE
from pipeline.text.formats.tool_format import ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
STOPS = (CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ANALYSIS_BEGIN = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
FUNCTIONS = "functions."
RECIPIENT = re.compile(rf"\bto=([^\s<{CHARACTERS}]+)")
"""Of a message, in its header"""


class HarmonyParser(MessageParser):
    """The model may leave out the namespace before the name of a tool."""

    def __init__(self, content: CallParser, marks: ReplyMarks, **options: Any) -> None:
        super().__init__(SYNTAX, content, marks, **options)
        self._channel_name = re.compile(re.escape(marks.of(CHANNEL)) + r"\s*(\w+)")
        self._object = CallObject(0)
        self._name = ""

    def _begin(self, text: str, at: int, end: int) -> None:
        channel, found = self._channel_name.search(text, at, end), RECIPIENT.search(text, at, end)
        recipient = found[1] if found else ""
        is_function = recipient.startswith(FUNCTIONS) or recipient in self._names
        if is_function and self._with_calls:
            self._part = Part.CALL
            self._name = recipient.removeprefix(FUNCTIONS)[:MAX_NAME_CHARS]
            self._object = CallObject.of_arguments(self._num_calls, self._name)
            return
        is_analysis = channel is not None and channel[1] == ANALYSIS
        self._begin_text(is_thought=is_analysis or (recipient != "" and not is_function))

    def _call_cut(self, rest: str, out: list[Event]) -> None:
        """What was not read is no part of the arguments."""

    def _in_call(self, text: str, at: int, out: list[Event]) -> int | None:
        if self._object.state is ObjectState.OPEN:
            if not self._object.has_begun:
                if text[at] in SPACE:
                    return at + 1
                found = self._body_end.find(text, at)
                if found is not None and found.start() == at:  # no arguments
                    self._call_without_arguments(out)
                    return self._message_ended(found[0], at)
                if self._body_end.held(text, at) == at:
                    return None
                if text[at] != "{":
                    self._begin_text(is_thought=False)
                    return at
            had_begun = self._object.has_begun
            end = self._object.push(text, at, out)
            self._num_calls += self._object.has_begun and not had_begun
            return end
        found = self._body_end.find(text, at)
        if found is None:
            held = self._body_end.held(text, at)
            return held if held > at else None
        return self._message_ended(found[0], found.start())

    def _call_without_arguments(self, out: list[Event]) -> None:
        index = self._num_calls
        self._num_calls += 1
        out += [CallBegun(index, self._name), Arguments(index, "{}"), CallEnded(index)]


SYNTAX = MessageSyntax(
    HarmonyParser,
    MARKS,
    START,
    MESSAGE,
    end=END,
    ends=(END, *STOPS),
    thought=ANALYSIS,
    answer=f"{CHANNEL}{FINAL}{MESSAGE}",
    inner=(CHANNEL,),
)


class Harmony(ToolFormat):
    name = "openai"
    aliases = ("harmony", "gpt_oss")
    opening = CHANNEL
    marks = MARKS
    stops = STOPS
    messages = SYNTAX

    def detects(self, template: str) -> bool:
        return is_harmony(template)

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> CallParser:
        """Of the answer's text, which has no calls: `HarmonyParser` reads them."""
        return NoCalls((), ())

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        """One call in any case: its end ends the reply."""
        rules = [
            f"{lark.sequence(f'{CHANNEL}{COMMENTARY} to={FUNCTIONS}{call.name} {CONSTRAIN}json{MESSAGE}')} "
            f"{call.arguments}"
            for call in calls
        ]
        return lark.one_of(rules)

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str | None:
        """A call or an answer follows any number of other messages."""
        if not lark.stands_apart(CHANNEL):
            return None
        text = lark.rule(r"/(.|\n)*/")
        again = f"{text} {lark.mark(END)} {lark.sequence(SYNTAX.begin)}"
        said, thought = lark.sequence(CHANNEL, COMMENTARY, MESSAGE), lark.sequence(ANALYSIS_BEGIN)
        answer = f"{lark.sequence(SYNTAX.answer)} {text}"
        one = self.grammar(lark, calls, parallel=parallel)
        return f"({said} {again} | {thought} {again})* ({one} | {answer})"


def is_harmony(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template and START in template
