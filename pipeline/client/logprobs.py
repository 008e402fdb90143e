"""Decode log probabilities from the protocol's records (docs/protocol.md, Records)."""

import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec


class Logprob(msgspec.Struct, frozen=True):
    """The log probability of one id at one position, before temperature, filters, penalties and grammars."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest. None for a sampled id that is not among the requested number of likeliest ids, and with
    `logprob_token_ids`."""
    decoded_token: str | None = None
    """The id's text. An incomplete character is U+FFFD."""
    bytes: bytes = b""
    """The UTF-8 bytes of its text; a character may span several ids."""


class _HasLogprobs(Protocol):
    """`SamplingParams`, or a `Request` of the wire."""

    @property
    def logprobs(self) -> int | None: ...
    @property
    def logprob_token_ids(self) -> list[int] | None: ...


def num_logprobs(params: _HasLogprobs) -> int | None:
    """Log probabilities in the record of an output id, besides its own; None without records."""
    return len(params.logprob_token_ids or ()) or params.logprobs


def logprobs_of(
    ids: Sequence[int], records: bytes, pieces: Sequence[bytes], num_top: int, *, is_ranked: bool = True
) -> list[dict[int, Logprob]]:
    """For each record, the log probability of its id, then those of the most likely ids, or of `logprob_token_ids`
    (not `is_ranked`). An incomplete last record is ignored, and so are ids without a record."""
    layout = struct.Struct(f"<f{num_top}i{num_top}f")
    whole = memoryview(records)[: len(records) // layout.size * layout.size]
    read = []
    for index, (token_id, numbers) in enumerate(zip(ids, layout.iter_unpack(whole), strict=False)):
        first = index * (1 + num_top)
        own, *others = [*pieces[first : first + 1 + num_top], *[b""] * (1 + num_top)][: 1 + num_top]
        top = numbers[1 : 1 + num_top]
        rank = top.index(token_id) + 1 if is_ranked and token_id in top else None
        each = {token_id: _logprob(numbers[0], rank, own)}
        for number, (top_id, logprob, piece) in enumerate(zip(top, numbers[1 + num_top :], others, strict=True)):
            each.setdefault(top_id, _logprob(logprob, number + 1 if is_ranked else None, piece))
        read.append(each)
    return read


def _logprob(logprob: float, rank: int | None, piece: bytes) -> Logprob:
    return Logprob(logprob, rank, piece.decode("utf-8", "replace"), piece)
