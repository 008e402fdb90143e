"""What a format of tool calls is, and the grammar that makes a model call tools in it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import Raw

from pipeline.text.formats.calls import CallParser

NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'
"""The schema of a function that says none: it takes none."""


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    parameters: Raw = Raw()
    """A JSON schema"""

    @property
    def schema(self) -> str:
        """Of its arguments, which are an object whether the schema says so or not. Else it is as the client wrote it:
        every digit of a number counts."""
        text = bytes(self.parameters).decode().strip()
        if text in ("", "null"):
            return NO_PARAMETERS
        keys = msgspec.json.decode(text, type=dict[str, Raw])
        if "type" in keys:
            return text
        return f'{{"type": "object"{", " if keys else ""}{text[1:].lstrip()}'


class ToolSpec(msgspec.Struct, frozen=True):
    """A tool of a request, as far as a reply depends on it."""

    function: ToolFunction


class AddedToken(msgspec.Struct, frozen=True):
    """One of a tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool = False

    @property
    def stands_apart(self) -> bool:
        """Whether llguidance takes it for no text: it does so with special ones, and with whatever looks like a tag,
        as Qwen's <tool_call> does, which text shows all the same."""
        return self.special or (self.content.startswith("<") and self.content.endswith(">"))


class CallRule(msgspec.Struct, frozen=True):
    """A tool's call in a grammar."""

    name: str
    arguments: str
    """The grammar's name for its arguments"""


class Lark:
    """Writes a grammar in the syntax of llguidance
    (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

    def __init__(self, template: str, added: Mapping[str, "AddedToken"]) -> None:
        self.template = template
        """The model's chat template"""
        self._added = added
        self._rules: list[str] = []
        self._schemas: dict[str, Raw] = {}

    def text(self, text: str) -> str:
        return msgspec.json.encode(text).decode()

    def mark(self, mark: str) -> str:
        """A mark: text, or one token that no text ever becomes."""
        token = self._added.get(mark)
        return self.text(mark) if token is None or not token.stands_apart else f"<[{token.id}]>"

    def rule(self, body: str) -> str:
        """Name something."""
        self._rules.append(f"r{len(self._rules)}: {body}")
        return f"r{len(self._rules) - 1}"

    def until(self, mark: str) -> str:
        """Any text, and the first of these marks behind it."""
        if (written := self.mark(mark)) != self.text(mark):
            return self.rule(rf"/(.|\n)*/ {written}")
        self._rules.append(rf"r{len(self._rules)}[suffix={self.text(mark)}]: /(.|\n)*/")
        return f"r{len(self._rules) - 1}"

    def schema(self, schema: str) -> str:
        """JSON that a schema describes, whose text is given. It stands alone, so that references in it mean what they
        did."""
        self._schemas[f"s{len(self._schemas)}"] = Raw(schema.encode())
        return f"s{len(self._schemas) - 1}"

    def one_of(self, ways: Sequence[str]) -> str:
        return self.rule(" | ".join(ways))

    def object_of(self, call: CallRule, key: str) -> str:
        """A call as an object, written as templates write it."""
        name = msgspec.json.encode(call.name).decode()
        begin = self.text(f'{{"name": {name}, "{key}": ')
        return f"{begin} {call.arguments} {self.text('}')}"

    def grammar(self, start: str) -> "Written":
        return Written("\n".join([f"start: {start}", *self._rules, ""]), self._schemas)


class Written(msgspec.Struct, frozen=True):
    """A grammar, and apart from it the schemas of the arguments in it, which whoever checks them may have to change."""

    rules: str
    schemas: dict[str, Raw] = {}
    """By the names that the rules give them"""

    def lark(self, fit: Callable[[str], str] = lambda schema: schema) -> str:
        """The whole grammar, with each schema as `fit` makes it."""
        return self.rules + "".join(
            f"{name}: %json {fit(bytes(schema).decode())}\n" for name, schema in self.schemas.items()
        )


class ToolFormat(ABC):
    """How a family of models writes calls."""

    name: str
    """As in `chat.tool_call_parser`."""
    marks: tuple[str, ...]
    """Where they are special tokens, text has to show those while it is parsed."""

    @abstractmethod
    def detects(self, template: str) -> bool:
        """Whether a chat template is one of this family."""

    @abstractmethod
    def parser(self, names: Collection[str], hidden: Collection[str]) -> CallParser:
        """A parser of one reply to a request with tools of these names. What is `hidden` is not to be seen in content:
        marks that are special tokens."""

    @abstractmethod
    def grammar(self, lark: Lark, calls: list[CallRule], *, parallel: bool) -> str:
        """Exactly one of these calls, or with `parallel` one or more of them."""

    def call_id(self, key: int) -> str:
        """A call's id, from a number (128 bits) that no other call has."""
        return f"call_{key:032x}"
