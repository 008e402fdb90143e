"""Token details of a reply's choices: logprobs and token ids.

In a stream they are added to the events with text, or with the end: an event has all ids that have arrived since the
previous one. Text that is held back, such as half a character or the start of a stop string, comes with a later event,
so the ids of an event may be ahead of its text. Each id is sent once, in order.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np

from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.gateway.admission.admission import ID_BYTES
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies import logprobs
from pipeline.stages.gateway.replies.large_json import PackedList
from pipeline.stages.gateway.replies.logprobs import ChatLogprobs, TextLogprobs
from pipeline.stages.gateway.replies.text_offsets import TextOffsets

MAX_ENTRIES_AT_ONCE = 1024
"""Log probabilities, of ids and of their top ids, that are formatted in one turn of the event loop: 2 to 4 ms, and
about 64 KiB of JSON, which a slow client keeps besides what admission counts."""


class TokenDetails(NamedTuple):
    """Details for one piece of a choice."""

    chat_logprobs: ChatLogprobs | None = None
    text_logprobs: TextLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    """With the first piece only."""


NO_DETAILS = TokenDetails()


class TokenDetailFormatter:
    """Formats the token details of one sequence."""

    def __init__(self, request: Request, prompt_request: PromptRequest, sequence: SequenceOutput) -> None:
        self._parsed = request.parsed
        self._options = request.parsed.details
        self._prompt_request = prompt_request
        self._sequence = sequence
        self._num_sent = sequence.num_received
        """Ids whose details were returned."""
        self._num_prompt_sent = 0
        """The same for an echoed prompt."""
        self._is_first = True
        self._offsets: TextOffsets | None = None
        """For completions with logprobs."""
        self._num_ahead = 0
        """Characters that they have seen, and that were not taken."""
        self._hidden_ids: frozenset[int] = frozenset()
        """Special tokens that are left out of their text."""

    @property
    def num_pending(self) -> int:
        """Log probabilities that the next piece would have, with those of top ids."""
        if self._options.num_top is None:
            return 0
        return (self._num_prompt_left + self._sequence.num_ids - self._num_sent) * self._num_each

    @property
    def has_part(self) -> bool:
        """Whether these are too many for one turn of the event loop: `take_part` comes before `take`."""
        return self.num_pending > MAX_ENTRIES_AT_ONCE

    @property
    def _num_each(self) -> int:
        """Log probabilities of one id."""
        return 1 + self._parsed.options.num_logprobs

    @property
    def _num_prompt_left(self) -> int:
        """Ids of an echoed prompt whose details were not returned."""
        if not self._options.with_echo or self._prompt_request.prompt_ids is None:
            return 0
        return 1 + self._prompt_request.num_known_prompt_logprobs - self._num_prompt_sent

    @property
    def is_waiting(self) -> bool:
        """Whether it must wait for prompt logprobs, which come before the output."""
        return self._options.with_echo and not self._prompt_request.has_all_prompt_logprobs

    def take_part(self) -> TokenDetails:
        """The first of these details, to send without text. The text that has arrived stays where it is."""
        if self._parsed.dialect.has_text_logprobs:
            text = "".join(self._sequence.pending)
            self._feed(text)
            self._num_ahead = len(text)
        return self._take(max(1, MAX_ENTRIES_AT_ONCE // self._num_each), is_packed=False)

    def take(self, text: str, *, is_packed: bool = False) -> TokenDetails:
        """Details of the ids that have arrived since the last call, to send with this text. `is_packed`: for
        `encode_large`, which takes less memory than objects."""
        if self._options.num_top is not None and self._parsed.dialect.has_text_logprobs:
            self._feed(text)
        return self._take(self._num_prompt_left + self._sequence.num_ids, is_packed=is_packed)

    def _take(self, most: int, *, is_packed: bool) -> TokenDetails:
        """Of at most this many ids."""
        options = self._options
        if options.num_top is None and not options.with_ids:
            return NO_DETAILS
        is_first, self._is_first = self._is_first, False
        num_prompt = 0 if options.num_top is None else min(most, self._num_prompt_left)
        begin, end = self._num_sent, min(self._sequence.num_ids, self._num_sent + most - num_prompt)
        self._num_sent = end
        ids = _unpacked(self._sequence.ids[begin * ID_BYTES : end * ID_BYTES])
        details = TokenDetails()
        if options.with_ids:
            prompt_ids = self._prompt_request.prompt_ids
            has_prompt_ids = is_first and prompt_ids is not None
            details = TokenDetails(
                token_ids=ids,
                prompt_token_ids=prompt_ids.tolist() if has_prompt_ids and prompt_ids is not None else None,
            )
        if options.num_top is None:
            return details
        if not self._parsed.dialect.has_text_logprobs:
            num_top, each = self._parsed.options.num_logprobs, self._decode_logprobs(ids)
            if self._parsed.options.logprob_token_ids:
                num_top, each = 1 + num_top, map(logprobs.with_sampled, each)
            of_chat = logprobs.packed_of_chat if is_packed else logprobs.of_chat
            return details._replace(chat_logprobs=of_chat(each, num_top, names_ids=options.names_ids) if ids else None)
        return details._replace(text_logprobs=self._of_text(ids, options.num_top, num_prompt, is_packed=is_packed))

    def _feed(self, text: str) -> None:
        """The offsets see this text, whose first characters they may have seen before."""
        if self._offsets is None:
            self._offsets = TextOffsets()
            if self._parsed.options.skip_special_tokens:
                self._hidden_ids = self._prompt_request.request.formats.special_ids
        self._offsets.feed(text[self._num_ahead :])
        self._num_ahead = 0

    def _of_text(self, ids: list[int], num_top: int, num_prompt: int, *, is_packed: bool) -> TextLogprobs | None:
        names_ids, offsets = self._options.names_ids, self._offsets
        assert offsets is not None
        details = TextLogprobs([], [], [], [])
        if num_prompt and self._prompt_request.prompt_ids is not None:
            prompt_request = self._prompt_request
            begin, end = self._num_prompt_sent, self._num_prompt_sent + num_prompt
            self._num_prompt_sent = end
            if not begin:
                first, piece = int(self._prompt_request.prompt_ids[0]), (prompt_request.pieces or [b""])[0]
                logprobs.add_first(details, first, piece, offsets, names_ids=names_ids)
            each = decode_prompt_logprobs(prompt_request, max(0, begin - 1), end - 1)
            prompt = logprobs.of_text(each, num_top, offsets, names_ids=names_ids, is_packed=is_packed)
            _append(details, prompt)
        num_logprobs, token_outputs = self._parsed.options.num_logprobs, self._decode_logprobs(ids)
        output = logprobs.of_text(
            token_outputs, num_logprobs, offsets, names_ids=names_ids, is_packed=is_packed, hidden_ids=self._hidden_ids
        )
        _append(details, output)
        if is_packed:
            entries = _popped(cast("list[bytes | None]", details.top_logprobs))
            details.top_logprobs = cast("Any", PackedList(one or b"null" for one in entries))
        return details if details.tokens else None

    def _decode_logprobs(self, ids: list[int]) -> Iterator[logprobs.DecodedLogprobs]:
        """Decode the token outputs of these ids, and drop them from the sequence. Call it once."""
        sequence, num_top = self._sequence, self._parsed.options.num_logprobs
        num_bytes, num_pieces = len(ids) * logprob_bytes(num_top), len(ids) * (1 + num_top)
        token_outputs, pieces = bytes(sequence.token_outputs[:num_bytes]), sequence.pieces[:num_pieces]
        del sequence.token_outputs[:num_bytes], sequence.pieces[:num_pieces]
        return logprobs.decode_logprobs(ids, token_outputs, pieces, num_top)


def prompt_logprobs(prompt_request: PromptRequest) -> Any:
    """The prompt_logprobs of a prompt request, for `encode_large`; None if they were not requested."""
    details = prompt_request.request.parsed.details
    if details.prompt_num_top is None:
        return None
    return logprobs.of_prompt(
        decode_prompt_logprobs(prompt_request), details.prompt_num_top, names_ids=details.names_ids
    )


def decode_prompt_logprobs(
    prompt_request: PromptRequest, begin: int = 0, end: int | None = None
) -> Iterator[logprobs.DecodedLogprobs]:
    """Those with these indices: the first is the second id's."""
    num_top = prompt_request.submit.options.num_prompt_logprobs
    end = prompt_request.num_known_prompt_logprobs if end is None else end
    width, ids = logprob_bytes(max(0, num_top)), prompt_request.prompt_ids
    return logprobs.decode_prompt_logprobs(
        [] if ids is None else ids[begin : end + 1].tolist(),
        bytes(prompt_request.prompt_logprobs[begin * width : end * width]),
        (prompt_request.pieces or [])[begin : end + 1],
        prompt_request.prompt_pieces[begin * num_top : end * num_top],
        num_top,
    )


def _append(details: TextLogprobs, more: TextLogprobs) -> None:
    details.text_offset += more.text_offset
    details.token_logprobs += more.token_logprobs
    details.tokens += more.tokens
    details.top_logprobs += more.top_logprobs


def _popped(entries: list[bytes | None]) -> Iterator[bytes | None]:
    """These entries, which are not kept."""
    entries.reverse()
    while entries:
        yield entries.pop()


def _unpacked(ids: bytearray) -> list[int]:
    return np.frombuffer(bytes(ids), "<i4").tolist()  # type: ignore[no-any-return]
