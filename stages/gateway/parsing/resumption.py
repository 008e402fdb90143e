"""Reads the resume points of a stream over HTTP that a client continues. Pure.

pipeline/runtime/resume_points.py describes them; replies/resume_points.py writes them.

Nothing in them is believed. Servers share no secret that could sign them: the one that continues a stream may be
another one than the one that began it. So each field is bounded by what it can be, and none of them reaches another
request: the scheduler orders by the arrival here, metrics count from it, and the client's text is compared with that of
its ids (`Continuation`). The first arrival can only bring the deadline nearer.
"""

import binascii
import io
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from pipeline.runtime.resume_points import PREFIX, RESUME
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing.chat.images import LinkedImage
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, Resumption

MAX_POINTS_BYTES = 16 * 1024 * 1024
MAX_HEAD_BYTES = 1024
_LINE = re.compile(rb"([0-9]{1,4}) ([0-9]{1,10}) ([01]) ([A-Za-z0-9+/=]*)")
_NUM_BYTES = re.compile(r"[0-9]{1,10}")
MAX_UNIX_S = 2**32
"""Far behind any clock, and small enough for every date."""
Time = Annotated[float, Meta(ge=0, lt=MAX_UNIX_S)]


class ResumePointHead(msgspec.Struct, frozen=True):
    """What a stream keeps when it is continued."""

    id: Annotated[str, Meta(pattern=r"\A[!-~]{1,300}\Z")]
    created: Annotated[int, Meta(ge=0, lt=MAX_UNIX_S)]
    arrival_s: Time
    """When the request arrived at the first server, in Unix time: its deadline counts from then."""
    seed: int
    salt: int
    prompt: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    """Digest of the prompt's ids: a chat template may write the date, and then the prompt is another one."""


_heads = msgspec.json.Decoder(ResumePointHead)


def is_resumable(parsed: ParsedRequest) -> bool:
    """Whether a stream can have resume points. Not if it has output that is no function of the ids of its sequences, or
    several prompts. With several sequences, token details are not known to be complete at each point. An image that is
    fetched again may be another one."""
    has_details = parsed.details.num_top is not None or parsed.details.with_ids
    return (
        parsed.stream
        and len(parsed.prompts) == 1
        and parsed.dialect.is_resumable
        and not (parsed.echo or parsed.hides_output or parsed.is_prompt_only)
        and not (parsed.is_best_of or parsed.options.use_beam_search)
        and not (has_details and parsed.n > 1)
        and not any(isinstance(image, LinkedImage) for image in parsed.images)
    )


def num_point_bytes(headers: Mapping[str, str]) -> int:
    """Bytes of points in front of the body; 0 if the request continues nothing. Raises ApiError."""
    text = headers.get(RESUME)
    if text is None:
        return 0
    if not _NUM_BYTES.fullmatch(text) or not 0 < int(text) <= MAX_POINTS_BYTES:
        message = f"'{RESUME}' must be the number of bytes of resume points, 1 to {MAX_POINTS_BYTES}"
        raise invalid(RESUME, message, "invalid_value")
    return int(text)


def with_resume_points(parsed: ParsedRequest, points: bytes, now_s: float, max_ids: int) -> ParsedRequest:
    """A request that continues behind its last point. `now_s` is when it began to arrive, in Unix time; a sequence has
    at most `max_ids`. Raises ApiError, 400."""
    if not is_resumable(parsed):
        raise invalid(RESUME, f"'{RESUME}': such a request has no resume points", "invalid_value")
    head: ResumePointHead | None = None
    ids = [bytearray() for _ in range(parsed.n)]
    num_chars, has_ended = [0] * parsed.n, [False] * parsed.n
    max_bytes = 4 * (max_ids if parsed.options.max_tokens is None else min(max_ids, parsed.options.max_tokens))
    longest, is_blank = max(MAX_HEAD_BYTES, 4 * max_bytes // 3 + 64), False
    for number, text in enumerate(io.BytesIO(points), 1):
        content = text.removesuffix(b"\n").removeprefix(PREFIX)
        was_blank, is_blank = is_blank, not content
        if is_blank and not was_blank:  # as between the events of a stream
            continue
        if len(content) > longest:
            raise invalid(RESUME, f"'{RESUME}': line {number} is too long for a resume point", "invalid_value")
        if content.startswith(b"{") and head is None:
            head = _head_of(content)
        elif (match := _LINE.fullmatch(content)) and head is not None and int(match[1]) < parsed.n:
            index, ended = int(match[1]), match[3] == b"1"
            new = _ids_of(match[4], number)
            # As they are written: each point says something new, and an end is the last.
            if has_ended[index] or not (new or ended) or int(match[2]) < num_chars[index]:
                raise invalid(RESUME, f"'{RESUME}': line {number} does not follow the points before", "invalid_value")
            ids[index] += new
            if len(ids[index]) > max_bytes:
                message = f"'{RESUME}': sequence {index} has more than {max_bytes // 4} ids, the most that it may have"
                raise invalid(RESUME, message, "invalid_value")
            num_chars[index], has_ended[index] = int(match[2]), ended
        else:
            raise invalid(RESUME, f"'{RESUME}': line {number} is not a resume point of this request", "invalid_value")
    if head is None:
        raise invalid(RESUME, f"'{RESUME}': the first point, with the stream's id, is missing", "invalid_value")
    has_output = any(ids)
    return msgspec.structs.replace(
        parsed,
        seed=head.seed,
        outputs=[bytes(each) for each in ids] if has_output else [],
        options=msgspec.structs.replace(parsed.options, repeats_received=has_output),
        resumption=Resumption(
            id=head.id, created=head.created, arrival_s=min(head.arrival_s, now_s), salt=head.salt, prompt=head.prompt,
            num_chars=num_chars, has_ended=has_ended, age_s=max(0.0, now_s - head.arrival_s),
        ),
    )  # fmt: skip


def _head_of(data: bytes) -> ResumePointHead:
    try:
        head = _heads.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(RESUME, f"'{RESUME}': the first point is invalid: {error}", "invalid_value") from error
    if not 0 <= head.seed < 2**64 or not 0 <= head.salt < 2**64:
        raise invalid(RESUME, f"'{RESUME}': the first point is invalid", "invalid_value")
    return head


def _ids_of(text: bytes, number: int) -> bytes:
    try:
        ids = binascii.a2b_base64(text, strict_mode=True) if text else b""
    except binascii.Error:
        ids = b"?"
    if len(ids) % 4:
        raise invalid(RESUME, f"'{RESUME}': line {number} has no valid token ids", "invalid_value")
    return ids


def digest_of(prompt_ids: "np.ndarray[tuple[int], np.dtype[np.int32]]") -> str:
    """Of the ids of a prompt."""
    return blake2b(prompt_ids.astype("<i4").tobytes(), digest_size=8).hexdigest()
