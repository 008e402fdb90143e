"""What any stage is asked beside its work, answered in one place.

An `Aside` comes through the ordinary inbox, so that its answer proves that the loop turns; the stage's own `match`
never sees it. To add one: a struct in messages.py, in the union `Aside`; a case here; a command that sends it
through the admin door with `Tell`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, assert_never

import msgspec

from pipeline import messages as m
from pipeline.errors import UserError
from pipeline.stats import EdgeCounts, OwnCounts, StageCounts

if TYPE_CHECKING:
    from pipeline.stage import Stage


def with_facts(aside: m.Aside, facts: m.ExecuteFacts | None) -> m.Aside:
    """An aside as the supervisor passes it on: a recording that begins late lacks `Start`, and so has what that said."""
    return msgspec.structs.replace(aside, facts=facts) if isinstance(aside, m.Record) else aside


class Asides:
    """Answers for one stage. What goes wrong in the user's part (`UserError`, `OSError`) is the answer; every other
    error ends the stage as it would anywhere else."""

    def __init__(self, stage: "Stage[Any]") -> None:
        self._stage = stage
        self._encoder = msgspec.msgpack.Encoder()
        self.own_counts: Callable[[], OwnCounts] | None = None
        """What this kind of stage counts; None until it has something to count."""

    def __call__(self, aside: m.Aside) -> None:
        try:
            body = self._do(aside)
        except (UserError, OSError) as error:
            answer = m.Answer(aside.nonce, error=str(error))
        else:
            answer = m.Answer(aside.nonce, msgspec.Raw(self._encoder.encode(body)))
        self._stage.supervisor.send(answer)  # where its edge is full, the supervisor calls this stage late

    def _do(self, aside: m.Aside) -> Any:
        """Do it, and return what to answer: anything msgspec encodes."""
        match aside:
            case m.Count():
                return self._counts()
            case m.Record():
                self._stage.record(aside)
                return None
            case m.EndRecord():
                return self._stage.end_record()
            case _:
                assert_never(aside)

    def _counts(self) -> StageCounts:
        inbox = self._stage.inbox
        return StageCounts(
            num_received=inbox.num_received,
            num_stale=inbox.num_stale,
            edges=[EdgeCounts(to, outbox.num_sent, outbox.num_refused) for to, outbox in self._stage.outboxes.items()],
            own=self.own_counts() if self.own_counts is not None else None,
        )
