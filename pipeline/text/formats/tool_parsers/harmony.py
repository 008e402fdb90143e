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
from collections.abc import Collection
from enum import Enum, auto

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_object import MAX_NAME_CHARS, CallObject, ObjectState
from pipeline.text.formats.parsing.calls import CallParser, NoCalls
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Event, Reasoning
from pipeline.text.formats.parsing.marks import Marks
from pipeline.text.formats.parsing.reply_marks import CHARACTERS, ReplyMarks
from pipeline.text.formats.parsing.text_scan import SPACE, starts_with
from pipeline.text.formats.tool_format import ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
STOPS = (CALL, RETURN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
ROLE = "assistant"
ANALYSIS_BEGIN = f"{CHANNEL}{ANALYSIS}{MESSAGE}"
FUNCTIONS = "functions."
MAX_HEADER_CHARS = 4 * MAX_NAME_CHARS
_RECIPIENT = re.compile(rf"\bto=([^\s<{CHARACTERS}]+)")


class Harmony(ToolFormat):
    name = "openai"
    aliases = ("harmony", "gpt_oss")
    opening = CHANNEL
    marks = MARKS
    stops = STOPS

    def detects(self, template: str) -> bool:
        return is_harmony(template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> CallParser:
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
        again = f"{text} {lark.mark(END)} {lark.sequence(START, ROLE)}"
        said, thought = lark.sequence(CHANNEL, COMMENTARY, MESSAGE), lark.sequence(ANALYSIS_BEGIN)
        answer = f"{lark.sequence(CHANNEL, FINAL, MESSAGE)} {text}"
        one = self.grammar(lark, calls, parallel=parallel)
        return f"({said} {again} | {thought} {again})* ({one} | {answer})"


def is_harmony(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template and START in template


class Part(Enum):
    HEADER = auto()
    REASONING = auto()
    CONTENT = auto()
    CALL = auto()
    BETWEEN = auto()
    """After the end of a message"""


class HarmonyParser:
    """Streaming parser of a whole reply. `content` parses the answer's text. Without `with_calls` or `with_reasoning`,
    these are content. `part` is where the reply begins."""

    def __init__(
        self,
        content: CallParser,
        marks: ReplyMarks,
        *,
        with_calls: bool,
        with_reasoning: bool,
        part: Part = Part.HEADER,
        names: Collection[str] = (),
    ) -> None:
        """`names` are the tools': the model may leave out the namespace before one of them."""
        self._content = content
        self._names = frozenset(names)
        self._marks = marks.each(MARKS)
        self._start, self._channel, self._message = marks.each((START, CHANNEL, MESSAGE))
        self._body_end = Marks.of(frozenset(marks.each((START, CHANNEL, END, CALL, RETURN))))
        self._channel_name = re.compile(re.escape(self._channel) + r"\s*(\w+)")
        self._header_starts = (self._start, self._channel, self._message, "to=")
        self._with_calls = with_calls
        self._with_reasoning = with_reasoning
        self._part = part
        self._is_first = part is Part.HEADER
        """Nothing has been read of a reply that should begin with a header."""
        self._rest = ""
        self._space: list[str] = []
        """White space before anything else"""
        self._num_calls = 0
        self._object = CallObject(0)
        self._name = ""
        self._separator = {Part.REASONING: "", Part.CONTENT: ""}
        """What precedes the next text of this kind: a line break between messages."""
        self._has_text = {Part.REASONING: False, Part.CONTENT: False}

    def push(self, text: str) -> list[Event]:
        """Add text. Returns the events that are now certain."""
        out: list[Event] = []
        text, self._rest = self._rest + text, ""
        at = 0
        while at < len(text):
            end = self._step(text, at, out)
            if end is None:
                self._rest = text[at:]
                break
            at = end
        return out

    def finish(self) -> list[Event]:
        """End the reply. Returns the remaining events."""
        out: list[Event] = []
        rest, self._rest = self._rest, ""
        match self._part:
            case Part.HEADER if self._is_first:
                self._emit(Part.CONTENT, "".join(self._space), out)
            case Part.REASONING | Part.CONTENT:
                self._emit(self._part, rest, out)
        return out + self._content.finish()

    def _step(self, text: str, at: int, out: list[Event]) -> int | None:
        match self._part:
            case Part.HEADER:
                return self._header(text, at, out)
            case Part.BETWEEN:
                return self._between(text, at)
            case Part.CALL:
                return self._arguments(text, at, out)
        return self._body(text, at, out)

    def _header(self, text: str, at: int, out: list[Event]) -> int | None:
        if self._is_first:
            if text[at] in SPACE:
                self._space.append(text[at])
                return at + 1
            start = starts_with(text, at, self._header_starts)
            if start == "":
                return None
            self._is_first = False
            if start is None:  # the model doesn't know the format
                self._part = Part.CONTENT
                self._emit(Part.CONTENT, "".join(self._space), out)
                return at
        end = text.find(self._message, at, at + MAX_HEADER_CHARS)
        if end < 0 and len(text) - at < MAX_HEADER_CHARS:
            return None
        if end < 0:
            self._begin(FINAL, "")
            # The mark that began the header would begin it again.
            return at + len(self._channel) if text.startswith(self._channel, at) else at
        channel, recipient = self._channel_name.search(text, at, end), _RECIPIENT.search(text, at, end)
        self._begin(channel[1] if channel else "", recipient[1] if recipient else "")
        return end + len(self._message)

    def _begin(self, channel: str, recipient: str) -> None:
        is_function = recipient.startswith(FUNCTIONS) or recipient in self._names
        if is_function and self._with_calls:
            self._part = Part.CALL
            self._name = recipient.removeprefix(FUNCTIONS)[:MAX_NAME_CHARS]
            self._object = CallObject.of_arguments(self._num_calls, self._name)
            return
        is_thought = channel == ANALYSIS or (recipient and not is_function)
        self._part = Part.REASONING if is_thought and self._with_reasoning else Part.CONTENT
        if self._has_text[self._part]:
            self._separator[self._part] = "\n"

    def _body(self, text: str, at: int, out: list[Event]) -> int | None:
        found = self._body_end.find(text, at)
        held = found.start() if found else self._body_end.held(text, at)
        if held > at:
            self._emit(self._part, text[at:held], out)
            return held
        return None if found is None else self._message_ended(found)

    def _message_ended(self, found: "re.Match[str]") -> int:
        self._part = Part.HEADER if found[0] in (self._start, self._channel) else Part.BETWEEN
        return found.start() if found[0] == self._channel else found.end()

    def _between(self, text: str, at: int) -> int | None:
        if text[at] in SPACE:
            return at + 1
        if any(mark.startswith(text[at:]) and mark != text[at:] for mark in self._marks):
            return None
        for mark in self._marks:
            if text.startswith(mark, at):
                self._part = Part.HEADER if mark in (self._start, self._channel) else Part.BETWEEN
                return at if mark == self._channel else at + len(mark)
        self._begin(FINAL, "")
        return at

    def _arguments(self, text: str, at: int, out: list[Event]) -> int | None:
        if self._object.state is ObjectState.OPEN:
            if not self._object.has_begun:
                if text[at] in SPACE:
                    return at + 1
                found = self._body_end.find(text, at)
                if found is not None and found.start() == at:  # no arguments
                    self._call_without_arguments(out)
                    return self._message_ended(found)
                if self._body_end.held(text, at) == at:
                    return None
                if text[at] != "{":
                    self._begin(FINAL, "")
                    return at
            had_begun = self._object.has_begun
            end = self._object.push(text, at, out)
            self._num_calls += self._object.has_begun and not had_begun
            return end
        found = self._body_end.find(text, at)
        if found is None:
            held = self._body_end.held(text, at)
            return held if held > at else None
        return self._message_ended(found)

    def _call_without_arguments(self, out: list[Event]) -> None:
        index = self._num_calls
        self._num_calls += 1
        out += [CallBegun(index, self._name), Arguments(index, "{}"), CallEnded(index)]

    def _emit(self, part: Part, text: str, out: list[Event]) -> None:
        if not text:
            return
        text = self._separator[part] + text
        self._separator[part] = ""
        self._has_text[part] = True
        if part is Part.REASONING:
            out.append(Reasoning(text))
        else:
            out += self._content.push(text)
