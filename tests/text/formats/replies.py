"""Helpers that parse replies and join their events."""

from collections.abc import Iterable, Sequence

import msgspec

from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS, ChatFormats, ReplyParser
from pipeline.text.formats.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from pipeline.text.formats.lark import AddedToken
from pipeline.text.formats.reasoning import FORMATS

TOOLS = {one.name: one for one in (*TOOL_FORMATS, GENERIC)}
REASONING = {one.name: one for one in FORMATS}
NAMES = {
    "find": '{"type": "object", "properties": {"text": {"type": "string"}, "n": {"type": "integer"}, '
    '"at": {"type": "object"}, "all": {"type": "boolean"}, "any": {}}}',
    "now": "",
    "add_2": '{"type": "object", "properties": {"code": {"type": "string"}, "xs": {"type": "array"}}}',
}
"""Tools, with the schemas of their arguments"""


class Reply(msgspec.Struct):
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []
    """Name, and arguments as text."""
    num_ended: int = 0


def joined(events: Iterable[Event]) -> Reply:
    """Join events into one reply. Fails if they contradict each other."""
    reply = Reply(calls=[])
    for event in events:
        match event:
            case Content(text):
                assert text
                reply.content += text
            case Reasoning(text):
                assert text
                reply.reasoning += text
            case CallBegun(index, name):
                assert index == len(reply.calls) == reply.num_ended
                reply.calls.append((name, ""))
            case Arguments(index, text):
                assert text
                assert index == len(reply.calls) - 1 == reply.num_ended
                name, before = reply.calls[index]
                reply.calls[index] = name, before + text
            case CallEnded(index):
                assert index == len(reply.calls) - 1 == reply.num_ended
                reply.num_ended += 1
    return reply


def read(parser: ReplyParser, pieces: Iterable[str]) -> Reply:
    return joined([*(event for piece in pieces for event in parser.push(piece)), *parser.finish()])


def formats(tools: str | None = None, reasoning: str | None = None, specials: Sequence[str] = ()) -> ChatFormats:
    return ChatFormats(
        None if tools is None else TOOLS[tools],
        None if reasoning is None else REASONING[reasoning],
        added={text: AddedToken(place, text, True) for place, text in enumerate(specials)},
    )


def parsed(tools: str, text: str, choice: str = "auto", specials: Sequence[str] = ()) -> Reply:
    """Parse as one piece and one character at a time. Fails if the results differ."""
    form = formats(tools, specials=specials)
    whole = read(form.parser(choice, NAMES), [text])
    assert read(form.parser(choice, NAMES), text) == whole
    return whole
