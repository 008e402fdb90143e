"""Cases for the parsers of replies: every format of tool calls and of reasoning, as a stream and complete."""

import functools
import itertools
from collections.abc import Callable, Iterator

from pipeline.config.settings import ChatSettings
from pipeline.text.formats.chat_formats import GENERIC, TOOL_FORMATS, ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from pipeline.text.formats.parsing.marks import pattern_of
from pipeline.text.formats.reasoning import FORMATS
from pipeline.text.special_spans import packed
from tools.scaling_meter.case import Case

MAX_REPLY = 64 * 1024
"""Characters of 16k tokens"""
DELTA = 4
"""Characters of a token"""
DELTA_MS = 2.0
"""For each 1,000 characters of a reply: it is parsed as it arrives."""
NAMES = {f"find_{i}": '{"type": "object", "properties": {"a": {"type": "string"}}}' for i in range(64)} | {
    "find": '{"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}'
}
FILLERS = (" ", "\n", "a", "{", "[", '"', "\\", "<", "'", '{"a": "b"}, ', '"a": ', "find(", 'a="b", ', "find\n", "1")
FEW_FILLERS = (" ", "a", '"a": ', "\\")
HEADS = (
    '{"name": "find", "arguments": {"a": "',
    '{"name": "find", "arguments": {',
    '{"arguments": "',
    '[{"name": "find", "arguments": {}}, ',
    "find{",
    'call:find{a:<|"|>',
    "call:find{a:",
    "find(a='",
    "find(",
    "<function=find><parameter=a>",
    "<function=find><parameter=",
    "find<arg_key>a</arg_key><arg_value>",
    "find<arg_key>",
    'find[ARGS]{"a": "',
    "functions.find:0",
    "to=functions.find<|message|>",
)
"""What may follow a mark"""


def cases() -> Iterator[Case]:
    for form in (*TOOL_FORMATS, GENERIC):
        yield from _cases(f"tool format {form.name}", ChatSettings(tool_call_parser=form.name), form.marks)  # type: ignore[arg-type]
    for reasoning in FORMATS:
        chat = ChatSettings(tool_call_parser="none", reasoning_parser=reasoning.name)  # type: ignore[arg-type]
        yield from _cases(f"reasoning format {reasoning.name}", chat, reasoning.marks, heads=())


def _cases(group: str, chat: ChatSettings, marks: tuple[str, ...], heads: tuple[str, ...] = HEADS) -> Iterator[Case]:
    added = [AddedToken(i, mark, special=True) for i, mark in enumerate(marks)]
    formats = ChatFormats.of("x", chat, added)
    plain = ChatFormats.of("x", chat)
    for name, text in _texts(marks, heads):
        for kind, some in (("", plain), (" special", formats)):
            yield Case(
                group,
                f"{name}{kind}",
                functools.partial(_stream, some, text),
                MAX_REPLY,
                MAX_REPLY / 1000 * 2 * DELTA_MS,
            )


def _texts(marks: tuple[str, ...], heads: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, str]]]:
    """Names of texts; what they begin with and what is repeated."""
    for mark in marks:
        yield f"{mark} again", ("", mark)
        yield f"{mark} in half", ("", mark[:-1])
        yield f"{mark} lines", ("", f"{mark}\n")
        for filler in FILLERS:
            yield f"{mark} {filler!r}", (mark, filler)
    for mark, head in itertools.product(marks[:1] or ("",), heads):
        for filler in FEW_FILLERS:
            yield f"{head} {filler!r}", (mark + head, filler)
        yield f"{head} again", ("", mark + head)
    for filler in FILLERS:
        yield f"{filler!r}", ("", filler)


def _stream(formats: ChatFormats, text: tuple[str, str], n: int) -> Callable[[], object]:
    begin, piece = text
    whole = (begin + piece * (n // len(piece)))[:n]
    deltas = [whole[at : at + DELTA] for at in range(0, len(whole), DELTA)]
    ids = formats.parser("auto", NAMES, "").marks.ids
    found = [] if (marks := pattern_of(ids)) is None else marks.finditer(whole)
    spans = [(mark.start(), packed(mark.start(), len(mark[0]), ids[mark[0]])) for mark in found]

    def work() -> None:
        for parts in (deltas, [whole]):
            parser, end, sent = formats.parser("auto", NAMES, ""), 0, 0
            for part in parts:
                end += len(part)
                first = sent
                while sent < len(spans) and spans[sent][0] < end:
                    sent += 1
                parser.push(part, b"".join(span for _, span in spans[first:sent]))
            parser.finish()

    return work
