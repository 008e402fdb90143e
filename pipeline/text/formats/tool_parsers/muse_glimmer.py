"""The format of Muse Glimmer ("ATEM"): a reply is a series of messages, each to a recipient.

     to=self<|message|>The user wants …<|eom|><|start|>assistant to=find<|message|><atem:function_calls>
    <atem:invoke name="find">
    <atem:parameter name="text">a</atem:parameter>
    <atem:parameter name="n">5</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

     to=self<|message|>Simple.<|eom|><|start|>assistant to=user<|message|>4<|eot|>

A message to `self` is the reasoning, one to `user` the answer, and any other has calls. `<|eot|>` ends the reply. The
prompt ends after `<|start|>assistant`. Values have no quotes, as in tool_parsers/xml_calls.py.
Source: llama.cpp, models/templates/muse-glimmer.jinja and common/parsers/muse-glimmer.cpp
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.calls import CallParser, NoCalls
from pipeline.text.formats.parsing.events import CallBegun, Content, Event
from pipeline.text.formats.parsing.messages import MessageParser, MessageSyntax, Part
from pipeline.text.formats.parsing.reply_marks import CHARACTERS, ReplyMarks
from pipeline.text.formats.parsing.xml_parser import Tags, XmlParser
from pipeline.text.formats.tool_parsers.xml_calls import XmlFormat, seen

START, MESSAGE, EOM, EOT = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
TAGS = Tags(
    "<atem:function_calls>",
    "</atem:function_calls>",
    '<atem:invoke name="',
    '">',
    '<atem:parameter name="',
    '">',
    after_value="</atem:parameter>",
    call_end="</atem:invoke>",
)
MARKS = (START, MESSAGE, EOM, EOT, TAGS.start, TAGS.end)
SELF, USER = "self", "user"
_RECIPIENT = re.compile(rf"\bto=([^\s<{CHARACTERS}]+)")


class MuseGlimmerParser(MessageParser):
    def __init__(self, content: CallParser, marks: ReplyMarks, **options: Any) -> None:
        super().__init__(SYNTAX, content, marks, **options)
        self._calls = self._call_parser()

    def _begin(self, text: str, at: int, end: int) -> None:
        found = _RECIPIENT.search(text, at, end)
        recipient = USER if found is None else found[1]
        if recipient in (SELF, USER) or not self._with_calls:
            self._begin_text(is_thought=recipient == SELF)
            return
        self._part = Part.CALL
        self._calls = self._call_parser()
        if self._has_text[Part.CONTENT]:
            self._separator[Part.CONTENT] = "\n"  # before what is no call

    def _in_call(self, text: str, at: int, out: list[Event]) -> int | None:
        found = self._body_end.find(text, at)
        held = found.start() if found else self._body_end.held(text, at)
        self._add(self._calls.push(text[at:held]), out)
        if found is None:
            return held if held > at else None
        self._add(self._calls.close(), out)
        return self._message_ended(found[0], held)

    def _call_cut(self, rest: str, out: list[Event]) -> None:
        self._add(self._calls.push(rest) + self._calls.finish(), out)

    def _add(self, events: list[Event], out: list[Event]) -> None:
        for event in events:
            if isinstance(event, Content):
                self._emit(Part.CONTENT, event.text, out)
            else:
                self._num_calls += isinstance(event, CallBegun)
                out.append(event)

    def _call_parser(self) -> XmlParser:
        """Of one message."""
        schemas = self._names if isinstance(self._names, Mapping) else dict.fromkeys(self._names, "")
        marks = self._reply_marks
        return XmlParser(seen(TAGS, marks), schemas, marks.hidden, num_before=self._num_calls)


SYNTAX = MessageSyntax(
    MuseGlimmerParser,
    MARKS,
    START,
    MESSAGE,
    end=EOM,
    ends=(EOM, EOT),
    thought=f"to={SELF}",
    answer=f" to={USER}{MESSAGE}",
)
THOUGHT_BEGIN = f" {SYNTAX.thought}{MESSAGE}"


class MuseGlimmer(XmlFormat):
    messages = SYNTAX

    def __init__(self) -> None:
        super().__init__("muse_glimmer", TAGS, stops=(EOT,))
        self.marks = MARKS

    def detects(self, template: str) -> bool:
        return is_muse_glimmer(template)

    def call_start(self, names: Collection[str], marks: ReplyMarks) -> None:
        """The end of a message ends the reasoning."""

    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> CallParser:
        """Of the answer's text, which has no calls: `MuseGlimmerParser` reads them."""
        return NoCalls((), ())

    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        each = [f"{lark.sequence(f' to={call.name}{MESSAGE}')} {self._call(lark, call, chr(10))}" for call in calls]
        one = lark.one_of(each)
        return f"{one} ({lark.sequence(EOM, SYNTAX.begin)} {one})*" if parallel else one

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str | None:
        """Calls or an answer follow any number of other messages."""
        if not (lark.stands_apart(EOM) and lark.stands_apart(MESSAGE)):
            return None
        text = lark.rule(r"/(.|\n)*/")
        begun = f"({lark.sequence(SYNTAX.answer)} | {lark.sequence(THOUGHT_BEGIN)})"
        again = f"{text} {lark.mark(EOM)} {lark.sequence(SYNTAX.begin)}"
        answer = f"{lark.sequence(SYNTAX.answer)} {text}"
        return f"({begun} {again})* ({self.grammar(lark, calls, parallel=parallel)} | {answer})"


def is_muse_glimmer(template: str) -> bool:
    return TAGS.start in template and EOM in template
