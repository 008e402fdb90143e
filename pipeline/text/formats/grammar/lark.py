"""Grammars of replies in llguidance's Lark syntax
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md)."""

import re
from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Raw

from pipeline.text.formats.parsing.marks import Marks


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
    schema: str = ""
    """The JSON schema of its arguments"""


class LarkBuilder:
    """Builds a grammar. Methods that add a rule return its name; the others return an expression."""

    def __init__(self, template: str, added: Mapping[str, "AddedToken"]) -> None:
        self.template = template
        """The model's chat template"""
        self._added = added
        self._rules: list[str] = []
        self._schemas: dict[str, Raw] = {}
        self._parts: dict[str, Raw] = {}
        self._apart = Marks.of(frozenset(one.content for one in added.values() if one.stands_apart and one.content))

    def text(self, text: str) -> str:
        return msgspec.json.encode(text).decode()

    def mark(self, mark: str) -> str:
        """A mark, as text or as a token that text can't match."""
        token = self._added.get(mark)
        return self.text(mark) if token is None or not token.stands_apart else f"<[{token.id}]>"

    def stands_apart(self, mark: str) -> bool:
        """Whether a mark is a token that text can't match."""
        token = self._added.get(mark)
        return token is not None and token.stands_apart

    def _is_special(self, mark: str) -> bool:
        token = self._added.get(mark)
        return token is not None and token.special

    def sequence(self, *texts: str) -> str:
        """Texts, with the tokens in them that text can't match."""
        text = "".join(texts)
        parts, at = [], 0
        while found := self._apart.find(text, at):
            parts += [self.text(text[at : found.start()])] if found.start() > at else []
            parts.append(self.mark(found[0]))
            at = found.end()
        if at < len(text):
            parts.append(self.text(text[at:]))
        return " ".join(parts)

    def terminal(self, body: str) -> str:
        """Add a terminal, which may combine regular expressions with `&` and `~`."""
        self._rules.append(f"T{len(self._rules)}: {body}")
        return f"T{len(self._rules) - 1}"

    def text_until(self, body: str, end: str, before: str = "") -> str:
        """Text that matches the regular expressions `body`, then `before` and the mark `end`. `end` is nowhere else in
        it, unless it is a special token: parsers tell that from the same text. A lexer takes the longest match, so if
        the mark is text, one terminal must include it."""
        anywhere = f"/(?s:.*){regex(end)}(?s:.*)/"
        if self.stands_apart(end):
            term = f"({body}) /{regex(before)}/" if before else f"({body})"
            text = term if self._is_special(end) else f"({term}) & ~{anywhere}"
            return f"{self.terminal(text)} {self.mark(end)}"
        return self.terminal(f"({body}) /{regex(before + end)}/ & ~/(?s:.*){regex(end)}(?s:.+)/")

    def text_without(self, mark: str) -> str:
        """Add a terminal for any text that does not have this mark. Text that spells a special token is no mark."""
        if self._is_special(mark):
            return self.terminal("/(?s:.*)/")
        return self.terminal(f"/(?s:.*)/ & ~/(?s:.*){regex(mark)}(?s:.*)/")

    def text_unlike(self, begin: str, *marks: str) -> str:
        """Add a terminal for any text that doesn't begin as the regular expression `begin`, and has none of the marks
        that are text."""
        absent = [f"~/(?s:.*){regex(mark)}(?s:.*)/" for mark in marks if not self.stands_apart(mark)]
        return self.terminal(" & ".join(["/(?s:.*)/", f"~/({begin})(?s:.*)/", *absent]))

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

    def part(self, schema: str) -> str:
        """Add a rule for JSON that matches a part of a schema, which `schema` has added."""
        self._parts[f"p{len(self._parts)}"] = Raw(schema.encode())
        return f"p{len(self._parts) - 1}"

    def one_of(self, rules: Sequence[str]) -> str:
        return self.rule(" | ".join(rules))

    def object_of(self, call: CallRule, key: str) -> str:
        """A call as an object, with the white space that templates use."""
        name = msgspec.json.encode(call.name).decode()
        begin = self.text(f'{{"name": {name}, "{key}": ')
        return f"{begin} {call.arguments} {self.text('}')}"

    def grammar(self, start: str) -> "LarkGrammar":
        return LarkGrammar("\n".join([f"start: {start}", *self._rules, ""]), self._schemas, self._parts)


class LarkGrammar(msgspec.Struct, frozen=True):
    """A grammar and, apart from it, the schemas of its arguments, which the checker may change."""

    rules: str
    schemas: dict[str, Raw] = {}
    """Schemas by rule name, one for each tool. Formats that don't write JSON use only `parts` of most of them."""
    parts: dict[str, Raw] = {}

    def lark(self, fit: Callable[[str], str] = lambda schema: schema) -> str:
        """The whole grammar; `fit` converts each schema, or raises an error."""
        used = set(re.findall(r"\b[sp]\d+\b", self.rules))
        fitted = {name: fit(bytes(schema).decode()) for name, schema in {**self.schemas, **self.parts}.items()}
        return self.rules + "".join(f"{name}: %json {schema}\n" for name, schema in fitted.items() if name in used)


def regex(text: str) -> str:
    """The regular expression of a text, between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")
