"""The base class of tool-call formats."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping

import msgspec
from msgspec import Raw

from pipeline.text.formats.grammar.lark import CallRule, LarkBuilder
from pipeline.text.formats.parsing.call_start import CallStart
from pipeline.text.formats.parsing.calls import CallParser
from pipeline.text.formats.parsing.messages import MessageSyntax
from pipeline.text.formats.parsing.reply_marks import ReplyMarks

NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'
"""The schema of a function without one: it takes no arguments."""


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    parameters: Raw = Raw()
    """A JSON schema"""
    strict: bool | None = None
    """The arguments must match the schema even if no call is required."""

    @property
    def schema(self) -> str:
        """The schema of its arguments, with `"type": "object"` added if there is no type. The rest of the text is
        unchanged, so that numbers keep every digit."""
        text = bytes(self.parameters).decode().strip()
        if text in ("", "null"):
            return NO_PARAMETERS
        keys = msgspec.json.decode(text, type=dict[str, Raw])
        if "type" in keys:
            return text
        return f'{{"type": "object"{", " if keys else ""}{text[1:].lstrip()}'


class ToolSpec(msgspec.Struct, frozen=True):
    """The part of a request's tool that the reply depends on."""

    function: ToolFunction


class ToolFormat(ABC):
    """How a model family writes tool calls."""

    name: str
    """As in `chat.tool_call_parser`."""
    aliases: tuple[str, ...] = ()
    """Other names of it there, as in vLLM."""
    marks: tuple[str, ...]
    """If they are special tokens, detokenize must keep special tokens in the text, and say where they are."""
    opening = ""
    """The mark that begins every first call of a reply; empty if a call needs none, or there are several."""
    stops: tuple[str, ...] = ()
    """Special tokens that end a reply, besides those that the model's files name."""
    messages: MessageSyntax | None = None
    """How replies are written that are a series of messages: then this reads all of a reply, not only `parser`."""
    is_typed = False
    """Whether parsers need the schemas of arguments, because the format doesn't tell numbers from texts."""
    in_template = True
    """Whether the chat template shows tools, calls and results. If not, they are written into messages."""

    @abstractmethod
    def detects(self, template: str) -> bool:
        """Whether a chat template is one of this family."""

    def call_start(self, names: Collection[str], marks: ReplyMarks) -> CallStart | None:
        """How a call of one of these tools begins; None if reasoning without an end hides calls. A parser looks for
        what `marks.of` returns for the format's marks."""
        return None

    @abstractmethod
    def parser(self, names: Mapping[str, str], marks: ReplyMarks) -> CallParser:
        """A parser of one reply to a request with tools of these names. The values are the JSON schemas of their
        arguments, or empty if the format is not typed. It looks for what `marks.of` returns for its marks."""

    @abstractmethod
    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        """A grammar of exactly one of these calls, or with `parallel` of one or more."""

    def reply(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str | None:
        """A grammar of a reply that may have these calls, to enforce the schemas of those that the model chooses to
        make. None if nothing tells where a call begins. Text that begins a call can only continue as one."""
        if not lark.stands_apart(self.opening):
            return None
        return f"{lark.text_without(self.opening)} ({self.grammar(lark, calls, parallel=parallel)})?"

    def call_id(self, key: int) -> str:
        """A call's id, from a unique 128-bit number."""
        return f"call_{key:032x}"


_CODE_BEGIN = re.compile(r"\{[%{]")
_CODE_ENDS = {"{%": "%}", "{{": "}}"}
_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_TOOLS = re.compile(r"(set\s+)?(?<![\w.])tools\b")


def shows_tools(template: str) -> bool:
    """Whether a chat template uses the variable `tools`. Some have the tools in a message instead, perhaps under this
    name."""
    code = _QUOTED.sub("", " ".join(_code_of(template)))
    found = _TOOLS.search(code)
    return found is not None and found[1] is None


def _code_of(template: str) -> Iterator[str]:
    """The statements and expressions of a template, in time proportional to its length: an end that was not found once
    is not searched for again."""
    ends = dict(_CODE_ENDS)
    at = 0
    while ends and (begin := _CODE_BEGIN.search(template, at)) is not None:
        at = begin.start() + 1
        if (mark := ends.get(begin[0])) is None:
            continue
        if (end := template.find(mark, begin.end())) < 0:
            del ends[begin[0]]
            continue
        at = end + len(mark)
        yield template[begin.start() : at]
