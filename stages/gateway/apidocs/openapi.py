"""The API description: OpenAPI 3.1, built from the table of routes and the types of their bodies and replies.

It describes this server: it has the model's name, the limits, and whether keys are required.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from pipeline.config.settings import LimitSettings as Caps
from pipeline.http_server.access.guard import OPEN_METHODS, OPEN_PATHS
from pipeline.http_server.apis.openai import ApiFamily
from pipeline.http_server.apis.table import FAMILIES, OPENAI
from pipeline.http_server.bodies.abort_body import MAX_ABORT_ID_CHARS
from pipeline.stages.gateway.apidocs.schemas import Schema, Schemas
from pipeline.stages.gateway.http.route import MODEL, Route
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.parsing.bodies import NAME_ENDS
from pipeline.stages.gateway.parsing.chat.tools import Tool
from pipeline.stages.gateway.parsing.sampling_fields import COUNTED
from pipeline.version import VERSION

JSON = "application/json"
TEXTS = {"/metrics": "text/plain", "/docs": "text/html"}
"""Media types of routes whose replies are not JSON."""
NO_CONTENT = ("live", "ping", "post_ping", "sleep", "wake_up")
"""Handlers whose replies have no body."""
MAY_CONFLICT = ("sleep", "wake_up")
SECURITY = "apiKey"

TAGS = {
    "Text": "Chats and completions, and their prompts without running them.",
    "Tokens": "Tokenization, and token ids in and out.",
    "Vectors": "Embeddings, scores of pairs, reranking and labels.",
    "Model": "The served model.",
    "Server": "State of the server, and operations on it.",
}

ERRORS: dict[int, str] = {
    400: "The request is invalid or not supported: `param` names the field.",
    401: "The API key is missing or invalid.",
    403: "Without API keys: the `Host` or `Origin` header is not one that this server allows.",
    404: "The model or the response does not exist.",
    408: "The body did not arrive in time.",
    409: "The server can't do this now: the message says why.",
    413: "The body is larger than `gateway.max_body_bytes`.",
    415: "The body's `Content-Type` is not JSON, or its `Content-Encoding` is not gzip or deflate.",
    417: "An `Expect` header other than 100-continue.",
    431: "A header or the request target is too large.",
    500: "The server failed to process this request.",
    503: "The server is overloaded, starting or shutting down: `Retry-After` says when to retry.",
    504: "The request timed out before its first token.",
}
_ALWAYS = (400, 401, 403, 417, 431, 500, 503)
_WITH_BODY = (408, 413, 415)
_OF_CALLS = (404, 504)
_HEADERS: dict[int, dict[str, Schema]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}},
    503: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer"}, "required": True}},
}


def document(model: str, caps: Caps, has_keys: bool, has_admin_routes: bool = True) -> dict[str, Any]:
    """The description. `has_admin_routes`: they are served here, not by the admin listener."""
    schemas = Schemas()
    for family in FAMILIES:
        schemas.of(family.error_body)
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        if has_admin_routes or not route.is_admin:
            operation = _operation(route, model, schemas, has_keys)
            paths.setdefault(route.path, {})[route.method.lower()] = operation
    tool = schemas.of(Tool)
    _narrow(schemas.components, model, caps, tool)
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Pipeline",
            "version": VERSION,
            "summary": "An inference server for large language models.",
            "description": "OpenAI's API for chats, completions and embeddings, with vLLM's additions, Anthropic's "
            "Messages API, and Ollama's API. Unknown fields are ignored, null selects the default, and the last value "
            "of a repeated field counts.",
        },
        "servers": [{"url": "/", "description": "This server."}],
        "tags": [{"name": name, "description": words} for name, words in TAGS.items()],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "responses": {_name_of(status, one): _error(status, one) for one in FAMILIES for status in ERRORS},
        },
    }
    if has_keys:
        found["security"] = [{SECURITY: []}]
        found["components"]["securitySchemes"] = {
            SECURITY: {"type": "http", "scheme": "bearer", "description": "One of the server's API keys."}
        }
    return found


def _operation(route: Route, model: str, schemas: Schemas, has_keys: bool) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler,
        "summary": route.summary,
        "tags": [route.tag],
        "parameters": _parameters(route, model),
        "responses": {"200": _success(route, schemas)} | _failures(route, has_keys),
    }
    if route.body is not None:
        schema = schemas.of(route.body)
        if route.unsupported_fields:
            schema = {"allOf": [schema, {"properties": _unsupported(route.body, route.unsupported_fields)}]}
        content: dict[str, Any] = {"schema": schema}
        if (example := example_of(route, model)) is not None:
            content["example"] = example
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    if not _needs_key(route):
        operation["security"] = []
    if not operation["parameters"]:
        del operation["parameters"]
    return operation


def _needs_key(route: Route) -> bool:
    """Whether it takes an API key, where the server has keys."""
    return route.method not in OPEN_METHODS or route.path not in OPEN_PATHS


def example_of(route: Route, model: str) -> dict[str, Any] | None:
    """The example body of a route; None if it has none."""
    if route.example is None:
        return None
    return {name: model if value == MODEL["model"] else value for name, value in route.example.items()}


def _parameters(route: Route, model: str) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    if "{model}" in route.path:
        schema: Schema = {"type": "string", "enum": [model]}
        found.append({"name": "model", "in": "path", "required": True, "schema": schema})
    if "{response_id}" in route.path:
        schema = {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$", "examples": ["resp_1"]}
        found.append({"name": "response_id", "in": "path", "required": True, "schema": schema})
    if "{chat_id}" in route.path:
        schema = {"type": "string", "maxLength": MAX_ABORT_ID_CHARS, "examples": ["chatcmpl-5e0c"]}
        found.append({"name": "chat_id", "in": "path", "required": True, "schema": schema})
    found += route.queries
    if route.opens_request:
        found.append(
            {
                "name": "X-Request-Id",
                "in": "header",
                "description": "Your own id of the request: the response repeats it, the response's id ends with it, "
                "and /abort_requests accepts it.",
                "schema": {"type": "string", "pattern": "^[!-~]{1,256}$"},
            }
        )
    return found


def _success(route: Route, schemas: Schemas) -> dict[str, Any]:
    if route.handler in NO_CONTENT:
        return {"description": route.summary}
    if route.reply is None:
        media = TEXTS.get(route.path, JSON)
        return {
            "description": route.summary,
            "content": {media: {"schema": {"type": "string"} if media != JSON else {}}},
        }
    content: dict[str, Any] = {JSON: {"schema": schemas.of(route.reply)}}
    words = route.summary
    if route.event is not None:
        if route.family.media_type != OPENAI.media_type:
            return _with_lines(route, content)
        kinds = schemas.of(route.event)
        names = " or ".join(one["$ref"].rpartition("/")[2] for one in kinds.get("anyOf", [kinds]))
        words += f" With `stream`: server-sent events, each `data: ` and a {names} as JSON. "
        if route.has_typed_events:
            words += "An `event: ` line before it has its type. "
        elif route.ends_with_done:
            words += "The last is `data: [DONE]`. "
        if route.failure_events:
            words += f"If the request fails after its first event, the last ones are {route.failure_events}."
        else:
            words += f"If the request fails after its first event, an event has a {route.family.error_body.__name__}."
        content[OPENAI.media_type] = {"schema": {"type": "string", "description": f"Events of {names}."}}
    return {"description": words, "content": content}


def _with_lines(route: Route, content: dict[str, Any]) -> dict[str, Any]:
    """A reply that may be a stream of lines of JSON."""
    name = content[JSON]["schema"]["$ref"].rpartition("/")[2]
    content[route.family.media_type] = {"schema": {"type": "string", "description": f"Lines of {name}."}}
    words = f"{route.summary} Unless `stream` is false: lines, each a {name} as JSON. If the request fails after the "
    return {"description": f"{words}first, the last line is a {route.family.error_body.__name__}.", "content": content}


def _failures(route: Route, has_keys: bool) -> dict[str, Any]:
    statuses: list[int] = [*_ALWAYS, *(_WITH_BODY if route.body is not None else ())]
    if route.method == "POST" and route.body is None:
        statuses.append(415)
    if route.opens_request or "{" in route.path:
        statuses += _OF_CALLS
    elif route.names_model:
        statuses.append(404)
    if route.handler in MAY_CONFLICT:
        statuses.append(409)
    if not has_keys or not _needs_key(route):
        statuses.remove(401)
    family = route.family
    return {str(status): {"$ref": f"#/components/responses/{_name_of(status, family)}"} for status in sorted(statuses)}


def _name_of(status: int, family: ApiFamily) -> str:
    return family.error_prefix + HTTPStatus(status).phrase.replace(" ", "").replace("-", "")


def _error(status: int, family: ApiFamily) -> dict[str, Any]:
    words, has_param = ERRORS[status], family.error_body is OPENAI.error_body
    found: dict[str, Any] = {
        "description": words if has_param else words.replace("`param`", "the message"),
        "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{family.error_body.__name__}"}}},
    }
    if status in _HEADERS:
        found["headers"] = _HEADERS[status]
    return found


def _unsupported(body: Any, fields: Mapping[str, Sequence[Any]]) -> dict[str, Schema]:
    """Unsupported fields of the API, with the values that have no effect."""
    known = body.__struct_fields__
    words = "Not supported: must be null or the value that has no effect."
    return {
        name: {"enum": [None, *values], "description": words} for name, values in fields.items() if name not in known
    }


_NUMBERS = {
    "n": "max_n",
    "best_of": "max_best_of",
    "logprobs": "max_logprobs",
    "top_logprobs": "max_logprobs",
    "prompt_logprobs": "max_logprobs",
}
_LISTS = {**COUNTED, "stop_sequences": COUNTED["stop"], "tools": "max_tools"}
"""List fields of bodies, and the settings in `limits` that bound them."""


def _narrow(components: dict[str, Schema], model: str, caps: Caps, tool: Schema) -> None:
    """Add bounds from this server's settings, and the type of tools."""
    for schema in components.values():
        is_reply = not {"id", "root", "created_at", "details", "embeddings", "content"}.isdisjoint(
            schema.get("required", ())
        )
        for name, one in schema.get("properties", {}).items():
            if name == "model" and not is_reply:
                names = _model_names(one, model)
                one.pop("type", None)
                one["enum"] = names if name in schema.get("required", ()) else [*names, None]
            for part in (one, *one.get("anyOf", ())):
                kinds = part.get("type", ())
                if name in _NUMBERS and "integer" in kinds:
                    part["maximum"] = getattr(caps, _NUMBERS[name])
                if name in _LISTS and "array" in kinds:
                    part["maxItems"] = getattr(caps, _LISTS[name])
                if name in _LISTS and "object" in kinds:
                    part["maxProperties"] = getattr(caps, _LISTS[name])
                if name == "tools" and "array" in kinds and not is_reply and "$ref" not in part.get("items", ()):
                    part["items"] = tool


def _model_names(field: Schema, model: str) -> list[str]:
    """The names of the served model in a field: some APIs have more than one (`NAME_ENDS`)."""
    ends = [end for part in (field, *field.get("anyOf", ())) for end in part.pop(NAME_ENDS, ())]
    return [model, *(model + end for end in ends)]
