"""What the model's pooler made of prompts, on its way to the gateways.

It has no text, so it goes from schedule to its gateway, without detokenize. A reply stays pending until it was sent: if
a full edge refuses a message, the next one has its content too. After a restart of a gateway its requests are gone, so
nothing is sent again.
"""

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish, FirstTimes
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.request import Sequence


class PooledReply(msgspec.Struct, frozen=True):
    """The end of a prompt. It copies what it needs: the request may be closed before the reply is sent."""

    request_id: int
    attempt: int
    index: int
    start: int
    """Output ids before these."""
    ids: Ids
    """The sampled id, which has no meaning; none if the sequence ended without a result."""
    finish: Finish
    first: FirstTimes | None
    token_outputs: bytes
    error: str


class PooledReplies:
    """Owns the replies that were not sent yet, by gateway."""

    def __init__(self) -> None:
        self.pending: dict[int, list[PooledReply]] = {}

    def add(self, sequence: Sequence, num_sent: int, finish: Finish) -> None:
        """Add the end of a sequence, with the ids from `num_sent` on."""
        request, ids = sequence.request, sequence.ids[num_sent:]
        reply = PooledReply(
            request.request_id,
            request.attempt,
            sequence.index,
            num_sent - len(request.prompt),
            ids,
            finish,
            sequence.first_times if len(ids) else None,
            bytes(sequence.token_outputs) if len(ids) else b"",
            sequence.error,
        )
        sequence.token_outputs.clear()  # no one reads them again
        self.pending.setdefault(request.gateway, []).append(reply)

    def message(self, gateway: int, now_s: float) -> m.Deltas:
        """The pending replies of a gateway, as output without text. `mark_sent` removes them. `now_s` is by
        time.monotonic()."""
        replies = self.pending[gateway]
        num = len(replies)
        firsts = [
            msgspec.structs.replace(one.first, index=index)
            for index, one in enumerate(replies)
            if one.first is not None
        ]
        return m.Deltas(
            request_ids=[one.request_id for one in replies],
            attempts=[one.attempt for one in replies],
            indexes=[one.index for one in replies],
            texts=[""] * num,
            text_offsets=[0] * num,
            ids=b"".join([one.ids.tobytes() for one in replies]),
            id_offsets=[one.start for one in replies],
            num_ids=[len(one.ids) for one in replies],
            finishes=[int(one.finish) for one in replies],
            stop_reasons=[None] * num,
            firsts=firsts,
            settled_s=now_s,
            sent_s=now_s,
            token_outputs=[one.token_outputs for one in replies],
            errors=[one.error for one in replies if one.finish == Finish.ERROR],
        )

    def mark_sent(self, gateway: int) -> None:
        """The last message to a gateway was sent, or its process is gone."""
        self.pending.pop(gateway, None)
