"""The messages as a JSON Schema."""

import json
from typing import Any, get_type_hints

import msgspec

from pipeline.client import protocol as p
from pipeline.stages.gateway.apidocs.schemas import Schemas

REF = "#/$defs/"
JSON_TEXT = {"type": ["string", "null"], "contentMediaType": "application/json"}


def schema() -> dict[str, Any]:
    """The messages of both directions. msgspec knows the types; the names of an array's places are added here."""
    (to_server, to_client), parts = msgspec.json.schema_components(
        (p.Hello | _Generate | p.Abort | p.Credit | p.Ping | p.Bye, p.ServerMessage), ref_template=f"{REF}{{name}}"
    )
    for name, part in parts.items():
        fields, items = getattr(p, name.strip("_")).__struct_fields__, part["prefixItems"]
        for item, field in zip(items[len(items) - len(fields) :], fields, strict=True):
            item.setdefault("title", field)
        if len(items) > len(fields):
            items[0]["title"] = "kind"
    maps = Schemas(REF, {})
    parts["_Generate"]["prefixItems"][2] = {"title": "request"} | maps.of(p.Request)
    parts["_Generate"] |= {"title": "Generate", "description": p.Generate.__doc__}
    parts["Generate"] = parts.pop("_Generate")
    for name, part in maps.components.items():
        parts[name] = part
        for field, hint in get_type_hints(getattr(p, name), include_extras=True).items():
            if is_json(hint) and (schema := part["properties"].get(field)) is not None:
                part["properties"][field] = JSON_TEXT | {key: schema[key] for key in ("description",) if key in schema}
    for part in parts.values():
        if "description" in part:
            part["description"] = " ".join(part["description"].split())
        _mark_binary(part)
    to_server = _renamed(to_server)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Client wire of Pipeline, version {p.PROTOCOL_VERSION}",
        "description": "Each message is one MessagePack array. Its first place is the message's kind, the others are "
        "its fields in this order; fields with a default may be left out at the end, and further places are to be "
        "ignored. A request in it is a map of the fields that are given, and so are its parts; other keys are ignored. "
        'A string with "x-msgpack": "bin" is MessagePack bin.',
        "version": p.PROTOCOL_VERSION,
        "client_to_server": to_server,
        "server_to_client": to_client,
        "$defs": parts,
    }


class _Generate(p.Generate, frozen=True, tag="generate"):
    """Without the type of the request, which has fields of any JSON: msgspec makes no schema of those."""

    request: dict[str, Any]  # type: ignore[assignment]


def _renamed(schema: Any) -> Any:
    return json.loads(json.dumps(schema).replace(f"{REF}_Generate", f"{REF}Generate"))


def is_json(hint: Any) -> bool:
    return hint is msgspec.Raw or getattr(hint, "__origin__", None) is msgspec.Raw


def _mark_binary(part: Any) -> None:
    match part:
        case {"contentEncoding": "base64"}:
            del part["contentEncoding"]
            part["x-msgpack"] = "bin"
        case dict():
            for value in part.values():
                _mark_binary(value)
        case list():
            for value in part:
                _mark_binary(value)
