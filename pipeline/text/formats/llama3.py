"""Calls as Llama 3.1 to 3.3, and 4, write those of tools that are given as JSON.

    {"name": "find", "parameters": {"text": "a"}}

They begin the reply, or stand behind `<|python_tag|>`; several are separated by `;`, with Llama 4 by nothing. An object
that no mark says to be a call is one only if it calls a tool of the request. What else stands behind the mark is code
for tools that the model brings with it, and is content here.
https://github.com/meta-llama/llama-models/blob/main/models/llama3_1/prompt_format.md
"""

from collections.abc import Collection

from pipeline.text.formats.call_object import SPACE, CallObject
from pipeline.text.formats.calls import CallParser
from pipeline.text.formats.events import Event
from pipeline.text.formats.tool_format import CallRule, Lark, ToolFormat

START = "<|python_tag|>"
HEADS = ("<|start_header_id|>", "<|header_start|>")
"""What Llama 3 and Llama 4 begin a message with."""


class Llama3(ToolFormat):
    name = "llama3"
    marks = (START,)

    def detects(self, template: str) -> bool:
        return START in template or (any(head in template for head in HEADS) and '"parameters": ' in template)

    def parser(self, names: Collection[str], hidden: Collection[str]) -> "Llama3Parser":
        return Llama3Parser((START,), hidden, names)

    def grammar(self, lark: Lark, calls: list[CallRule], *, parallel: bool) -> str:
        one = lark.one_of([lark.object_of(call, "parameters") for call in calls])
        between = "" if HEADS[1] in lark.template else lark.text("; ")
        return f"{one} ({between} {one})*" if parallel else one


class Llama3Parser(CallParser):
    def __init__(self, starts: Collection[str], hidden: Collection[str], names: Collection[str]) -> None:
        super().__init__(tuple(starts), hidden, names)
        self._read = self._bare

    def _bare(self, text: str, at: int, out: list[Event]) -> int:
        """Where an object may begin that no mark says to be a call: at the reply's beginning, or behind `;`."""
        if text[at] == "{":
            return self._open(CallObject(self._num_calls, self._names), text, at, out)
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at

    def _marked(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] == "{":
            return self._open(CallObject(self._num_calls), text, at, out)
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at

    def _behind(self, text: str, at: int, out: list[Event]) -> int:
        if text[at] in ";{":
            is_next = text[at] == "{"
            self._candidate += [] if is_next else [";"]
            self._read = self._bare
            return at if is_next else at + 1
        if text[at] in SPACE:
            self._candidate.append(text[at])
            return at + 1
        self._no_call(out)
        return at
