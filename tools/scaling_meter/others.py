"""Cases for everything else: headers, resume points, chat templates, stop strings, and what ingest does with a chat."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from tokenizers import AddedToken as TokenizerToken
from tokenizers import Tokenizer, models

from pipeline.client import protocol as p
from pipeline.deploy.proxy.resumable_stream import ResumableStream
from pipeline.http_server import request_ids
from pipeline.http_server.access.origins import _ABSOLUTE, _JSON
from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import PREFIX, RESUME
from pipeline.runtime.security.api_keys import bearer
from pipeline.stages.detokenize.stop_matcher import StopMatcher, StopStrings
from pipeline.stages.gateway.apis.ollama.fields import OllamaFields
from pipeline.stages.gateway.apis.ollama.names import renamed as ollama_renamed
from pipeline.stages.gateway.apis.openai.parsing import parse_completion
from pipeline.stages.gateway.apis.responses.body import renamed
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.resumption import num_point_bytes, with_resume_points
from pipeline.stages.gateway.replies.text_offsets import TextOffsets
from pipeline.stages.gateway.zmq import errors as zmq_errors
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, ReceivedMessage, parse_generate
from pipeline.stages.ingest.prompts.content_specials import ContentSpecials
from pipeline.stages.ingest.templates import conversation
from pipeline.stages.ingest.templates.budget import STEPS_PER_S, Budget, OutOfTime
from pipeline.stages.ingest.templates.conversation import BadChat
from pipeline.stages.ingest.templates.template import ChatTemplate, TemplateFailure, TextTooLong
from pipeline.stages.ingest.templates.tools_as_text import with_tools_as_text
from pipeline.text.formats.chat_formats import TOOL_FORMATS
from pipeline.text.formats.reasoning import FORMATS as REASONING_FORMATS
from pipeline.text.formats.tool_format import shows_tools
from tools.scaling_meter.bodies import LIMITS
from tools.scaling_meter.case import MAX_BODY, Case
from tools.scaling_meter.texts import PIECES, Grow, repeated

MAX_HEADER = 8190
MAX_TEMPLATE = 1024**2
START_MS = 5000.0
"""At the start, no request waits."""
THREAD_MS = 1000.0
"""In a thread, or with a budget of its own"""
SPECIALS = [f"<|reserved_special_token_{i}|>" for i in range(250)] + ["<|im_start|>", "<|im_end|>", "<s>"]

Work = Callable[[str], object]


def cases() -> Iterator[Case]:
    for name, work in HEADERS.items():
        for piece in (*PIECES, "bearer ", ":", "://", "a/"):
            yield _of_text(f"header {name}", repr(piece), work, repeated(piece), MAX_HEADER)
    for name, grow in TEMPLATES.items():
        yield _of_text("chat template", f"formats: {name}", _formats, grow, MAX_TEMPLATE, START_MS)
    for name, points in POINTS.items():
        yield Case("resume points", name, functools.partial(_points, points), MAX_BODY, THREAD_MS)
    for name, stream in STREAMS.items():
        yield Case("ingress stream", name, functools.partial(_relayed, stream), MAX_BODY, THREAD_MS)
    for name, grow in MESSAGES.items():
        yield _of_text("error", f"names of fields: {name}", _renamed, grow, 65536)
    for name, (stops, piece) in STOPS.items():
        yield Case("stop strings", name, functools.partial(_stops, stops, piece), 512 * 1024, THREAD_MS)
    for name, grow in OFFSETS.items():
        yield Case("text offsets", name, functools.partial(_offsets, grow), 64 * 1024, THREAD_MS)
    for name, grow in CONTENTS.items():
        yield _of_text("ingest special tokens", name, _masked, grow, MAX_BODY, THREAD_MS)
    for name, chat in CHATS.items():
        yield Case("ingest chat", name, functools.partial(_chat, chat), MAX_BODY // 4, THREAD_MS)
    for name, source in SOURCES.items():
        yield Case("ingest template", name, functools.partial(_rendered, source), MAX_BODY // 4, THREAD_MS * 3)
    for name, data in ZMQ.items():
        yield Case("ZeroMQ message", name, functools.partial(_zmq, data), MAX_BODY, 2 * THREAD_MS)
    for name, value in MALFORMED.items():
        for kind, head in (("behind", msgspec.msgpack.encode(_generate())), ("instead", b"")):
            yield Case("ZeroMQ message", f"{name} {kind}", functools.partial(_malformed, head, value), MAX_BODY)


def _of_text(group: str, name: str, work: Work, grow: Grow, max_n: int, bound_ms: float = 50.0) -> Case:
    def make(n: int) -> Callable[[], object]:
        text = grow(n)
        return lambda: work(text)

    return Case(group, name, make, max_n, bound_ms)


def _refused(work: Callable[[], object]) -> None:
    try:
        work()
    except ApiError as error:
        assert 400 <= error.status < 500


# ------------------------------------------------------------------------------------------------------------ gateway

HEADERS: Mapping[str, Work] = {
    "Authorization": lambda text: bearer([text, f"Bearer {text}"]),
    "Origin": lambda text: (_ABSOLUTE.match(text), _JSON.fullmatch(text)),
    "X-Request-Id": lambda text: _refused(lambda: request_ids.of_headers({"X-Request-Id": text})),
    RESUME: lambda text: _refused(lambda: num_point_bytes({RESUME: text})),
}

HEAD = PREFIX + b'{"id":"cmpl-1","created":1,"arrival_s":1.0,"seed":1,"salt":1,"prompt":"0123456789abcdef"}\n'
MAX_IDS = 1 << 30
POINTS: Mapping[str, Callable[[int], bytes]] = {
    "lines": lambda n: HEAD + (PREFIX + b"0 1 0 AQAAAA==\n") * (n // 24),
    "a line": lambda n: HEAD + PREFIX + b"0 1 0 " + b"AAAA" * (n // 4),
    "digits": lambda n: HEAD + PREFIX + b"1" * n,
    "a head": lambda n: PREFIX + b'{"id":"' + b"a" * n + b'","created":' + b"1" * 100 + b"}",
    "a long number": lambda n: PREFIX + b'{"id":"a","created":' + b"1" * n + b"}",
    "line breaks": lambda n: HEAD + b"\n" * n,
}


def _points(grow: Callable[[int], bytes], n: int) -> Callable[[], object]:
    parsed = parse_completion(b'{"model": "m", "prompt": "a", "stream": true}', LIMITS)
    data = grow(n)
    return lambda: _refused(lambda: with_resume_points(parsed, data, 2.0, MAX_IDS))


STREAMS: Mapping[str, Callable[[int], bytes]] = {
    "events without a point": lambda n: b'data: {"text":"aaaaaaaaaaaaaaaa"}\n\n' * (n // 36),
    "an event": lambda n: b"data: " + b"a" * n,
    "a point": lambda n: PREFIX + b"a" * n,
    "points": lambda n: (b"data: a\n\n" + PREFIX + b"0 1 0 AQAAAA==\n\n") * (n // 34),
    "line breaks": lambda n: b"\n" * n,
}
PIECE = 64
"""Bytes that arrive at once"""


def _relayed(grow: Callable[[int], bytes], n: int) -> Callable[[], object]:
    data = grow(n)

    def work() -> None:
        stream = ResumableStream()
        for begin in range(0, len(data), PIECE):
            stream.feed(data[begin : begin + PIECE])

    return work


OLLAMA = OllamaFields(route="chat", model="m")
MESSAGES: Mapping[str, Grow] = {repr(piece): repeated(piece) for piece in ("a", "'", "'a", "'a ", "'messages[0].", " ")}


def _renamed(text: str) -> None:
    error = invalid("messages", text)
    renamed(error)
    ollama_renamed(error, OLLAMA)


STOPS: Mapping[str, tuple[Callable[[int], list[str]], str]] = {
    "equal beginnings": (lambda n: ["a" * 255 + chr(98 + i) for i in range(16)], "a"),
    "nearly": (lambda n: ["ab" * 127 + "c"], "ab"),
    "long strings": (lambda n: ["a" * 256], "aaab"),
}


def _stops(stops: Callable[[int], list[str]], piece: str, n: int) -> Callable[[], object]:
    tokens = [piece] * (n // len(piece))

    def work() -> None:
        matcher = StopMatcher(StopStrings(stops(n)), include_stop=False)
        for token in tokens:
            if matcher.found is None:
                matcher.push(token)
        matcher.finish()

    return work


OFFSETS: Mapping[str, Grow] = {repr(piece): repeated(piece) for piece in ("a", "é", "<a>", "[", "\ufffd", " ")}


def _offsets(grow: Grow, n: int) -> Callable[[], object]:
    text = grow(n)
    pieces = [text[at : at + 3].encode() for at in range(0, n, 3)]

    def work() -> None:
        for is_first in (True, False):
            offsets = TextOffsets()
            if is_first:
                offsets.feed(text)
            for piece in pieces:
                offsets.offset_of(piece)
            offsets.feed(text)

    return work


USER = p.MessageParam("user", "a")


def _generate(received: list[bytes] | None = None, **fields: Any) -> p.Generate:
    asked = fields if "messages" in fields else {"prompt": "a"} | fields
    return p.Generate(1, p.Request(model="m", **asked), 1, received or [])


def _calls(n: int) -> p.MessageParam:
    return p.MessageParam("assistant", tool_calls=[p.ToolCallParam(p.FunctionCall("f", "{}"), "a")] * (n // 37))


ZMQ: Mapping[str, Callable[[int], p.Generate]] = {
    "text": lambda n: _generate(prompt="<" * n),
    "messages": lambda n: _generate(messages=[USER] * (n // 24)),
    "tools": lambda n: _generate(messages=[USER], tools=p.json_text("[" + "{}," * (n // 3) + "{}]")),
    "kwargs": lambda n: _generate(messages=[USER], chat_template_kwargs=p.json_text('{"a":' * 60 + "1" * n + "}" * 60)),
    "calls": lambda n: _generate(messages=[_calls(n)]),
    "documents": lambda n: _generate(messages=[USER], documents=p.json_text("[" + "{}," * (n // 3) + "{}]")),
    "schema": lambda n: _generate(
        structured_outputs=p.StructuredOutputsParam(json=p.json_text('{"a":[' + "{}," * (n // 3) + "{}]}"))
    ),
    "stop": lambda n: _generate(stop=["a"] * (n // 2)),
    "stop_token_ids": lambda n: _generate(stop_token_ids=[1] * n),
    "logit_bias": lambda n: _generate(logit_bias={str(i): 1.0 for i in range(n // 16)}),
    "bad_words": lambda n: _generate(bad_words=["a"] * (n // 2)),
    "allowed_token_ids": lambda n: _generate(allowed_token_ids=[1] * n),
    "logprob_token_ids": lambda n: _generate(logprob_token_ids=[1] * n),
    "received": lambda n: _generate(received=[b""] * (n // 2)),
}
MALFORMED: Mapping[str, bytes] = {"maps": b"\x80", "lists": b"\x90", "extensions": b"\xd4\x05a", "nil": b"\xc0"}
"""Values of unknown fields, or in place of a message."""


def _zmq(message: Callable[[int], p.Generate], n: int) -> Callable[[], object]:
    return _decoded(msgspec.msgpack.encode(message(n)))


def _malformed(head: bytes, value: bytes, n: int) -> Callable[[], object]:
    num = n // len(value)
    num_fields = num + (head[0] & 15 if head else 0)  # it is a fixarray
    return _decoded(b"\xdd" + num_fields.to_bytes(4, "big") + head[1:] + value * num)


def _decoded(data: bytes) -> Callable[[], object]:
    decoder = msgspec.msgpack.Decoder(ReceivedMessage)

    def work() -> None:
        try:
            decoded = decoder.decode(data)
        except msgspec.DecodeError as error:
            zmq_errors.of_malformed(data, error)
            return
        assert isinstance(decoded, ReceivedGenerate)
        _refused(lambda: parse_generate(decoded, LIMITS))

    return work


# ---------------------------------------------------------------------------------------------------- chat templates

TEMPLATES: Mapping[str, Grow] = {
    name: repeated(name)
    for name in ("{%", "{{", "{%{{", "{%'", '{{"', "set ", "set tools ", "{%%}", "tools ", "{", " ")
} | {"set and spaces": repeated(" ", "{% set")}


def _formats(template: str) -> None:
    shows_tools(template)
    for form in TOOL_FORMATS:
        form.detects(template)
    for reasoning in REASONING_FORMATS:
        reasoning.detects(template)


# -------------------------------------------------------------------------------------------------------------- ingest

CONTENTS: Mapping[str, Grow] = {repr(piece): repeated(piece) for piece in PIECES} | {
    "marks": repeated("<|im_end|>"),
    "half marks": repeated("<|im_end"),
    "beginnings": repeated("<|reserved_special_token_"),
}


@functools.cache
def _specials() -> ContentSpecials:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([TokenizerToken(text, special=True) for text in SPECIALS])
    return ContentSpecials(tokenizer)


def _masked(text: str) -> None:
    part = {"type": "text", "text": text[: len(text) // 4]}
    _specials().masked({"messages": [{"role": "user", "content": text}, {"role": "user", "content": [part] * 3}]})


CHATS: Mapping[str, Callable[[int], list[m.ChatMessage]]] = {
    "other roles": lambda n: [m.ChatMessage("ipython", "a")] * (n // 40),
    "many other roles": lambda n: [m.ChatMessage(f"usr{i}", "a") for i in range(n // 40)],
    "results": lambda n: [m.ChatMessage("tool", "a" * 20)] * (n // 60),
    "developers": lambda n: [m.ChatMessage("developer", "a" * 20)] * (n // 60),
    "calls": lambda n: [
        m.ChatMessage("assistant", None, tool_calls=[m.ToolCall("a", "f", '{"a": 1}')] * (n // 60)),
    ],
    "parts": lambda n: [m.ChatMessage("user", "a\n" * (n // 20), parts=["a"] * (n // 20))],
    "names": lambda n: [m.ChatMessage("user", "a", name="a" * (n // 4), tool_call_id="b" * (n // 4))] * 2,
}


@functools.cache
def _template(source: str) -> ChatTemplate:
    return ChatTemplate(source)


def _chat(chat: Callable[[int], list[m.ChatMessage]], n: int) -> Callable[[], object]:
    prompt = m.ChatPrompt(chat(n))
    template = _template(SOURCES["roles"])

    def work() -> None:
        try:
            plain = with_tools_as_text(prompt, takes_system=True)
            conversation.variables(plain, template.traits)
            conversation.check_roles(prompt, template.source)
            if (marked := conversation.with_marks(prompt)) is not None:
                text = "".join(f"{one.role} {one.content} " for one in marked.messages)
                conversation.check_marks(text, marked)
        except BadChat:
            pass

    return work


SOURCES: Mapping[str, str] = {
    "roles": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
    "percent": "{% for message in messages %}{{ message.content % 1 }}{% endfor %}",
    "methods": "{% for message in messages %}{{ message.content.strip().split('<')[0].replace('a', 'b') }}{% endfor %}",
    "filters": "{% for message in messages %}{{ message.content | trim | upper | tojson | length }}{% endfor %}",
    "sums": "{% set ns = namespace(t='') %}{% for c in messages[0].content %}{% set ns.t = ns.t + c %}{% endfor %}",
}


def _rendered(source: str, n: int) -> Callable[[], object]:
    template = _template(source)
    text = "%(a" * (n // 3)
    variables = conversation.variables(m.ChatPrompt([m.ChatMessage("user", text)]), template.traits)

    def work() -> None:
        with contextlib.suppress(TemplateFailure, TextTooLong, OutOfTime):
            template.render(variables, max_chars=MAX_BODY, budget=Budget(2 * STEPS_PER_S + n), now_s=0.0)

    return work
