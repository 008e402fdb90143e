"""Helpers that parse replies and join their events."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS, ChatFormats, ReplyParser
from pipeline.text.formats.grammar.lark import AddedToken
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning
from pipeline.text.formats.parsing.marks import pattern_of
from pipeline.text.formats.reasoning import FORMATS
from pipeline.text.special_spans import packed

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


def read(parser: ReplyParser, pieces: Iterable[str], specials: Mapping[str, int] | None = None) -> Reply:
    """Parse text in pieces. Where it has one of the `specials`, the model wrote that special token: by default, those
    that are marks of the format. Their spans come as early as detokenize may send them: with the first character."""
    specials = parser.marks.ids if specials is None else specials
    pieces = list(pieces)
    spans = spans_of("".join(pieces), specials)
    events, end = [], 0
    for piece in pieces:
        end += len(piece)
        sent = spans[: next((i for i, span in enumerate(spans) if span[0] >= end), len(spans))]
        del spans[: len(sent)]
        events += parser.push(piece, b"".join(packed(*span) for span in sent))
    return joined([*events, *parser.finish()])


def specials_of(form: ChatFormats) -> dict[str, int]:
    """The special tokens of the model, those that are no marks, too."""
    return {one.content: one.id for one in form.added.values() if one.special}


def spans_of(text: str, specials: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """The spans of the special tokens in a text."""
    if (pattern := pattern_of(specials)) is None:
        return []
    return [(found.start(), len(found[0]), specials[found[0]]) for found in pattern.finditer(text)]


def formats(tools: str | None = None, reasoning: str | None = None, specials: Sequence[str] = ()) -> ChatFormats:
    return ChatFormats(
        None if tools is None else TOOLS[tools],
        None if reasoning is None else REASONING[reasoning],
        added={text: AddedToken(index, text, True) for index, text in enumerate(specials)},
    )


def parsed(tools: str, text: str, choice: str = "auto", specials: Sequence[str] = ()) -> Reply:
    """Parse as one piece and one character at a time. Fails if the results differ."""
    form = formats(tools, specials=specials)
    whole = read(form.parser(choice, NAMES), [text])
    assert read(form.parser(choice, NAMES), text) == whole
    return whole
