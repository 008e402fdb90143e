"""What goes out: response bodies and the events of a stream, in the shapes of reply_types.py. Pure."""

import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET

from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.replies.chat import ReplyReader
from pipeline.stages.gateway.replies.token_details import NOTHING, IdTeller, Told, prompt_logprobs
from pipeline.stages.gateway.replies.types import (
    ChatChoice,
    ChatChunk,
    ChatDeltaChoice,
    ChatReply,
    Delta,
    PromptTokensDetails,
    ReplyMessage,
    TextChoice,
    TextReply,
    Usage,
)
from pipeline.stages.gateway.requests import Call, Request, Sequence
from pipeline.stages.gateway.timings import times_of, timings_of

FINISH_REASONS = {m.Finish.STOP: "stop", m.Finish.LENGTH: "length", m.Finish.ABORT: "abort"}
"""A sequence that ends with an error has none: its call does."""

DONE = b"data: [DONE]\n\n"


MAX_TOLD_AT_ONCE = 20_000
"""Ids, of which log probabilities are told, after which `Events.due` leaves further choices to the next time: 50 ms."""

_encoder = msgspec.json.Encoder()


def usage_of(call: Call) -> Usage:
    prompt, output = call.num_prompt_tokens, call.num_output_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(call.num_cached_tokens))


def usage_so_far(request: Request, sequence: Sequence) -> Usage:
    """Of one choice of a stream, as far as it has come."""
    prompt, output = 0 if request.prompt_ids is None else len(request.prompt_ids), sequence.num_ids
    return Usage(prompt, output, prompt + output, PromptTokensDetails(request.num_cached))


def whole(call: Call) -> bytes:
    """The body of a response that is not streamed. The call has finished."""
    response = _chat_reply(call) if call.ask.is_chat else _text_reply(call)
    begin_s = time.monotonic()
    if call.ask.timings:
        response.timings = timings_of(times_of(call))
    body = _encoder.encode(response)
    if call.trace.on:
        _trace_write(call, begin_s, body)
    return body


def _chat_reply(call: Call) -> ChatReply:
    (request,) = call.requests
    choices = []
    for i, sequence in enumerate(call.choices):
        text = sequence.take_text()
        told = IdTeller(call, request, sequence).take(text)
        message, finish = ReplyMessage(text), finish_reason(sequence)
        if call.ask.reply is not None:
            reader = ReplyReader(call, request, i)
            message = reader.message(text)
            finish = reader.finish_reason(finish)
        choices.append(ChatChoice(i, message, finish, sequence.stop_reason, told.chat_logprobs, told.token_ids))
    reply = ChatReply(call.id, "chat.completion", call.created, call.ask.model, choices, usage_of(call))
    reply.prompt_logprobs = prompt_logprobs(request)
    if call.ask.details.with_ids and request.prompt_ids is not None:
        reply.prompt_token_ids = request.prompt_ids.tolist()
    return reply


def _text_reply(call: Call) -> TextReply:
    whose = {id(sequence): request for request in call.requests for sequence in request.sequences}
    of_prompts = {request.id: prompt_logprobs(request) for request in call.requests}
    choices = []
    for i, sequence in enumerate(call.choices):
        request = whose[id(sequence)]
        text = sequence.take_text()
        told = IdTeller(call, request, sequence).take(text)
        choice = _text_choice(i, text, told)
        choice.finish_reason, choice.stop_reason = finish_reason(sequence), sequence.stop_reason
        choice.prompt_logprobs = of_prompts[request.id]
        choices.append(choice)
    return TextReply(call.id, "text_completion", call.created, call.ask.model, choices, usage_of(call))


def _text_choice(index: int, text: str, told: Told) -> TextChoice:
    choice = TextChoice(index, text, None, logprobs=told.text_logprobs)
    choice.token_ids, choice.prompt_token_ids = told.token_ids, told.prompt_token_ids
    return choice


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


def tokenized(call: Call, max_model_len: int) -> bytes:
    """The body of a response of /tokenize. The call has finished."""
    (request,) = call.requests
    assert request.prompt_ids is not None
    ids = request.prompt_ids.tolist()
    return _encoder.encode(Tokenized(len(ids), max_model_len, ids, request.token_strs))


def detokenized(call: Call) -> bytes:
    """The body of a response of /detokenize. The call has finished."""
    (request,) = call.requests
    return _encoder.encode(Detokenized(request.prompt_text or ""))


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
        usage = None if call.ask.include_usage else UNSET
        self._chunk: ChatChunk | TextReply
        if call.ask.is_chat:
            self._chunk = ChatChunk(call.id, "chat.completion.chunk", call.created, call.ask.model, [], usage)
        else:
            self._chunk = TextReply(call.id, "text_completion", call.created, call.ask.model, [], usage)
        self._unfinished = dict(enumerate(call.sequences))
        self.has_more = False
        """`due` has left something, so that others are served in between."""
        each = [(request, sequence) for request in call.requests for sequence in request.sequences]
        self._requests = [request for request, _ in each]
        self._tellers = [IdTeller(call, request, sequence) for request, sequence in each]
        self._readers = [
            None if call.ask.reply is None else ReplyReader(call, request, i)
            for i, request in enumerate(self._requests)
        ]

    @property
    def are_over(self) -> bool:
        """Whether all but `last` has been given out, and that can be."""
        return not self._unfinished and self._call.is_finished and self._call.failure is None

    def first(self) -> bytes:
        """What a stream begins with, before there is any text."""
        if not self._call.ask.is_chat:
            return b""
        role = Delta("assistant", "")
        ids = self._requests[0].prompt_ids
        if self._call.ask.details.with_ids and ids is not None and isinstance(self._chunk, ChatChunk):
            self._chunk.prompt_token_ids = ids.tolist()
        data = b"".join(self._event(ChatDeltaChoice(i, role, None)) for i in self._unfinished)
        if isinstance(self._chunk, ChatChunk):
            self._chunk.prompt_token_ids = UNSET
        return self._call.told("first", data)

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
        num_told = 0
        self.has_more = False
        for i, sequence in self._unfinished.items():
            teller = self._tellers[i]
            if teller.is_waiting:
                continue
            if num_told > MAX_TOLD_AT_ONCE:
                self.has_more = True
                break
            num_told += teller.num_untold
            is_over = sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
            if (reader := self._readers[i]) is not None:
                if not reader.is_waiting:
                    yield from self._read(i, sequence, reader, teller, is_over=is_over)
                    finished += [i] if is_over else []
                continue
            told = NOTHING
            if text := sequence.take_text():
                told = teller.take(text)
                yield self._event(
                    ChatDeltaChoice(i, Delta(content=text), None, UNSET, told.chat_logprobs, told.token_ids)
                    if is_chat
                    else _text_choice(i, text, told)
                )
            if is_over:
                told = teller.take("")
                reason, stop = finish_reason(sequence), sequence.stop_reason
                choice: ChatDeltaChoice | TextChoice
                if is_chat:
                    choice = ChatDeltaChoice(i, Delta(), reason, stop, told.chat_logprobs, told.token_ids)
                else:
                    choice = _text_choice(i, "", told)
                    choice.finish_reason, choice.stop_reason = reason, stop
                yield self._event(choice)
                finished.append(i)
        for i in finished:
            del self._unfinished[i]

    def _read(
        self, i: int, sequence: Sequence, reader: ReplyReader, teller: IdTeller, *, is_over: bool
    ) -> Iterator[bytes]:
        """The same of a choice in which calls or reasoning are looked for."""
        text = sequence.take_text()
        deltas = reader.deltas(text) if text else []
        if is_over:
            deltas += reader.rest()
        for delta in deltas:
            told = teller.take(text)
            text = ""
            yield self._event(ChatDeltaChoice(i, delta, None, UNSET, told.chat_logprobs, told.token_ids))
        if is_over:
            told = teller.take(text)
            reason = reader.finish_reason(finish_reason(sequence))
            yield self._event(
                ChatDeltaChoice(i, Delta(), reason, sequence.stop_reason, told.chat_logprobs, told.token_ids)
            )

    def last(self) -> bytes:
        """How a stream ends that has gone well."""
        ask = self._call.ask
        if not (ask.include_usage or ask.timings):
            return self._call.told("last", DONE)
        chunk = msgspec.structs.replace(self._chunk, choices=[], usage=UNSET)
        if ask.include_usage:
            chunk.usage = usage_of(self._call)
        if ask.timings:
            chunk.timings = timings_of(times_of(self._call))
        return self._call.told("last", framed(_encoder.encode(chunk)) + DONE)

    def _event(self, choice: ChatDeltaChoice | TextChoice) -> bytes:
        self._chunk.choices = [choice]  # type: ignore[assignment]
        if self._call.ask.continuous_usage:
            i = choice.index
            self._chunk.usage = usage_so_far(self._requests[i], self._call.sequences[i])
        return framed(_encoder.encode(self._chunk))


def error_events(error: ApiError) -> bytes:
    """How a stream ends that failed after it began: the client raises at the first event, so [DONE] comes after it."""
    return framed(error.json()) + DONE


def framed(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def finish_reason(sequence: Sequence) -> str:
    return FINISH_REASONS[m.Finish(sequence.finish)]
