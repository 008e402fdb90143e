"""A tool-call format for models whose chat template has none: the system prompt lists the tools and asks for calls in
the form of Hermes, which most instruction-tuned models follow.

    # Tools
    …
    <tools>
    {"type": "function", "function": {"name": "find", "parameters": {…}}}
    </tools>
    …
    <tool_call>
    {"name": <function name>, "arguments": <object>}
    </tool_call>

Results come back in a user's message:

    <tool_response>
    …
    </tool_response>

The template gets neither tools, calls nor results: they are text of its messages.
"""

import json
from collections.abc import Collection, Sequence
from typing import Any

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.events import Event
from pipeline.text.formats.parsing.list_calls import ListParser
from pipeline.text.formats.parsing.reply_marks import ReplyMarks
from pipeline.text.formats.tool_parsers.hermes import END, START, Hermes, HermesParser
from pipeline.text.formats.tool_parsers.llama3 import OBJECT

RESPONSE_START = "<tool_response>"
RESPONSE_END = "</tool_response>"


class Generic(Hermes):
    name = "generic"
    aliases: tuple[str, ...] = ()
    opening = ""
    in_template = False

    def detects(self, template: str) -> bool:
        """Every chat template takes it. Without one, there are no chats."""
        return bool(template)

    def parser(self, names: Collection[str], marks: ReplyMarks) -> "GenericParser":
        return GenericParser(marks, names)

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        """Also calls without the mark, at the start."""
        opened = self._opened(lark, calls)
        more = f" ({self._next(lark, opened)})*" if parallel else ""
        text, bare = lark.text_unlike(OBJECT, START), lark.one_of([lark.object_of(call, "arguments") for call in calls])
        begun = lark.text_until(f"(/(?s:.*)/ & ~/({OBJECT})(?s:.*)/)", START)
        return f"{text} | {begun} {opened}{more} | {bare}"


class GenericParser(ListParser, HermesParser):
    """As Hermes's, and more tolerant. Small models forget the mark, so an object at the start of a reply is also a call
    if it names a tool of the request and has no other keys than a call's. Others, such as SmolLM2, are trained to write
    an array of calls between the marks."""

    def __init__(self, marks: ReplyMarks, names: Collection[str]) -> None:
        HermesParser.__init__(self, marks, names)
        self._list_ends = (self._end,)
        self._read = self._bare

    def _bare(self, text: str, at: int, out: list[Event]) -> int:
        return self._before_object(text, at, out, self._names)

    def _after_mark(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] != "[" or self._in_list:
            return self._before_object(text, at, out)
        self._open_list()
        return at + 1

    def _after_call(self, text: str, at: int, out: list[Event]) -> int:
        if not self._in_list:
            return super()._after_call(text, at, out)
        if (after := self._after_item(text, at)) is not None:
            return after
        self._no_call(out)
        return at


def tools_section(tools: Sequence[Any], *, choice: str, name: str, parallel: bool) -> str:
    """The part of a system prompt that lists tools, given as in OpenAI's API, and says how to call them. `choice` and
    `name` are the `tool_choice` and `tool_name` of `ChatPrompt`."""
    match choice:
        case "named":
            may = f"You must call the function {name}, once."
        case "required":
            may = (
                "You must call one or more of these functions." if parallel else "You must call one of these functions."
            )
        case _:
            how_many = "one or more of these functions" if parallel else "one of these functions"
            may = f"You may call {how_many} if that helps to answer the user. Otherwise, answer directly."
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\n{may} The functions are given as JSON, with a JSON schema of their parameters:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        f"For each call, write a JSON object with the function's name and its arguments between {START} and {END}:\n"
        f'{START}\n{{"name": <function name>, "arguments": <arguments as a JSON object>}}\n{END}\n'
        f"The result of each call is then given to you between {RESPONSE_START} and {RESPONSE_END}."
    )


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it. `arguments` is JSON text."""
    return f'{START}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n{END}'


def result_text(content: str) -> str:
    """The result of a call, in a user's message."""
    return f"{RESPONSE_START}\n{content}\n{RESPONSE_END}"
