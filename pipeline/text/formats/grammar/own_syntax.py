"""The parameters of a tool, for grammars of formats that write arguments in a syntax of their own instead of JSON.

These grammars are made of the schema's parts. A schema that the format's syntax can't express is written as JSON,
within the format's marks: its parser reads that too, so every schema is enforced.
"""

import re
from typing import Any

import msgspec
from msgspec import Raw

from pipeline.grammars.keywords import KEYWORDS
from pipeline.text.formats.grammar.lark import LarkBuilder
from pipeline.text.formats.grammar.schema_types import DEFINITIONS, STRING_ONLY, Types, TypeTable, resolved

OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties"})
OF_TEXTS = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern"})
MAX_REFS = 16
"""References in a row that are followed"""
MAX_KEY_CHARS = 1024
"""The longest name of a parameter that parsers read."""
MAX_COUNTED_CHARS = 2**31
"""A larger `maxLength` restricts no output, and the library's patterns can't have it."""
MAX_WRITTEN_CHARS = 65536
"""The parameters of a tool may have this many characters together, or as many as the tool's schema: each is written
with all definitions."""
CLASS = re.compile(r"\\\\|\\([dDwW])")
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}
"""Character classes as JSON Schema has them. In Lark's patterns they are those of Unicode."""

ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*[\^$]")


class Parameter(msgspec.Struct, frozen=True):
    name: str
    schema: Any
    """Decoded; a reference is resolved, unless something beside it restricts the value, too."""
    text: str
    """The schema as text, with the definitions that it refers to"""
    is_required: bool
    types: Types

    @property
    def is_text(self) -> bool:
        """Whether it is always a string, so that formats write it without quotes."""
        return self.types == STRING_ONLY

    @property
    def items(self) -> "Parameter | None":
        """The items of a list without bounds; None if it is anything else."""
        if not isinstance(self.schema, dict) or (KEYWORDS & self.schema.keys()) - set(DEFINITIONS) != {"type", "items"}:
            return None
        raw = msgspec.json.decode(self.text, type=dict[str, Raw]).get("items")
        if raw is None:  # behind a reference
            return None
        return _parameter(self.name, bytes(raw).decode(), _Definitions(self.text, msgspec.json.decode(self.text)), True)


def parameters(schema: str) -> list[Parameter] | None:
    """The parameters of a tool whose arguments have this schema, or the members of an object, in its order. None if it
    is more than a list of properties."""
    root, raws = msgspec.json.decode(schema), msgspec.json.decode(schema, type=dict[str, Raw])
    keywords = (KEYWORDS & root.keys()) - set(DEFINITIONS)
    if root.get("type") != "object" or keywords - OF_OBJECTS or root.get("additionalProperties", False) is not False:
        return None
    properties, required = root.get("properties", {}), root.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or not properties.keys() >= set(required):
        return None
    if not properties and "additionalProperties" not in root:
        return None  # any arguments
    definitions = _Definitions(schema, root)
    all_required = frozenset(required) | {name for name, one in properties.items() if _is_flagged(one)}
    num_left = max(len(schema), MAX_WRITTEN_CHARS)
    found = []
    for name, raw in msgspec.json.decode(raws.get("properties", Raw(b"{}")), type=dict[str, Raw]).items():
        one = None
        if len(name) <= MAX_KEY_CHARS:
            one = _parameter(name, bytes(raw).decode(), definitions, name in all_required)
        if one is None or (num_left := num_left - len(one.text)) < 0:
            return None
        found.append(one)
    return found


def _is_flagged(schema: Any) -> bool:
    """Whether a property has draft 3's `required: true`."""
    return isinstance(schema, dict) and schema.get("required") is True


class _Definitions:
    """The definitions in a schema, given as text and decoded."""

    def __init__(self, text: str, root: Any) -> None:
        members = msgspec.json.decode(text, type=dict[str, Raw])
        self.root = root
        self.text = "".join(f'"{key}": {bytes(members[key]).decode()}, ' for key in DEFINITIONS if key in members)
        """As members of an object: `"$defs": {…}, `"""
        self.are_local = _refers_only_to_definitions(self.text)
        self.types = TypeTable(root)


def _parameter(name: str, text: str, definitions: _Definitions, is_required: bool) -> Parameter | None:
    """A part of a schema; None if it can't stand alone."""
    schema = _target(msgspec.json.decode(text), definitions.root)
    written = _with(text, definitions)
    if written is None or schema is None:
        return None
    return Parameter(name, schema, written, is_required, definitions.types.types_of(schema))


def _target(schema: Any, root: Any) -> Any:
    """The schema that references lead to, as far as nothing beside them restricts the value; None if there is none."""
    for _ in range(MAX_REFS):
        if not isinstance(schema, dict) or (KEYWORDS & schema.keys()) - set(DEFINITIONS) != {"$ref"}:
            break
        schema = resolved(schema["$ref"], root) if isinstance(schema["$ref"], str) else None
    return schema


def text_body(schema: Any) -> str | None:
    """A regular expression of the texts that match a string's schema; None if there is none."""
    keywords = KEYWORDS & schema.keys()
    if keywords - OF_TEXTS or ({"enum", "const"} & keywords and keywords - {"enum", "const", "type"}):
        return None
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " | ".join(map(_literal, values)) if values and all(isinstance(one, str) for one in values) else None
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not isinstance(most, int | None):
        return None
    if most is not None and most >= MAX_COUNTED_CHARS:
        most = None
    sized = r"/(?s:.*)/" if not least and most is None else f"/(?s:.{{{least},{'' if most is None else most}}})/"
    if "pattern" not in schema:
        return sized
    matched = _pattern(schema["pattern"])
    return None if matched is None else f"{sized} & {matched}"


def json_text(lark: LarkBuilder, parameter: Parameter) -> str:
    """JSON that matches a parameter's schema."""
    return lark.part(parameter.text)


def listed(lark: LarkBuilder, members: list[tuple[str, bool]], comma: str) -> str:
    """Members in order, with commas between them; each is an expression, and whether it is required. A rule for each
    place in the list says what may follow there, with and without a member before."""
    first, later = '""', '""'
    for body, is_required in reversed(members):
        one = lark.rule(body)
        first, later = (
            lark.rule(f"{one} {later}" if is_required else f"{one} {later} | {first}"),
            lark.rule(f"{comma} {one} {later}" if is_required else f"{comma} {one} {later} | {later}"),
        )
    return first


def _pattern(pattern: Any) -> str | None:
    """A whole text with a match of an ECMA pattern."""
    if not isinstance(pattern, str):
        return None
    begins, inner = pattern.startswith("^"), pattern.removeprefix("^")
    ends = re.search(r"(?<!\\)(?:\\\\)*\$$", inner) is not None
    inner = inner[:-1] if ends else inner
    if ANCHOR.search(inner.replace("[^", "[")):
        return None
    ascii_only = CLASS.sub(lambda found: found[0] if found[1] is None else CLASSES[found[1]], inner)
    slashed = re.sub(r"(?<!\\)/", r"\\/", ascii_only).replace("\n", r"\n")
    before, behind = ("" if begins else "(?s:.*)"), ("" if ends else "(?s:.*)")
    return f"/{before}(?:{slashed}){behind}/"


def _literal(text: str) -> str:
    return msgspec.json.encode(text).decode()


_REF = re.compile(r'"\$(?:ref|dynamicRef|recursiveRef)"\s*:\s*"([^"]*)"')


def _refers_only_to_definitions(text: str) -> bool:
    return all(ref.startswith(("#/$defs/", "#/definitions/")) for ref in _REF.findall(text))


def _with(text: str, definitions: _Definitions) -> str | None:
    """A part of a schema with the definitions that it refers to; None if it refers to anything else."""
    if _REF.search(text) is None:
        return text
    is_local = definitions.are_local and _refers_only_to_definitions(text)
    if not is_local or any(f'"{key}"' in text for key in DEFINITIONS):
        return None
    return f"{{{definitions.text}{text[1:].lstrip()}"
