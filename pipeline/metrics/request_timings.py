"""What became of a call, hop by hop: the times that every reply can carry (`"timings": true`), and that `pipeline trace
--request` draws.

    received ─gateway─ began ─tokenize─ done ─admit─ queued ─queue─ started ─prefill─ first ─decode─ settled
                                                                               ─detokenize─ sent ─deliver─ ended

The hops follow each other without a gap, so they add up to the whole. Times are by time.monotonic(), which is one clock
for all processes of a machine.
"""

import msgspec

HOPS = ("gateway", "tokenize", "admit", "queue", "prefill", "decode", "detokenize", "deliver")
"""
gateway     the body is read and checked; the request travels to ingest and waits there
tokenize    template and tokenizer
admit       on the way to the scheduler
queue       in the waiting queue
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
"""Where a hop is spent."""


class SequenceTimings(msgspec.Struct, array_like=True, frozen=True):
    """One choice of a call."""

    request_id: int
    index: int
    """The choice's"""
    stamps_s: list[float]
    """Where each hop begins, and where the last one ends; none goes backwards."""
    first_text_s: float
    """When its first delta reached the gateway."""
    num_prompt: int
    num_cached: int
    num_output: int

    @property
    def hops_s(self) -> list[float]:
        """How long each hop took."""
        return [end - begin for begin, end in zip(self.stamps_s, self.stamps_s[1:], strict=False)]


class RequestTimings(msgspec.Struct, array_like=True, frozen=True):
    call_id: str
    received_unix_s: float
    sequences: list[SequenceTimings]


def stamps(*raw_s: float) -> list[float]:
    """Stamps in order: one that a stage did not give (0), or that a request driven twice has from its second time,
    takes the value before it, and its hop is 0 long."""
    result = [raw_s[0]]
    for stamp in raw_s[1:]:
        result.append(max(result[-1], stamp))
    return result
