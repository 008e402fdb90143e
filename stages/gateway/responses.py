"""What goes out: response bodies and the events of a stream, in OpenAI's shapes. Pure.

`stop_reason` is vLLM's addition: the stop string or id that ended a choice.
"""

import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from pipeline import messages as m
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.requests import Call, Sequence
from pipeline.stages.gateway.timings import Timings, times_of, timings_of

FINISH_REASONS = {m.Finish.STOP: "stop", m.Finish.LENGTH: "length", m.Finish.ABORT: "abort"}
"""A sequence that ends with an error has none: its call does."""

DONE = b"data: [DONE]\n\n"


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int
    """Found in the prefix cache, and not computed."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class _Message(msgspec.Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class _ChatChoice(msgspec.Struct):
    index: int
    message: _Message
    finish_reason: str
    stop_reason: str | int | None
    logprobs: None = None


class _TextChoice(msgspec.Struct):
    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


class _Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class _DeltaChoice(msgspec.Struct):
    index: int
    delta: _Delta
    finish_reason: str | None
    stop_reason: str | int | UnsetType | None = UNSET
    logprobs: None = None


class _Response(msgspec.Struct):
    """A whole response, or a chunk of a streamed one."""

    id: str
    object: str
    created: int
    model: str
    choices: list[_ChatChoice] | list[_TextChoice] | list[_DeltaChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    timings: Timings | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def usage_of(call: Call) -> Usage:
    prompt, output = call.num_prompt_tokens, call.num_output_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(call.num_cached_tokens))


def whole(call: Call) -> bytes:
    """The body of a response that is not streamed. The call has finished."""
    choices: list[_ChatChoice] | list[_TextChoice]
    if call.ask.is_chat:
        choices = [
            _ChatChoice(i, _Message(s.take_text()), _finish_reason(s), s.stop_reason)
            for i, s in enumerate(call.choices)
        ]
    else:
        choices = [_TextChoice(i, s.take_text(), _finish_reason(s), s.stop_reason) for i, s in enumerate(call.choices)]
    kind = "chat.completion" if call.ask.is_chat else "text_completion"
    response = _Response(call.id, kind, call.created, call.ask.model, choices, usage_of(call))
    begin_s = time.monotonic()
    if call.ask.timings:
        response.timings = timings_of(times_of(call))
    body = _encoder.encode(response)
    if call.trace.on:
        _trace_write(call, begin_s, body)
    return call.told("whole", body)


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class _Detokenized(msgspec.Struct):
    prompt: str


def tokenized(call: Call, max_model_len: int) -> bytes:
    """The body of a response of /tokenize. The call has finished."""
    (request,) = call.requests
    assert request.prompt_ids is not None
    ids = request.prompt_ids.tolist()
    return _encoder.encode(_Tokenized(len(ids), max_model_len, ids, request.token_strs))


def detokenized(call: Call) -> bytes:
    """The body of a response of /detokenize. The call has finished."""
    (request,) = call.requests
    return _encoder.encode(_Detokenized(request.prompt_text or ""))


def _trace_write(call: Call, begin_s: float, data: bytes) -> None:
    """Note that a part of a response was made. The last one ends the request's way through the stages."""
    requests = [request.id for request in call.requests] if call.is_finished else []
    call.trace.span("write", begin_s, time.monotonic(), {"call": call.id, "bytes": len(data)}, requests)


class Events:
    """The events of one streamed response, as they become due.

    chat:         role, content …, finish   for each choice, interleaved; then usage if it was asked for, then [DONE]
    completions:  text …, finish            likewise

    A sequence that failed has no finish, so that the events of its call are never over: an error ends them.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        kind = "chat.completion.chunk" if call.ask.is_chat else "text_completion"
        usage = None if call.ask.include_usage else UNSET
        self._chunk = _Response(call.id, kind, call.created, call.ask.model, [], usage)
        self._unfinished = dict(enumerate(call.sequences))

    @property
    def are_over(self) -> bool:
        """Whether all but `last` has been given out, and that can be."""
        return not self._unfinished and self._call.is_finished and self._call.failure is None

    def first(self) -> bytes:
        """What a stream begins with, before there is any text."""
        if not self._call.ask.is_chat:
            return b""
        role = _Delta("assistant", "")
        return self._call.told("first", b"".join(self._event(_DeltaChoice(i, role, None)) for i in self._unfinished))

    def due(self) -> bytes:
        """All that has come since the last time."""
        begin_s = time.monotonic()
        data = b"".join(self._due())
        if self._call.trace.on:
            _trace_write(self._call, begin_s, data)
        return self._call.told("due", data)

    def _due(self) -> Iterator[bytes]:
        is_chat = self._call.ask.is_chat
        finished = []
        for i, sequence in self._unfinished.items():
            if text := sequence.take_text():
                yield self._event(
                    _DeltaChoice(i, _Delta(content=text), None) if is_chat else _TextChoice(i, text, None)
                )
            if sequence.finish not in (m.Finish.NONE, m.Finish.ERROR):
                reason, stop = _finish_reason(sequence), sequence.stop_reason
                yield self._event(
                    _DeltaChoice(i, _Delta(), reason, stop) if is_chat else _TextChoice(i, "", reason, stop)
                )
                finished.append(i)
        for i in finished:
            del self._unfinished[i]

    def last(self) -> bytes:
        """How a stream ends that has gone well."""
        ask = self._call.ask
        if not (ask.include_usage or ask.timings):
            return self._call.told("last", DONE)
        chunk = msgspec.structs.replace(self._chunk, choices=[])
        if ask.include_usage:
            chunk.usage = usage_of(self._call)
        if ask.timings:
            chunk.timings = timings_of(times_of(self._call))
        return self._call.told("last", _framed(_encoder.encode(chunk)) + DONE)

    def _event(self, choice: _DeltaChoice | _TextChoice) -> bytes:
        self._chunk.choices = [choice]  # type: ignore[assignment]
        return _framed(_encoder.encode(self._chunk))


def error_events(error: ApiError) -> bytes:
    """How a stream ends that failed after it began: the client raises at the first event, so [DONE] comes after it."""
    return _framed(error.json()) + DONE


def _framed(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def _finish_reason(sequence: Sequence) -> str:
    return FINISH_REASONS[m.Finish(sequence.finish)]
