"""JSON Schema 2020-12, as in OpenAPI 3.1, of the types of bodies and replies.

Every struct is a component. Bounds come from the types' Meta, descriptions from a field's Meta or the docstring below
it.
"""

import ast
import functools
import inspect as source
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import inspect as types

PREFIX = "#/components/schemas/"
PUBLIC_NAMES = {
    "ChatDelta": "Delta",
    "GenerateSamplingParams": "SamplingParams",
    "MessageParam": "Message",
    "ServerLoad": "Load",
    "StructuredOutputsParam": "StructuredOutputs",
    "ToolCallParam": "ToolCall",
}
"""Component names that differ from their struct's. They are public: clients that are generated from the document have
classes of these names."""
Schema = dict[str, Any]


class Schemas:
    """Collects components. `of` returns the schema of a type, by reference if it is a struct."""

    def __init__(self, prefix: str = PREFIX, public_names: Mapping[str, str] = PUBLIC_NAMES) -> None:
        """`prefix` is that of references."""
        self.components: dict[str, Schema] = {}
        self._prefix = prefix
        self._public_names = public_names
        self._names: dict[type, str] = {}

    def of(self, kind: Any) -> Schema:
        if isinstance(kind, tuple):  # one of these; msgspec has no unions of structs without tags
            return {"anyOf": [self.of(one) for one in kind]}
        return self._of(types.type_info(kind))

    def name_of(self, struct: type) -> str:
        """The component's name: its public name, or the struct's; with a number if it is not unique."""
        if struct not in self._names:
            taken = set(self._names.values())
            public = name = self._public_names.get(struct.__name__, struct.__name__)
            number = 2
            while name in taken:
                name, number = f"{public}{number}", number + 1
            self._names[struct] = name
        return self._names[struct]

    def _of(self, info: types.Type) -> Schema:
        match info:
            case types.Metadata(type=inner, extra_json_schema=more):
                return _described(self._of(inner), more or {})
            case types.StructType(cls=struct):
                return self._reference(struct, info)
            case types.UnionType(types=members):
                return self._union(members)
            case types.ListType(item_type=item, min_length=least, max_length=most):
                return {"type": "array", "items": self._of(item)} | _bounds(minItems=least, maxItems=most)
            case types.DictType(value_type=value, min_length=least, max_length=most):
                each = {} if isinstance(value, types.AnyType) else {"additionalProperties": self._of(value)}
                return {"type": "object"} | each | _bounds(minProperties=least, maxProperties=most)
            case types.LiteralType(values=values):
                return {"enum": list(values)}
            case types.EnumType(cls=enum):
                return {"enum": [member.value for member in enum]}
            case types.StrType(min_length=least, max_length=most, pattern=pattern):
                return {"type": "string"} | _bounds(minLength=least, maxLength=most, pattern=pattern)
            case types.IntType() | types.FloatType():
                numbers = _bounds(minimum=info.ge, maximum=info.le, exclusiveMinimum=info.gt, exclusiveMaximum=info.lt)
                return {"type": "integer" if isinstance(info, types.IntType) else "number"} | numbers
            case types.BoolType():
                return {"type": "boolean"}
            case types.BytesType():
                return {"type": "string", "contentEncoding": "base64"}
            case types.NoneType():
                return {"type": "null"}
            case types.AnyType() | types.RawType():
                return {}
        raise NotImplementedError(f"no schema for {info}")

    def _union(self, members: tuple[types.Type, ...]) -> Schema:
        """Merge members that differ only by their type into one schema: `"type": ["string", "null"]`."""
        found = [self._of(one) for one in members]
        if all(isinstance(one.get("type"), str) and not {"enum", "description"} & set(one) for one in found):
            merged: Schema = {}
            for one in found:
                merged |= one
            return merged | {"type": [one["type"] for one in found]}
        return {"anyOf": found}

    def _reference(self, struct: type, info: types.StructType) -> Schema:
        name = self.name_of(struct)
        if name not in self.components:
            schema = self.components[name] = {"type": "object"}  # may refer to itself
            docs = _docs_of(struct)
            if text := _first_paragraph(struct.__doc__):
                schema["description"] = text
            tag = {} if info.tag_field is None else {info.tag_field: {"enum": [info.tag]}}
            fields = {one.encode_name: self._field(one, docs.get(one.name, "")) for one in info.fields}
            schema["properties"] = tag | fields
            if required := [*tag, *(one.encode_name for one in info.fields if one.required)]:
                schema["required"] = required
        return {"$ref": self._prefix + name}

    def _field(self, field: types.Field, doc: str) -> Schema:
        schema = self._of(field.type)
        if doc:
            schema = _described(schema, {"description": doc})
        return schema


def _described(schema: Schema, more: Schema) -> Schema:
    """Add keys to a schema. A new description comes before the existing one."""
    before = schema.get("description", "")
    return (
        schema | more | ({"description": " ".join(filter(None, (more.get("description"), before)))} if before else {})
    )


def _bounds(**bounds: Any) -> Schema:
    return {name: bound for name, bound in bounds.items() if bound is not None}


def _first_paragraph(doc: str | None) -> str:
    return " ".join((doc or "").split("\n\n")[0].split())


@functools.cache
def _docs_of(struct: type) -> dict[str, str]:
    """The docstrings below fields, including inherited fields."""
    docs: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if not (issubclass(base, msgspec.Struct) and base is not msgspec.Struct):
            continue
        try:
            tree = ast.parse(source.getsource(source.getmodule(base) or base))
        except (OSError, TypeError):  # defined at run time
            continue
        bodies = [node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == base.__name__]
        for field, below in ((one, two) for body in bodies for one, two in pairwise(body)):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                text = below.value.value if isinstance(below.value, ast.Constant) else None
                if isinstance(text, str):
                    docs[field.target.id] = _first_paragraph(text)
    return docs
