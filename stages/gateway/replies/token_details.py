"""What a reply tells of the ids of its choices, besides their text: log probabilities, and the ids themselves.

In a stream they ride on the events that carry text, or the end: an event has all ids that have come since the event
before, and text that is held back, as half a character or what may begin a stop string, comes with a later one. So the
ids of an event may reach further than its text; each is told once, in order.
"""

from typing import NamedTuple

import numpy as np
from msgspec import UNSET, UnsetType

from pipeline.runtime.logprob_records import logprob_bytes
from pipeline.stages.gateway.admission import ID_BYTES
from pipeline.stages.gateway.replies import logprobs
from pipeline.stages.gateway.replies.logprobs import ChatLogprobs, PromptLogprob, TextLogprobs
from pipeline.stages.gateway.replies.text_offsets import TextOffsets
from pipeline.stages.gateway.request import PromptRequest, Request, Sequence


class TokenDetails(NamedTuple):
    """What goes with a piece of a choice."""

    chat_logprobs: ChatLogprobs | None = None
    text_logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """With the first piece alone."""


NO_DETAILS = TokenDetails()


class TokenDetailFormatter:
    """Of one sequence."""

    def __init__(self, request: Request, prompt_request: PromptRequest, sequence: Sequence) -> None:
        self._parsed = request.parsed
        self._details = request.parsed.details
        self._prompt_request = prompt_request
        self._sequence = sequence
        self._num_sent = sequence.num_received
        """Of its ids"""
        self._is_first = True
        self._offsets: TextOffsets | None = None
        """Of a completion with log probabilities."""

    @property
    def num_pending(self) -> int:
        """Ids, those that records name among them, that the next piece would tell."""
        num_ids = self._sequence.num_ids - self._num_sent
        if self._is_first and self._details.with_echo and self._prompt_request.prompt_ids is not None:
            num_ids += len(self._prompt_request.prompt_ids)
        return 0 if self._details.num_top is None else num_ids * (1 + self._parsed.text.num_top)

    @property
    def is_waiting(self) -> bool:
        """Whether nothing can be told yet: what is repeated of the prompt has its log probabilities."""
        return self._details.with_echo and not self._prompt_request.has_prompt_records

    def take(self, text: str) -> TokenDetails:
        """What has come since the last time, which is told now together with this text."""
        details = self._details
        if details.num_top is None and not details.with_ids:
            return NO_DETAILS
        is_first, self._is_first = self._is_first, False
        begin, self._num_sent = self._num_sent, self._sequence.num_ids
        ids = _unpacked(self._sequence.ids[begin * ID_BYTES :])
        told = TokenDetails()
        if details.with_ids:
            prompt_ids = self._prompt_request.prompt_ids
            is_told = is_first and prompt_ids is not None
            told = TokenDetails(
                token_ids=ids,
                prompt_token_ids=prompt_ids.tolist() if is_told and prompt_ids is not None else UNSET,
            )
        if details.num_top is None:
            return told
        if self._parsed.is_chat or self._parsed.is_tokens_only:
            chat = logprobs.of_chat(self._lines(ids), details.num_top, names_ids=details.names_ids) if ids else None
            return told._replace(chat_logprobs=chat)
        self._offsets = self._offsets or TextOffsets()
        self._offsets.feed(text)
        return told._replace(text_logprobs=self._of_text(ids, details.num_top, self._offsets, with_prompt=is_first))

    def _of_text(self, ids: list[int], num_top: int, offsets: TextOffsets, *, with_prompt: bool) -> TextLogprobs | None:
        names_ids = self._details.names_ids
        told = TextLogprobs([], [], [], [])
        if with_prompt and self._details.with_echo and self._prompt_request.prompt_ids is not None:
            prompt_request = self._prompt_request
            first, piece = int(self._prompt_request.prompt_ids[0]), (prompt_request.pieces or [b""])[0]
            logprobs.add_first(told, first, piece, offsets, names_ids=names_ids)
            prompt = logprobs.of_text(prompt_lines(prompt_request), num_top, offsets, names_ids=names_ids)
            _append(told, prompt)
        _append(told, logprobs.of_text(self._lines(ids), num_top, offsets, names_ids=names_ids))
        return told if told.tokens else None

    def _lines(self, ids: list[int]) -> list[logprobs.Line]:
        """Of the ids that are told now; what is told is dropped."""
        sequence, num_top = self._sequence, self._parsed.text.num_top
        num_bytes = len(ids) * logprob_bytes(num_top)
        lines = list(logprobs.lines(ids, bytes(sequence.records[:num_bytes]), sequence.pieces, num_top))
        sequence.records.clear()
        sequence.pieces.clear()
        return lines


def prompt_logprobs(prompt_request: PromptRequest) -> list[dict[str, PromptLogprob] | None] | UnsetType:
    """Of a request's prompt, where they are asked for."""
    details = prompt_request.request.parsed.details
    if details.prompt_num_top is None:
        return UNSET
    return logprobs.of_prompt(prompt_lines(prompt_request), details.prompt_num_top, names_ids=details.names_ids)


def prompt_lines(prompt_request: PromptRequest) -> list[logprobs.Line]:
    ids = [] if prompt_request.prompt_ids is None else prompt_request.prompt_ids.tolist()
    num_top = prompt_request.submit.text.prompt_num_top
    return logprobs.prompt_lines(
        ids, bytes(prompt_request.prompt_records), prompt_request.pieces or [], prompt_request.prompt_pieces, num_top
    )


def _append(told: TextLogprobs, more: TextLogprobs) -> None:
    told.text_offset += more.text_offset
    told.token_logprobs += more.token_logprobs
    told.tokens += more.tokens
    told.top_logprobs += more.top_logprobs


def _unpacked(ids: bytearray) -> list[int]:
    return np.frombuffer(bytes(ids), "<i4").tolist()  # type: ignore[no-any-return]
