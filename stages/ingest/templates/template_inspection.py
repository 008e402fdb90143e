"""Finds the message formats that a chat template expects, from its syntax tree. Pure.

Templates expect different formats of a message: `content` is text, or a list of parts; a message without content has
None, or an empty text; arguments of a tool call are an object, or JSON text. Models don't declare the format, so
servers inspect the template. vLLM calls the first two "string" and "openai".
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import jinja2
from jinja2 import nodes

ROUNDS = 8
"""How many levels of assignments are followed from a name to `messages`."""


@dataclass(frozen=True)
class TemplateTraits:
    """`parts`: it loops over the parts of a message's content. `text_too`: it tests whether content is text, and so
    takes text as well. `none`: it tests whether content is None, and never takes its length. `developer`: it knows that
    role. `json_arguments`: it appends the arguments of a call to text, and neither tests whether they are text
    nor writes them as JSON itself.
    `empty_parts`: it gets an empty reply as an empty part; `one_system`: it gets all system messages as one at the
    start; see template_fallbacks.py. `thinking_parts`: it reads the reasoning of a message from a part of its
    content."""

    parts: bool = False
    text_too: bool = False
    none: bool = False
    developer: bool = False
    json_arguments: bool = False
    empty_parts: bool = False
    one_system: bool = False
    thinking_parts: bool = False


class ValueKind(Enum):
    MESSAGES = auto()
    MESSAGE = auto()
    CONTENT = auto()


def inspect_template(environment: jinja2.Environment, source: str) -> TemplateTraits:
    """Inspect a template. Raises jinja2.TemplateSyntaxError."""
    tree = environment.parse(source)
    names = _Names(tree)
    consts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    tests = [node for node in tree.find_all(nodes.Test) if names.kind(node.node) is ValueKind.CONTENT]
    is_measured = any(
        node.name == "length" and names.kind(node.node) is ValueKind.CONTENT for node in tree.find_all(nodes.Filter)
    )
    return TemplateTraits(
        parts=any(names.reads_of_parts(loop, ("type", "text")) for loop in tree.find_all(nodes.For)),
        text_too=any(test.name == "string" for test in tests),
        none=not is_measured and (any(test.name == "none" for test in tests) or names.compared_with_none()),
        developer="developer" in consts,
        json_arguments=_adds_arguments(tree),
        thinking_parts=any(names.reads_of_parts(loop, ("thinking",)) for loop in tree.find_all(nodes.For)),
    )


def _adds_arguments(tree: nodes.Template) -> bool:
    sums: list[Any] = list(tree.find_all(nodes.Add))
    is_added = any(_is_arguments(side) for add in sums for side in (add.left, add.right))
    is_tested = any(test.name == "string" and _is_arguments(test.node) for test in tree.find_all(nodes.Test))
    is_written = any(
        one.name == "tojson" and _is_arguments(one.node) for one in tree.find_all(nodes.Filter) if one.node
    )
    return is_added and not is_tested and not is_written


def _is_arguments(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Getattr | nodes.Getitem) and _named(node) == "arguments"


class _Names:
    """What the names in a template refer to. Scopes are ignored: a name that refers to a message anywhere counts as one
    everywhere."""

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._kinds: dict[str, ValueKind] = {"messages": ValueKind.MESSAGES}
        self._macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
        for _ in range(ROUNDS):
            before = len(self._kinds)
            self._look()
            if len(self._kinds) == before:
                return

    def kind(self, node: nodes.Node | None) -> ValueKind | None:
        match node:
            case nodes.Name():
                return self._kinds.get(node.name)
            case nodes.Getattr() | nodes.Getitem():
                return self._of_part(node)
            case nodes.Call(node=nodes.Getattr(attr="get") as get, args=[nodes.Const(value="content"), *_]):
                whole = self.kind(get.node)
                return ValueKind.CONTENT if whole is ValueKind.MESSAGE else None
            case nodes.Filter():
                inner = self.kind(node.node)
                is_one = inner is ValueKind.MESSAGES and node.name in ("first", "last")
                return ValueKind.MESSAGE if is_one else inner
            case nodes.CondExpr():
                return self.kind(node.expr1) or self.kind(node.expr2)
            case nodes.Or() | nodes.And() | nodes.Add():
                return self.kind(node.left) or self.kind(node.right)
        return None

    def reads_of_parts(self, loop: nodes.For, fields: Collection[str]) -> bool:
        """Whether a loop is over the parts of a content and reads one of these fields. Other lists, such as tool calls,
        have neither type nor text."""
        if self.kind(loop.iter) is not ValueKind.CONTENT or not isinstance(loop.target, nodes.Name):
            return False
        item = loop.target.name
        asked: list[Any] = [*loop.find_all(nodes.Getattr), *loop.find_all(nodes.Getitem)]
        return any(
            isinstance(node.node, nodes.Name) and node.node.name == item and _named(node) in fields for node in asked
        )

    def compared_with_none(self) -> bool:
        for node in self._tree.find_all(nodes.Compare):
            sides = [node.expr, *(operand.expr for operand in node.ops)]
            is_none = any(isinstance(side, nodes.Const) and side.value is None for side in sides)
            if is_none and any(self.kind(side) is ValueKind.CONTENT for side in sides):
                return True
        return False

    def _of_part(self, node: nodes.Getattr | nodes.Getitem) -> ValueKind | None:
        whole = self.kind(node.node)
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            return whole
        name = _named(node)
        if isinstance(node.node, nodes.Name) and (kind := self._kinds.get(f"{node.node.name}.{name}")) is not None:
            return kind
        if whole is ValueKind.MESSAGE:
            return ValueKind.CONTENT if name == "content" else None
        if whole is ValueKind.MESSAGES and isinstance(node, nodes.Getitem):
            return ValueKind.MESSAGE
        return None

    def _look(self) -> None:
        """Find the names that are assigned something known."""
        for assign in self._tree.find_all(nodes.Assign):
            self._note(assign.target, assign.node)
        for block in self._tree.find_all(nodes.With):
            for target, value in zip(block.targets, block.values, strict=True):
                self._note(target, value)
        for loop in self._tree.find_all(nodes.For):
            if self.kind(loop.iter) is ValueKind.MESSAGES and isinstance(loop.target, nodes.Name):
                self._kinds.setdefault(loop.target.name, ValueKind.MESSAGE)
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and (macro := self._macros.get(call.node.name)) is not None:
                for parameter, value in zip(macro.args, call.args, strict=False):
                    self._note(parameter, value)
                for keyword in call.kwargs:
                    self._note(nodes.Name(keyword.key, "param"), keyword.value)

    def _note(self, target: nodes.Node, value: nodes.Node) -> None:
        match target:
            case nodes.Name():
                name = target.name
            case nodes.NSRef():
                name = f"{target.name}.{target.attr}"
            case _:
                return
        if isinstance(value, nodes.Call) and isinstance(value.node, nodes.Name) and value.node.name == "namespace":
            for keyword in value.kwargs:
                if (kind := self.kind(keyword.value)) is not None:
                    self._kinds.setdefault(f"{name}.{keyword.key}", kind)
        elif (kind := self.kind(value)) is not None:
            self._kinds.setdefault(name, kind)


def _named(node: nodes.Getattr | nodes.Getitem) -> Any:
    """The name of the attribute or item; None if it is not known."""
    return node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
