"""The base class of tool-call formats, and the builder of their Lark grammars."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec
from msgspec import Raw

from pipeline.text.formats.calls import CallParser

NO_PARAMETERS = '{"type": "object", "properties": {}, "additionalProperties": false}'
"""The schema of a function without one: it takes no arguments."""


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    parameters: Raw = Raw()
    """A JSON schema"""

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


class AddedToken(msgspec.Struct, frozen=True):
    """One of a tokenizer.json's `added_tokens`."""

    id: int
    content: str
    special: bool = False

    @property
    def stands_apart(self) -> bool:
        """Whether llguidance does not match it as text. This holds for special tokens, and for tokens that look like a
        tag, such as Qwen's <tool_call>, although detokenized text contains it."""
        return self.special or (self.content.startswith("<") and self.content.endswith(">"))


class CallRule(msgspec.Struct, frozen=True):
    """A call of one tool in a grammar."""

    name: str
    arguments: str
    """The name of the rule for its arguments"""


class LarkBuilder:
    """Builds a grammar in llguidance's Lark syntax
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
        """A mark, as text or as a token that text can't match."""
        token = self._added.get(mark)
        return self.text(mark) if token is None or not token.stands_apart else f"<[{token.id}]>"

    def rule(self, body: str) -> str:
        """Add a rule. Returns its name."""
        self._rules.append(f"r{len(self._rules)}: {body}")
        return f"r{len(self._rules) - 1}"

    def until(self, mark: str) -> str:
        """Any text up to and including the first `mark`."""
        if (written := self.mark(mark)) != self.text(mark):
            return self.rule(rf"/(.|\n)*/ {written}")
        self._rules.append(rf"r{len(self._rules)}[suffix={self.text(mark)}]: /(.|\n)*/")
        return f"r{len(self._rules) - 1}"

    def schema(self, schema: str) -> str:
        """Add a rule for JSON that matches a schema (its text). Schemas are kept apart, so that their references stay
        valid. Returns the rule's name."""
        self._schemas[f"s{len(self._schemas)}"] = Raw(schema.encode())
        return f"s{len(self._schemas) - 1}"

    def one_of(self, rules: Sequence[str]) -> str:
        return self.rule(" | ".join(rules))

    def object_of(self, call: CallRule, key: str) -> str:
        """A call as an object, with the white space that templates use."""
        name = msgspec.json.encode(call.name).decode()
        begin = self.text(f'{{"name": {name}, "{key}": ')
        return f"{begin} {call.arguments} {self.text('}')}"

    def grammar(self, start: str) -> "LarkGrammar":
        return LarkGrammar("\n".join([f"start: {start}", *self._rules, ""]), self._schemas)


class LarkGrammar(msgspec.Struct, frozen=True):
    """A grammar and, apart from it, the schemas of its arguments, which the checker may change."""

    rules: str
    schemas: dict[str, Raw] = {}
    """Schemas by rule name"""

    def lark(self, fit: Callable[[str], str] = lambda schema: schema) -> str:
        """The whole grammar; `fit` converts each schema."""
        return self.rules + "".join(
            f"{name}: %json {fit(bytes(schema).decode())}\n" for name, schema in self.schemas.items()
        )


class ToolFormat(ABC):
    """How a model family writes tool calls."""

    name: str
    """As in `chat.tool_call_parser`."""
    marks: tuple[str, ...]
    """If they are special tokens, detokenize must keep special tokens in the text."""
    in_template = True
    """Whether the chat template shows tools, calls and results. If not, they are written into messages."""

    @abstractmethod
    def detects(self, template: str) -> bool:
        """Whether a chat template is one of this family."""

    @abstractmethod
    def parser(self, names: Collection[str], hidden: Collection[str]) -> CallParser:
        """A parser of one reply to a request with tools of these names. The `hidden` marks, which are special tokens,
        are removed from content."""

    @abstractmethod
    def grammar(self, lark: LarkBuilder, calls: list[CallRule], *, parallel: bool) -> str:
        """A grammar of exactly one of these calls, or with `parallel` of one or more."""

    def call_id(self, key: int) -> str:
        """A call's id, from a unique 128-bit number."""
        return f"call_{key:032x}"
