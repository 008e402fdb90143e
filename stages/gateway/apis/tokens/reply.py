"""Replies of POST /inference/v1/generate: token ids in, token ids out, in the shapes of vLLM's route.

Logprobs name tokens by their ids too, as `token_id:123`: the reply has no text. Stop strings still apply.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.client.protocol.generation import GenerationFields
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.reply import (
    DONE,
    error_events,
    finish_reason,
    framed,
    usage_of,
    usage_so_far,
)
from pipeline.stages.gateway.apis.openai.types import FinishReason, PromptLogprobs, Usage
from pipeline.stages.gateway.dialect import Dialect, ReplyEvents
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.large_json import encode_large
from pipeline.stages.gateway.replies.logprobs import ChatLogprobs
from pipeline.stages.gateway.replies.token_details import MAX_ENTRIES_AT_ONCE, TokenDetailFormatter, prompt_logprobs


class GenerateChoice(msgspec.Struct):
    index: int
    logprobs: Annotated[ChatLogprobs, Meta(description="Tokens are named token_id:123.")] | None
    finish_reason: FinishReason | None
    token_ids: list[int]


class GenerateReply(msgspec.Struct):
    """POST /inference/v1/generate"""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None
    usage: Usage


class GenerateChunk(msgspec.Struct):
    """An event of its stream."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType = UNSET


_encoder = msgspec.json.Encoder()


def generated(request: Request) -> bytes:
    """The response body of a finished request."""
    (prompt_request,) = request.prompt_requests
    choices = []
    for i, sequence in enumerate(request.choices):
        details = TokenDetailFormatter(request, prompt_request, sequence).take("", is_packed=True)
        choices.append(GenerateChoice(i, details.chat_logprobs, finish_reason(sequence), details.token_ids or []))
    return encode_large(
        GenerateReply(_name(request), choices, prompt_logprobs(prompt_request), None, usage_of(request))
    )


def _name(request: Request) -> str:
    return request.parsed.request_id or request.id


class GenerateEvents(ReplyEvents):
    """The events of one streamed response: ids as they arrive, the finish with the last of
    them; then usage if requested, then [DONE]."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        (self._prompt_request,) = request.prompt_requests
        self._unfinished = dict(enumerate(request.sequences))
        self._formatters = [
            TokenDetailFormatter(request, self._prompt_request, sequence) for sequence in request.sequences
        ]

    @property
    def are_over(self) -> bool:
        return not self._unfinished and self._request.is_finished and self._request.failure is None

    def _due(self) -> Iterator[bytes]:
        num_entries = 0
        self.has_more = False
        for i, sequence in list(self._unfinished.items()):
            formatter = self._formatters[i]
            num_entries += formatter.num_pending
            self.has_more = num_entries > MAX_ENTRIES_AT_ONCE
            if self.has_more and not formatter.has_part:
                return
            sequence.take_text()  # drop the text
            is_over = sequence.finish not in (m.Finish.NONE, m.Finish.ERROR) and not self.has_more
            details = formatter.take_part() if self.has_more else formatter.take("")
            ids = details.token_ids or []
            if not ids and not is_over:
                continue
            reason = finish_reason(sequence) if is_over else None
            chunk = GenerateChunk(_name(self._request), [GenerateChoice(i, details.chat_logprobs, reason, ids)])
            if self._request.parsed.continuous_usage:
                chunk.usage = usage_so_far(self._prompt_request, sequence)
            if is_over:
                del self._unfinished[i]
            yield framed(_encoder.encode(chunk))
            if self.has_more:
                return

    def failed(self, error: ApiError) -> bytes:
        return error_events(error)

    def ended(self) -> bytes:
        if not self._request.parsed.include_usage:
            return DONE
        chunk = GenerateChunk(_name(self._request), [], usage_of(self._request))
        return framed(_encoder.encode(chunk)) + DONE


class TokensDialect(Dialect):
    """/inference/v1/generate"""

    id_prefix = "generate-"
    is_resumable = True
    prompt_field = "token_ids"
    has_tools = False
    logprobs_field = "sampling_params.logprobs"

    def whole(self, request: Request) -> bytes:
        return generated(request)

    def events(self, request: Request) -> GenerateEvents:
        return GenerateEvents(request)

    def field(self, name: str) -> str:
        return f"sampling_params.{name}" if name in GenerationFields.__struct_fields__ else name


TOKENS = TokensDialect()
