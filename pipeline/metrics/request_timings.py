"""Timings of a request by hop, for `"timings": true` in a request and for `pipeline trace --request`.

    received ─gateway─ began ─tokenize─ done ─admit─ queued ─queue─ started ─prefill─ first ─decode─ settled
                                                                               ─detokenize─ sent ─deliver─ ended

The hops have no gaps between them, so they add up to the whole. Times are from time.monotonic(), which all processes of
a machine share.
"""

import msgspec

HOPS = ("gateway", "tokenize", "admit", "queue", "prefill", "decode", "detokenize", "deliver")
"""
gateway     reading and checking the body; the way to ingest, and waiting there
tokenize    template and tokenizer
admit       the way to the scheduler
queue       waiting queue
prefill     from the plan of its first step to its first id
decode      from its first id to its last
detokenize  from its last id to text
deliver     from text to the end of the response
"""

STAGE_OF = {
    "gateway": "gateway",
    "tokenize": "ingest",
    "admit": "ingest",
    "queue": "schedule",
    "prefill": "execute",
    "decode": "execute",
    "detokenize": "detokenize",
    "deliver": "gateway",
}
"""The stage of each hop."""


class SequenceTimings(msgspec.Struct, array_like=True, frozen=True):
    """Timings of one choice."""

    request_id: int
    index: int
    """Index of the choice."""
    stamps_s: list[float]
    """The start of each hop and the end of the last one, in ascending order."""
    first_text_s: float
    """When the first delta reached the gateway."""
    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def hops_s(self) -> list[float]:
        """The duration of each hop."""
        return [end - begin for begin, end in zip(self.stamps_s, self.stamps_s[1:], strict=False)]


class RequestTimings(msgspec.Struct, array_like=True, frozen=True):
    response_id: str
    received_unix_s: float
    sequences: list[SequenceTimings]


def stamps(*raw_s: float) -> list[float]:
    """Make stamps ascend. A stamp that a stage did not report (0), or that lies before its predecessor because the
    request was submitted twice, takes its predecessor's value: its hop is 0 s long."""
    result = [raw_s[0]]
    for stamp in raw_s[1:]:
        result.append(max(result[-1], stamp))
    return result
