"""Cases for the bodies of all routes: every field, with long texts, numbers, lists and objects in its place."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

import msgspec
from msgspec import inspect as types

from pipeline.config.settings import ChatSettings
from pipeline.http_server.apis.openai import error_json
from pipeline.http_server.bodies.abort_body import AbortBody, ControlBody
from pipeline.http_server.bodies.json_depth import check_depth, check_large
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.runtime.model.pooler import Classifier, Pooler, Task
from pipeline.stages.gateway.admin.adapters import load_bodies, unload_bodies
from pipeline.stages.gateway.apis.anthropic.parsing import parse_count_tokens, parse_messages
from pipeline.stages.gateway.apis.cohere.parsing import parse_embed
from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from pipeline.stages.gateway.apis.infill.parsing import parse_infill
from pipeline.stages.gateway.apis.ollama import parsing as ollama
from pipeline.stages.gateway.apis.openai.invocations import parse_invocation
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from pipeline.stages.gateway.apis.pooling.parsing import parse_classify, parse_pooling
from pipeline.stages.gateway.apis.responses.body import renamed
from pipeline.stages.gateway.apis.responses.parsing import StoredSize, parse_response
from pipeline.stages.gateway.apis.scoring.parsing import parse_rerank, parse_score
from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from tools.scaling_meter.case import Case, Make
from tools.scaling_meter.texts import STRINGS, VALUES, Grow

THREAD_MS = 1000.0
"""The longest that other large bodies wait"""
MAX_LEVELS = 3
"""Fields within fields within fields"""
WRONG = ("digits", "exponent", "lists", "deep lists", "equal keys")
"""What fields hold that take something else"""
FILLS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
LIMITS = RequestLimits(
    model="m",
    max_sequences=1024,
    max_prompt_tokens=131072,
    vocab_size=150_000,
    hidden_size=8,
    tasks=get_args(Task),
    pooler=Pooler(pooling="cls", width=2, classifier=Classifier(labels=["a", "b"], activation="softmax")),
    formats=ChatFormats.of(
        "{{ tools }}",
        ChatSettings(tool_call_parser="qwen3_coder", reasoning_parser="qwen3"),
        [AddedToken(i, text, special=True) for i, text in enumerate(("<tool_call>", "</tool_call>", *FILLS))],
    ),
)

Parse = Callable[[bytes, RequestLimits], object]


class _NoStoredResponses:
    """No stored responses. Cases with some are in stored.py."""

    is_on = True
    why_off = ""

    def size(self, response_id: str) -> StoredSize:
        raise ApiError(404, response_id[:10])

    def conversation(self, response_id: str) -> list[Any]:
        raise ApiError(404, response_id[:10])

    def item(self, param: str, item_id: str) -> Any:
        raise ApiError(404, item_id[:10], param)

    def check_size(self, param: str, num_bytes: int) -> None:
        pass


def _of_response(body: bytes, limits: RequestLimits) -> object:
    return parse_response(body, limits, _NoStoredResponses(), "seed")


def _decoded(decoder: "msgspec.json.Decoder[Any]") -> Parse:
    return lambda body, limits: decode(decoder, body, {})


CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
PARSERS: Mapping[str, tuple[Parse, dict[str, Any]]] = {
    "/v1/chat/completions": (parse_chat, CHAT),
    "/v1/completions": (parse_completion, {"model": "m", "prompt": "a"}),
    "/v1/responses": (_of_response, {"model": "m", "input": "a"}),
    "/v1/embeddings": (parse_embeddings, {"model": "m", "input": "a"}),
    "/v2/embed": (parse_embed, {"model": "m", "texts": ["a"]}),
    "/score": (parse_score, {"model": "m", "text_1": "a", "text_2": ["b"]}),
    "/rerank": (parse_rerank, {"model": "m", "query": "a", "documents": ["b"]}),
    "/classify": (parse_classify, {"model": "m", "input": "a"}),
    "/pooling": (parse_pooling, {"model": "m", "input": "a"}),
    "/v1/messages": (parse_messages, CHAT | {"max_tokens": 1}),
    "/v1/messages/count_tokens": (parse_count_tokens, CHAT),
    "/inference/v1/generate": (parse_tokens_only, {"model": "m", "token_ids": [1], "sampling_params": {}}),
    "/invocations": (parse_invocation, CHAT),
    "/infill": (parse_infill, {"input_prefix": "a", "input_suffix": "b"}),
    "/tokenize": (parse_tokenize, {"model": "m", "prompt": "a"}),
    "/detokenize": (parse_detokenize, {"model": "m", "tokens": [1]}),
    "/abort_requests": (_decoded(msgspec.json.Decoder(AbortBody)), {"request_ids": []}),
    "/v1/chat/completions/control": (
        _decoded(msgspec.json.Decoder(ControlBody)),
        {"id": "a", "action": "reasoning_end"},
    ),
    "/v1/load_lora_adapter": (_decoded(load_bodies), {"lora_name": "a", "lora_path": "/a"}),
    "/v1/unload_lora_adapter": (_decoded(unload_bodies), {"lora_name": "a"}),
    "/api/chat": (ollama.parse_chat, CHAT),
    "/api/generate": (ollama.parse_generate, {"model": "m", "prompt": "a"}),
    "/api/embed": (ollama.parse_embed, {"model": "m", "input": "a"}),
    "/api/embeddings": (ollama.parse_embeddings, {"model": "m", "prompt": "a"}),
    "/api/show": (ollama.read_show, {"model": "m"}),
}
"""The parser of each route that takes a body, and a body that it takes"""
SAME: Mapping[str, str] = {
    "/v1/chat/completions/render": "/v1/chat/completions",
    "/v1/completions/render": "/v1/completions",
    "/v1/chat/completions/{chat_id}/control": "/v1/chat/completions/control",
    "/v1/embed": "/v2/embed",
    "/v1/score": "/score",
    "/v1/rerank": "/rerank",
    "/v2/rerank": "/rerank",
}
"""Routes that read their body as another one does"""

EXTRA: Mapping[str, Mapping[str, Grow]] = {
    "/api/chat": {
        "results of calls": lambda n: _pairs(n, {"role": "tool", "content": "a", "tool_name": "g"}),
        "results by id": lambda n: _pairs(n, {"role": "tool", "content": "a", "tool_call_id": "b"}),
    },
    "/v1/chat/completions": {
        "tools": lambda n: _with_tools(n // 40, "{}"),
        "required tools": lambda n: _with_tools(128, json.dumps("a" * (n // 128)), choice="required"),
        "equal fields": lambda n: '{"model": "m", ' + ", ".join(['"logit_bias": {"1": "a"}'] * (n // 25)) + "}",
    },
    "/v1/responses": {
        "a namespace that is allowed many times": lambda n: a_namespace(n // 74),
    },
}
"""Whole bodies, for relations between several fields"""


def cases() -> Iterator[Case]:
    paths = {route.path: route.body for route in ROUTES if route.body is not None}
    for path, (parse, base) in PARSERS.items():
        for name, grown in _fields(paths[path]):
            yield _case(path, name, functools.partial(_make, parse, base, grown))
        for name, whole in EXTRA.get(path, {}).items():
            yield _case(path, name, functools.partial(_make_whole, parse, whole))


def _case(path: str, name: str, make: Make) -> Case:
    return Case(path, name, make, bound_ms=THREAD_MS, loop_n=LARGE_BYTES)


def _make(parse: Parse, base: dict[str, Any], grown: "tuple[str, Grow]", n: int) -> Callable[[], object]:
    field, grow = grown
    others = json.dumps({name: value for name, value in base.items() if name != field})
    body = f"{others[:-1]}{', ' if len(others) > 2 else ''}{json.dumps(field)}: {grow(n)}}}".encode()
    return lambda: refused(parse, body)


def _make_whole(parse: Parse, whole: Grow, n: int) -> Callable[[], object]:
    body = whole(n).encode()
    return lambda: refused(parse, body)


def refused(parse: Parse, body: bytes) -> None:
    """Parse a body as the gateway does. An error names the field in the words of each API."""
    try:
        check = check_large if len(body) > LARGE_BYTES else check_depth
        check(body, LIMITS.caps.max_json_depth)
        parse(body, LIMITS)
    except ApiError as error:
        assert 400 <= error.status < 500
        error_json(renamed(error))


# ------------------------------------------------------------------------------------------------------------- fields


def _fields(kind: Any) -> Iterator[tuple[str, tuple[str, Grow]]]:
    """A name, a field of the body and its text by size, for everything that the body may be."""
    info = types.type_info(kind)
    yield from ((f"unknown {name}", ("unknown", grow)) for name, grow in VALUES.items())
    if not isinstance(info, types.StructType):
        return
    for field in info.fields:
        for name, grow in _grown(field.type, 1):
            yield f"{field.encode_name}{name}", (field.encode_name, grow)


def _grown(kind: types.Type, level: int) -> Iterator[tuple[str, Grow]]:
    """What a field of this type may hold, and some of what it may not."""
    if level == 1:
        yield from ((f": {name}", VALUES[name]) for name in WRONG)
    for one in _alternatives(kind):
        match one:
            case types.StrType() | types.LiteralType():
                yield from ((f": {name}", grow) for name, grow in STRINGS.items())
            case types.IntType() | types.FloatType():
                yield from ((f": {name}", VALUES[name]) for name in ("digits", "decimals", "exponent"))
            case types.ListType(item_type):
                yield "[]", _many(_least(item_type))
                yield from ((f"[]{name}", _wrapped("[", grow, "]")) for name, grow in _grown(item_type, level + 1))
            case types.DictType():
                yield from ((f": {name}", VALUES[name]) for name in ("keys", "long keys", "equal keys"))
            case types.StructType() if level < MAX_LEVELS:
                for field in one.fields:
                    begin = _begun(one, field.encode_name)
                    for name, grow in _grown(field.type, level + 1):
                        yield f".{field.encode_name}{name}", _wrapped(begin, grow, "}")
            case types.RawType() | types.AnyType():
                yield from ((f": {name}", grow) for name, grow in VALUES.items())


def _begun(struct: types.StructType, field: str) -> str:
    """The JSON of a struct up to the value of one of its fields."""
    others = {} if struct.tag is None else {str(struct.tag_field): struct.tag}
    least = json.loads(_least(struct))
    text = json.dumps({**others, **{name: value for name, value in least.items() if name != field}})
    return f"{text[:-1]}{', ' if len(text) > 2 else ''}{json.dumps(field)}: "


def _wrapped(begin: str, grow: Grow, end: str) -> Grow:
    return lambda n: f"{begin}{grow(n)}{end}"


def _many(item: str) -> Grow:
    return lambda n: f"[{', '.join([item] * max(n // (len(item) + 2), 1))}]"


def _least(kind: types.Type) -> str:
    """The shortest JSON of a type."""
    match _alternatives(kind)[0]:
        case types.StrType():
            return '"a"'
        case types.LiteralType(values):
            return json.dumps(values[0])
        case types.BoolType():
            return "true"
        case types.IntType() | types.FloatType():
            return "1"
        case types.ListType():
            return "[]"
        case types.StructType() as struct:
            parts = {field.encode_name: _least(field.type) for field in struct.fields if field.required}
            if struct.tag is not None:
                parts = {str(struct.tag_field): json.dumps(struct.tag)} | parts
            if "role" in parts:
                parts["role"] = '"user"'
            return f"{{{', '.join(f'{json.dumps(name)}: {text}' for name, text in parts.items())}}}"
    return "{}"


def _alternatives(kind: types.Type) -> list[types.Type]:
    if isinstance(kind, types.Metadata):
        return _alternatives(kind.type)
    if isinstance(kind, types.UnionType):
        return [one for each in kind.types for one in _alternatives(each)]
    return [kind]


# ------------------------------------------------------------------------------------------------------------- bodies


def _pairs(n: int, result: dict[str, Any]) -> str:
    """Many calls in one message, then a result for each."""
    num = n // 120
    calls = [{"function": {"name": "f"}, "id": f"c{i}"} for i in range(num)]
    messages = [{"role": "assistant", "tool_calls": calls}, *[result] * num]
    return json.dumps({"model": "m", "messages": messages})


def _with_tools(num: int, description: str, choice: str = "auto") -> str:
    tool = '{"type": "function", "function": {"name": "f%d", "description": ' + description.replace("%", "%%") + "}}"
    tools = ", ".join(tool % i for i in range(num))
    return f'{json.dumps(CHAT)[:-1]}, "tools": [{tools}], "tool_choice": "{choice}"}}'


def a_namespace(num: int) -> str:
    """A body of /v1/responses with as many functions in a namespace as times that it is allowed."""
    tools = [{"type": "namespace", "name": "a", "tools": [{"type": "function", "name": f"f{i}"} for i in range(num)]}]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "a"}] * num}
    return json.dumps({"model": "m", "input": "a", "tools": tools, "tool_choice": choice})
