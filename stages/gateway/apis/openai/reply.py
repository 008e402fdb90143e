"""Response bodies and stream events of chats and completions, in the shapes of types.py. Pure."""

import time
from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from pipeline.http_server.apis.openai import error_json
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.types import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatDeltaChoice,
    ChatReply,
    CompletionTokensDetails,
    PromptTokensDetails,
    ReplyMessage,
    TextChoice,
    TextReply,
    Usage,
)
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents, trace_write
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.timings import times_of, timings_of
from pipeline.stages.gateway.replies import reasoning_tokens
from pipeline.stages.gateway.replies.chat import ReplyReader
from pipeline.stages.gateway.replies.large_json import encode_large
from pipeline.stages.gateway.replies.request_metrics import request_metrics
from pipeline.stages.gateway.replies.token_details import (
    MAX_ENTRIES_AT_ONCE,
    TokenDetailFormatter,
    TokenDetails,
    prompt_logprobs,
)

FINISH_REASONS = {m.Finish.STOP: "stop", m.Finish.LENGTH: "length", m.Finish.ABORT: "abort"}
"""A sequence that ends with an error has none: its request fails."""

DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def usage_of(request: Request) -> Usage:
    prompt, output = request.num_prompt_tokens, request.num_output_tokens
    cached = PromptTokensDetails(request.num_cached_tokens)
    return Usage(prompt, output, prompt + output, cached, _output_details(request))


def _output_details(request: Request) -> CompletionTokensDetails | UnsetType:
    details = CompletionTokensDetails()
    if request.parsed.options.prediction:
        counts = [sequence.drafts for sequence in request.sequences if sequence.drafts is not None]
        details.accepted_prediction_tokens = sum(one.num_accepted for one in counts)
        details.rejected_prediction_tokens = sum(one.num_rejected for one in counts)
    if request.parsed.reply is not None:
        (prompt_request,) = request.prompt_requests
        if (num := reasoning_tokens.of_chat(request.formats, prompt_request)) is not None:
            details.reasoning_tokens = num
    return details if details != CompletionTokensDetails() else UNSET


def usage_so_far(prompt_request: PromptRequest, sequence: SequenceOutput, *, is_begun: bool = True) -> Usage:
    """Usage of one choice of a stream so far, without details, as in vLLM; without output in events that have none,
    although some may have arrived."""
    prompt = 0 if prompt_request.prompt_ids is None else len(prompt_request.prompt_ids)
    output = sequence.num_ids if is_begun else 0
    return Usage(prompt, output, prompt + output)


def whole(request: Request, *, is_chat: bool) -> bytes:
    """The response body of a finished request."""
    response = _chat_reply(request) if is_chat else _text_reply(request)
    begin_s = time.monotonic()
    if request.parsed.timings:
        response.timings = timings_of(times_of(request))
    body = encode_large(response)
    trace_write(request, begin_s, body)
    return body


def _chat_reply(request: Request) -> ChatReply:
    (prompt_request,) = request.prompt_requests
    choices = []
    for i, sequence in enumerate(request.choices):
        text = sequence.take_text()
        details = TokenDetailFormatter(request, prompt_request, sequence).take(text, is_packed=True)
        message, finish = ReplyMessage(text), finish_reason(sequence)
        if request.parsed.reply is not None:
            reader = ReplyReader(request, prompt_request, sequence, i)
            message = reader.message(text)
            finish = reader.finish_reason(finish)
        message.role = request.parsed.reply_role
        if request.parsed.echoed:
            message.content = request.parsed.echoed + (message.content or "")
        choices.append(ChatChoice(i, message, finish, sequence.stop_reason, details.chat_logprobs, details.token_ids))
    reply = ChatReply(request.id, "chat.completion", request.created, request.parsed.model, choices, usage_of(request))
    reply.metrics = request_metrics(request)
    reply.prompt_logprobs = prompt_logprobs(prompt_request)
    if request.parsed.details.with_ids and prompt_request.prompt_ids is not None:
        reply.prompt_token_ids = prompt_request.prompt_ids.tolist()
    return reply


def _text_reply(request: Request) -> TextReply:
    prompt_request_of = {
        id(sequence): prompt_request
        for prompt_request in request.prompt_requests
        for sequence in prompt_request.sequences
    }
    of_prompts = {prompt_request.id: prompt_logprobs(prompt_request) for prompt_request in request.prompt_requests}
    choices = []
    for i, sequence in enumerate(request.choices):
        prompt_request = prompt_request_of[id(sequence)]
        text = sequence.take_text()
        details = TokenDetailFormatter(request, prompt_request, sequence).take(text, is_packed=True)
        choice = _text_choice(i, text, details)
        choice.finish_reason, choice.stop_reason = finish_reason(sequence), sequence.stop_reason
        choice.prompt_logprobs = of_prompts[prompt_request.id]
        choices.append(choice)
    reply = TextReply(request.id, "text_completion", request.created, request.parsed.model, choices, usage_of(request))
    reply.kv_transfer_params, reply.metrics = None, request_metrics(request)
    return reply


def _text_choice(index: int, text: str, details: TokenDetails) -> TextChoice:
    choice = TextChoice(index, text, None, logprobs=details.text_logprobs)
    choice.token_ids, choice.prompt_token_ids = details.token_ids, details.prompt_token_ids
    return choice


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


def tokenized(request: Request, max_model_len: int) -> bytes:
    """The response body of /tokenize."""
    (prompt_request,) = request.prompt_requests
    assert prompt_request.prompt_ids is not None
    ids = prompt_request.prompt_ids.tolist()
    return _encoder.encode(Tokenized(len(ids), max_model_len, ids, prompt_request.token_strs))


def detokenized(request: Request) -> bytes:
    """The response body of /detokenize."""
    (prompt_request,) = request.prompt_requests
    return _encoder.encode(Detokenized(prompt_request.prompt_text or ""))


class CompletionEvents(ReplyEvents):
    """The events of one streamed response.

    chat:         role, content …    for each choice, interleaved; then usage if requested, then [DONE]
    completions:  text …             the same

    As in vLLM, the event with a choice's last text has its finish_reason.

    A failed sequence has no finish event: an error ends the stream.
    """

    def __init__(self, request: Request, *, is_chat: bool) -> None:
        super().__init__(request)
        self._is_chat = is_chat
        usage = None if request.parsed.include_usage else UNSET
        self._chunk: ChatChunk | TextReply
        if is_chat:
            self._chunk = ChatChunk(
                request.id, "chat.completion.chunk", request.created, request.parsed.model, [], usage
            )
        else:
            self._chunk = TextReply(request.id, "text_completion", request.created, request.parsed.model, [], usage)
        self._unfinished = dict(enumerate(request.sequences))
        each = [
            (prompt_request, sequence)
            for prompt_request in request.prompt_requests
            for sequence in prompt_request.sequences
        ]
        self._requests = [prompt_request for prompt_request, _ in each]
        self._formatters = [
            TokenDetailFormatter(request, prompt_request, sequence) for prompt_request, sequence in each
        ]
        self._readers = [
            None if request.parsed.reply is None else ReplyReader(request, prompt_request, sequence, i)
            for i, (prompt_request, sequence) in enumerate(each)
        ]

    @property
    def are_over(self) -> bool:
        return not self._unfinished and self._request.is_finished and self._request.failure is None

    def _first(self) -> bytes:
        if not self._is_chat:
            return b""
        parsed, ids = self._request.parsed, self._requests[0].prompt_ids
        role, echoed = ChatDelta(parsed.reply_role, ""), ChatDelta(content=parsed.echoed)
        if isinstance(self._chunk, ChatChunk):
            self._chunk.prompt_token_ids = ids.tolist() if parsed.details.with_ids and ids is not None else None
        data = b"".join(self._event(ChatDeltaChoice(i, role, None), is_begun=False) for i in self._unfinished)
        if isinstance(self._chunk, ChatChunk):
            self._chunk.prompt_token_ids = UNSET
        if parsed.echoed:
            data += b"".join(self._event(ChatDeltaChoice(i, echoed, None), is_begun=False) for i in self._unfinished)
        return data

    def _due(self) -> Iterator[bytes]:
        finished = []
        num_entries = 0
        self.has_more = False
        for i, sequence in self._unfinished.items():
            formatter, reader = self._formatters[i], self._readers[i]
            if formatter.is_waiting or (reader is not None and reader.is_waiting):
                continue
            is_over = sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
            if not (sequence.pending or is_over or formatter.has_part):
                continue  # what it has waits for its text
            num_entries += formatter.num_pending
            if formatter.has_part:
                yield self._event(self._choice(i, "", formatter.take_part()))
            if num_entries > MAX_ENTRIES_AT_ONCE:
                self.has_more = True
                break
            if reader is not None:
                yield from self._read(i, sequence, reader, formatter, is_over=is_over)
                finished += [i] if is_over else []
                continue
            text = sequence.take_text()
            if not (text or is_over):
                continue
            choice = self._choice(i, text, formatter.take(text))
            if is_over:
                choice.finish_reason, choice.stop_reason = finish_reason(sequence), sequence.stop_reason
                finished.append(i)
            yield self._event(choice)
        for i in finished:
            del self._unfinished[i]

    def _choice(self, i: int, text: str, details: TokenDetails) -> ChatDeltaChoice | TextChoice:
        """A piece of a choice."""
        if not self._is_chat:
            return _text_choice(i, text, details)
        delta = ChatDelta(content=text) if text else ChatDelta()
        return ChatDeltaChoice(i, delta, None, UNSET, details.chat_logprobs, details.token_ids)

    def _read(
        self, i: int, sequence: SequenceOutput, reader: ReplyReader, formatter: TokenDetailFormatter, *, is_over: bool
    ) -> Iterator[bytes]:
        """Events of a choice with tool calls or reasoning."""
        text = sequence.take_text()
        deltas = reader.deltas(text) if text else []
        if is_over:
            deltas = deltas + reader.rest() or [ChatDelta()]
        for index, delta in enumerate(deltas, 1):
            details = formatter.take(text)
            text = ""
            choice = ChatDeltaChoice(i, delta, None, UNSET, details.chat_logprobs, details.token_ids)
            if is_over and index == len(deltas):
                choice.finish_reason = reader.finish_reason(finish_reason(sequence))
                choice.stop_reason = sequence.stop_reason
            yield self._event(choice)

    def ended(self) -> bytes:
        parsed = self._request.parsed
        if not (parsed.include_usage or parsed.timings):
            return DONE
        chunk = msgspec.structs.replace(self._chunk, choices=[], usage=UNSET)
        if parsed.include_usage:
            chunk.usage = usage_of(self._request)
            chunk.metrics = request_metrics(self._request) or UNSET
        if parsed.timings:
            chunk.timings = timings_of(times_of(self._request))
        return framed(_encoder.encode(chunk)) + DONE

    def failed(self, error: ApiError) -> bytes:
        return error_events(error)

    def _event(self, choice: ChatDeltaChoice | TextChoice, *, is_begun: bool = True) -> bytes:
        self._chunk.choices = [choice]  # type: ignore[assignment]
        if self._request.parsed.continuous_usage:
            i = choice.index
            self._chunk.usage = usage_so_far(self._requests[i], self._request.sequences[i], is_begun=is_begun)
        return framed(_encoder.encode(self._chunk))


def error_events(error: ApiError) -> bytes:
    """The end of a failed stream. Clients raise at the error event, so [DONE] comes after it."""
    return framed(error_json(error)) + DONE


def framed(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


def finish_reason(sequence: SequenceOutput) -> str:
    return FINISH_REASONS[m.Finish(sequence.finish)]


class ChatDialect(Dialect):
    """/v1/chat/completions"""

    id_prefix = "chatcmpl-"
    is_resumable = True

    def whole(self, request: Request) -> bytes:
        return whole(request, is_chat=True)

    def events(self, request: Request) -> CompletionEvents:
        return CompletionEvents(request, is_chat=True)


class CompletionDialect(Dialect):
    """/v1/completions"""

    id_prefix = "cmpl-"
    is_resumable = True
    has_text_logprobs = True
    repeats_prompt_logprobs = True
    prompt_field = "prompt"
    has_tools = False
    logprobs_field = "logprobs"

    def whole(self, request: Request) -> bytes:
        return whole(request, is_chat=False)

    def events(self, request: Request) -> CompletionEvents:
        return CompletionEvents(request, is_chat=False)


CHAT, COMPLETION = ChatDialect(), CompletionDialect()
