"""Resume points in a stream, and the continuation of a stream behind its last one. See
pipeline/runtime/resume_points.py for their form.

A point names the ids from which all events before it were made. Whatever a stream's events keep, such as half a tool
call or an open block, is a function of these ids' text. So a stream is continued by making the events of that text
again, and dropping them.
"""

import binascii
from http import HTTPStatus
from typing import Protocol

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import PREFIX, RESUME
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.open_requests.prompt_request import ID_BYTES, SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import Resumption
from pipeline.stages.gateway.parsing.resumption import ResumePointHead, digest_of

OFF = PREFIX + b"off\n\n"


class ResumePoints:
    """Writes the points of one stream."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._num_ids = [sequence.num_received for sequence in request.sequences]
        """Ids of each sequence that points have named."""
        resumption = request.parsed.resumption
        self._has_ended = [False] * len(self._num_ids) if resumption is None else list(resumption.has_ended)
        self._has_head = resumption is not None
        self._is_off = False

    def after(self, data: bytes, *, has_more: bool) -> bytes:
        """The point behind `data`, events of all output so far unless the events have more. Nothing without events."""
        if not data or has_more or self._is_off:
            return b""
        if self._request.prompt_requests[0].prompt_ids is None:  # aborted before it was tokenized
            self._is_off = True
            return OFF
        lines = [] if self._has_head else [self._head()]
        self._has_head = True
        for i, sequence in enumerate(self._request.sequences):
            begin, end = self._num_ids[i] * ID_BYTES, len(sequence.ids)
            has_ended = sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
            if sequence.finish == m.Finish.ABORT:  # its ids don't say that it has ended
                self._is_off = True
                return OFF
            if end == begin and has_ended == self._has_ended[i]:
                continue
            ids = binascii.b2a_base64(sequence.ids[begin:], newline=False)
            lines.append(PREFIX + b"%d %d %d %b\n" % (i, sequence.num_chars, has_ended, ids))
            self._num_ids[i], self._has_ended[i] = sequence.num_ids, has_ended
        return b"".join(lines) + b"\n" if lines else b""

    def _head(self) -> bytes:
        request = self._request
        (prompt_request,) = request.prompt_requests
        assert prompt_request.prompt_ids is not None, "the headers were sent before the prompt was tokenized"
        submit = prompt_request.submit
        head = ResumePointHead(
            request.id, request.created, submit.arrival_s, submit.options.seed, request.salt,
            digest_of(prompt_request.prompt_ids),
        )  # fmt: skip
        return PREFIX + msgspec.json.encode(head) + b"\n"

    @staticmethod
    def failed(error: ApiError) -> bytes:
        """Announces the error events."""
        return PREFIX + f"failed {error.code or 'error'}\n\n".encode()


class StreamEvents(Protocol):
    has_more: bool

    def first(self) -> bytes: ...

    def due(self) -> bytes: ...


class _Hidden(msgspec.Struct):
    """What a sequence has besides the output that the client has."""

    text: str
    ids: bytes
    token_outputs: bytes
    pieces: list[bytes]
    finish: int


class Continuation:
    """Brings the events of a stream to its last point, in two halves, with the events' own calls between: a replay
    repeats all three."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._hidden: list[_Hidden] = []

    @property
    def is_decided(self) -> bool:
        """Whether the text that the client has is here, or it is clear that it doesn't come."""
        return self._wrong is not None or all(map(_is_here, *self._claims))

    @property
    def _claims(self) -> "tuple[list[SequenceOutput], list[int], list[bool]]":
        """The sequences, and what the client says that it has of each: characters, and whether it has ended."""
        return self._request.sequences, self._resumption.num_chars, self._resumption.has_ended

    @property
    def _wrong(self) -> int | None:
        """The first sequence that has other output than the client says."""
        return next((i for i, claim in enumerate(zip(*self._claims, strict=True)) if _is_wrong(*claim)), None)

    @property
    def _resumption(self) -> Resumption:
        assert self._request.parsed.resumption is not None
        return self._request.parsed.resumption

    def check_prompt(self) -> None:
        """Raises ApiError if it can't be continued exactly: the prompt has other ids. A request that was aborted before
        its prompt was tokenized has none."""
        (prompt_request,) = self._request.prompt_requests
        if prompt_request.prompt_ids is not None and digest_of(prompt_request.prompt_ids) != self._resumption.prompt:
            message = f"'{RESUME}': the prompt has other ids than that of the stream, so it can't be continued"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, RESUME, "prompt_changed")

    def check_text(self) -> None:
        """Raises ApiError if the points don't describe the text of their ids."""
        if (index := self._wrong) is not None:
            sequences, nums_chars, have_ended = self._claims
            sequence, num_chars, end = (
                sequences[index],
                nums_chars[index],
                " and has ended" if have_ended[index] else "",
            )
            message = (
                f"'{RESUME}': at its last point, sequence {index} has {num_chars} characters{end}, but its token ids "
                f"give {sequence.num_chars} characters{' and do not end it' if end else ''}"
            )
            raise invalid(RESUME, message, "invalid_value")

    def run(self, events: StreamEvents) -> None:
        """All of it."""
        self.begin()
        events.first()
        events.due()
        while events.has_more:
            events.due()
        self.end()

    def begin(self) -> None:
        """Hide what the client does not have."""
        self._request.log_output("rewind", b"")
        resumption = self._resumption
        for sequence, num_chars, has_ended in zip(
            self._request.sequences, resumption.num_chars, resumption.has_ended, strict=True
        ):
            self._hidden.append(_hide(sequence, num_chars, has_ended=has_ended))

    def end(self) -> None:
        """Show it."""
        self._request.log_output("rewound", b"")
        for sequence, hidden in zip(self._request.sequences, self._hidden, strict=True):
            sequence.pending = [hidden.text] if hidden.text else []
            sequence.ids += hidden.ids
            sequence.token_outputs[:] = hidden.token_outputs
            sequence.pieces[:] = hidden.pieces
            sequence.finish = hidden.finish
        self._hidden.clear()


def _is_here(sequence: SequenceOutput, num_chars: int, has_ended: bool) -> bool:
    """Whether the output that the client has is here. An abort ends the wait for it: its stream ends with `abort`."""
    return sequence.finish == m.Finish.ABORT or (
        sequence.num_chars >= num_chars and (not has_ended or sequence.finish != m.Finish.NONE)
    )


def _is_wrong(sequence: SequenceOutput, num_chars: int, has_ended: bool) -> bool:
    """Whether that output can't come any more. The first delta has all text of the ids that the client has, except what
    the end of the sequence brings; and a sequence that has ended gets no new ids."""
    if _is_here(sequence, num_chars, has_ended):
        return False
    has_new_ids, has_text = sequence.num_generated > 0, sequence.num_chars > 0
    return sequence.finish != m.Finish.NONE or has_new_ids or (has_text and not has_ended)


def _hide(sequence: SequenceOutput, num_chars: int, *, has_ended: bool) -> _Hidden:
    text, known = sequence.take_text(), sequence.num_received * ID_BYTES
    hidden = _Hidden(
        text[num_chars:],
        bytes(sequence.ids[known:]),
        bytes(sequence.token_outputs),
        list(sequence.pieces),
        sequence.finish,
    )
    sequence.pending = [text[:num_chars]] if num_chars else []
    del sequence.ids[known:]
    sequence.token_outputs.clear()
    sequence.pieces.clear()
    if not has_ended:
        sequence.finish = m.Finish.NONE
    return hidden
