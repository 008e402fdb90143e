"""Replies of Ollama's API, complete and as lines of JSON. Pure.

A stream has one JSON object per line: pieces of the text, the reasoning, complete tool calls, then an object with
`done` and the figures. A failed request ends with {"error": …}.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from pipeline.http_server.apis.ollama import MEDIA_TYPE, error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.anthropic.reply import MessageReader, object_or_empty
from pipeline.stages.gateway.apis.ollama.fields import OllamaFields
from pipeline.stages.gateway.apis.ollama.names import renamed
from pipeline.stages.gateway.apis.ollama.types import (
    OllamaChatReply,
    OllamaEmbeddingsReply,
    OllamaEmbedReply,
    OllamaFunction,
    OllamaGenerateReply,
    OllamaReplyMessage,
    OllamaToolCall,
)
from pipeline.stages.gateway.apis.openai.reply import finish_reason
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents, trace_write
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.timings import times_of
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.replies.large_json import PackedList, encode_large
from pipeline.stages.gateway.replies.logprobs import TokenLogprob
from pipeline.stages.gateway.replies.pooled import vector_of
from pipeline.stages.gateway.replies.token_details import TokenDetailFormatter, TokenDetails
from pipeline.text.formats.parsing.events import Arguments, CallBegun, CallEnded, Content, Event, Reasoning

_encoder = msgspec.json.Encoder()
PREFILL, FIRST_TOKEN = 4, 5
"""Indexes of the stamps in `SequenceTimings` at which the prefill starts and ends."""


class Piece(msgspec.Struct):
    """A part of a reply: one of the three."""

    content: str = ""
    thinking: str = ""
    call: OllamaToolCall | None = None


class PieceReader:
    """Reads the output of a request as pieces. A tool call is one piece; a call that the reply ends within is none."""

    def __init__(self, request: Request) -> None:
        self._reader = MessageReader(request)
        self._name = ""
        self._arguments: list[str] = []

    @property
    def is_waiting(self) -> bool:
        """As in `ReplyReader`."""
        return self._reader.is_waiting

    def pieces(self, text: str, *, is_over: bool) -> list[Piece]:
        """The pieces of new text, and of the end."""
        events = self._reader.events(text)
        if is_over:
            events += self._reader.rest()
        return list(self._pieces(events))

    def _pieces(self, events: Iterable[Event]) -> Iterator[Piece]:
        for event in events:
            match event:
                case Content(text):
                    if text:
                        yield Piece(content=text)
                case Reasoning(text):
                    if text:
                        yield Piece(thinking=text)
                case CallBegun(_, name):
                    self._name, self._arguments = name, []
                case Arguments(_, text):
                    self._arguments.append(text)
                case CallEnded(index):
                    arguments = object_or_empty("".join(self._arguments))
                    function = OllamaFunction(index, self._name, arguments)
                    yield Piece(call=OllamaToolCall(self._reader.plain_call_id(index), function))
                case _:
                    assert_never(event)


def whole(request: Request) -> bytes:
    """The response body of a finished request. Raises ApiError if an input has no embedding."""
    reply_fields = reply_fields_of(request.parsed)
    if reply_fields.route in ("embed", "embeddings"):
        return _embedded(request, reply_fields)
    (sequence,) = request.sequences
    text = sequence.take_text()
    pieces = PieceReader(request).pieces(text, is_over=True)
    begin_s = time.monotonic()
    reply = _object(request, pieces)
    _finish(reply, request)
    reply.logprobs = _content(_formatter(request).take(text, is_packed=True))
    body = encode_large(reply)
    trace_write(request, begin_s, body)
    return body


def loaded(reply_fields: OllamaFields) -> bytes:
    """The response body of a request without a prompt."""
    if reply_fields.route == "embed":
        return _encoder.encode(OllamaEmbedReply(reply_fields.model, [], 0, 0, 0))
    if reply_fields.route == "embeddings":
        return _encoder.encode(OllamaEmbeddingsReply([]))
    fields: dict[str, Any] = {
        "model": reply_fields.model,
        "created_at": rfc3339(int(time.time())),
        "done": True,
        "done_reason": "unload" if reply_fields.unloads else "load",
    }
    if reply_fields.route == "chat":
        return _encoder.encode(OllamaChatReply(message=OllamaReplyMessage(), **fields))
    return _encoder.encode(OllamaGenerateReply(**fields))


class OllamaLines(ReplyEvents):
    """The lines of one streamed response."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        (self._sequence,) = request.sequences
        self._reader = PieceReader(request)
        self._formatter = _formatter(request)
        self._is_over = False

    @property
    def are_over(self) -> bool:
        return self._is_over and self._request.is_finished and self._request.failure is None

    def _due(self) -> Iterator[bytes]:
        if self._is_over or self._reader.is_waiting:
            return
        self.has_more = self._formatter.has_part
        if self.has_more:
            reply = _object(self._request, [])
            reply.logprobs = _content(self._formatter.take_part())
            yield _line(reply)
            return
        self._is_over = self._sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
        text = self._sequence.take_text()
        for piece in self._reader.pieces(text, is_over=self._is_over):
            reply = _object(self._request, [piece])
            reply.logprobs = _logprobs(self._formatter, text)
            text = ""
            yield _line(reply)

    def ended(self) -> bytes:
        reply = _object(self._request, [])
        _finish(reply, self._request)
        reply.logprobs = _logprobs(self._formatter, "")
        return _line(reply)

    def failed(self, error: ApiError) -> bytes:
        return error_json(renamed(error, reply_fields_of(self._request.parsed))) + b"\n"


def rfc3339(unix_s: float) -> str:
    """A time in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _line(reply: OllamaChatReply | OllamaGenerateReply) -> bytes:
    return _encoder.encode(reply) + b"\n"


def _object(request: Request, pieces: list[Piece]) -> OllamaChatReply | OllamaGenerateReply:
    """An object with these pieces, without figures."""
    reply_fields = reply_fields_of(request.parsed)
    content = "".join(piece.content for piece in pieces)
    thinking = "".join(piece.thinking for piece in pieces) or UNSET
    created_at = rfc3339(request.created)
    if reply_fields.route == "generate":
        return OllamaGenerateReply(
            model=reply_fields.model, created_at=created_at, response=content, thinking=thinking, done=False
        )
    calls = [piece.call for piece in pieces if piece.call is not None]
    message = OllamaReplyMessage(content=content, thinking=thinking, tool_calls=calls or UNSET)
    return OllamaChatReply(model=reply_fields.model, created_at=created_at, message=message, done=False)


def _finish(reply: OllamaChatReply | OllamaGenerateReply, request: Request) -> None:
    """Add the end and the figures of a finished request."""
    (sequence,) = request.sequences
    (times,) = times_of(request).sequences
    stamps_s = times.stamps_s
    reply.done, reply.done_reason = True, finish_reason(sequence)
    reply.total_duration = _ns(stamps_s[-1] - stamps_s[0])
    reply.load_duration = 0
    reply.prompt_eval_count = request.num_prompt_tokens
    reply.prompt_eval_duration = _ns(stamps_s[FIRST_TOKEN] - stamps_s[PREFILL])
    reply.eval_count = request.num_output_tokens
    reply.eval_duration = _ns(stamps_s[-1] - stamps_s[FIRST_TOKEN])


def _embedded(request: Request, reply_fields: OllamaFields) -> bytes:
    options = request.parsed.embedding
    assert options is not None
    each = (vector_of(sequence, options).tolist() for sequence in request.sequences)
    if reply_fields.route == "embeddings":
        return _encoder.encode(OllamaEmbeddingsReply(next(each)))
    vectors: Any = PackedList(map(_encoder.encode, each))
    total_s = max(one.stamps_s[-1] - one.stamps_s[0] for one in times_of(request).sequences)
    return encode_large(OllamaEmbedReply(reply_fields.model, vectors, _ns(total_s), 0, request.num_prompt_tokens))


def _formatter(request: Request) -> TokenDetailFormatter:
    (prompt_request,), (sequence,) = request.prompt_requests, request.sequences
    return TokenDetailFormatter(request, prompt_request, sequence)


def _logprobs(formatter: TokenDetailFormatter, text: str) -> list[TokenLogprob] | UnsetType:
    """The logprobs of the ids that have arrived since the last call."""
    return _content(formatter.take(text))


def _content(details: TokenDetails) -> list[TokenLogprob] | UnsetType:
    return UNSET if details.chat_logprobs is None else details.chat_logprobs.content


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


@dataclass(frozen=True)
class OllamaDialect(Dialect):
    """The routes below /api"""

    reply_fields: OllamaFields
    id_prefix: str

    media_type = MEDIA_TYPE
    keep_alive = b" "  # before the next line of JSON, whose readers skip it

    def whole(self, request: Request) -> bytes:
        return whole(request)

    def events(self, request: Request) -> OllamaLines:
        return OllamaLines(request)


def reply_fields_of(parsed: ParsedRequest) -> OllamaFields:
    """What a request of this API asks for besides its output."""
    assert isinstance(parsed.dialect, OllamaDialect)
    return parsed.dialect.reply_fields
