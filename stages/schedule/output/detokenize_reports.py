"""Reports to detokenize: sequences that begin, then output. What a full edge refuses goes with the next report.
Replies to pooled prompts go to their gateways."""

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.stage import Stage
from pipeline.stages.schedule.scheduler import Scheduler


class DetokenizeReports:
    """The edges to all processes of detokenize."""

    def __init__(self, stage: "Stage[m.ScheduleInbox]", scheduler: Scheduler) -> None:
        self._stage = stage
        self._scheduler = scheduler
        self._outboxes = [stage.outboxes[name] for name in topology.among(stage.outboxes, "detokenize")]
        """To all processes. Those that are joining or leaving get no new sequences."""
        self.openings: list[list[m.Open | m.Reject | m.PrefixCacheReset]] = [[] for _ in self._outboxes]
        """Openings to send, for each process."""
        self._gone: set[int] = set()
        """Replicas that were removed, and whose sequences others have."""

    def add(self, opening: m.Open | m.Reject) -> None:
        self.openings[self._scheduler.replica_of(opening)].append(opening)

    def add_reset(self, reset: m.PrefixCacheReset) -> None:
        """Any process forwards it."""
        self.openings[0].append(reset)

    def send(self) -> bool:
        """Send new output. Returns False if an edge is full: the rest goes with the next report."""
        all_sent = self._send_pooled()
        for replica in range(len(self._outboxes)):
            all_sent &= self._send_to(replica)
        return all_sent

    def _send_pooled(self) -> bool:
        pooled = self._scheduler.output_buffer.pooled
        for gateway in list(pooled.pending):
            message = pooled.message(gateway, self._stage.replay_context.monotonic())
            if self._stage.outbox("gateway", gateway).send(message):
                pooled.mark_sent(gateway)
        return not pooled.pending

    def _send_to(self, replica: int) -> bool:
        detokenize, openings = self._outboxes[replica], self.openings[replica]
        if openings:
            if not detokenize.send_all(openings):
                return False
            openings.clear()
        report = self._scheduler.output_buffer.pending(replica, self._stage.replay_context.monotonic())
        if report is not None:
            if not detokenize.send(report):
                self._stage.arrays.retract_all(report)
                return False
            self._scheduler.output_buffer.mark_sent(replica)
        return True

    def restarted(self, replica: int, message: m.PeerRestarted) -> None:
        """Send the successor of a process again what it had, or give what it had to others if it is gone."""
        if message.is_removed:
            self._gone.add(replica)
        else:
            self._gone.discard(replica)
        while len(self._outboxes) <= replica and not message.is_removed:
            self._outboxes.append(self._stage.outbox("detokenize", len(self._outboxes)))
            self.openings.append([])
            self._scheduler.add_detokenize()
        if replica >= len(self._outboxes):
            self._gone.discard(replica)
            return  # it was never known here
        # Arrays of openings that were not sent: what came in this wake before this message made them after the
        # channels were renewed.
        self._stage.arrays.lost(message.peer.name)
        # An answer to a reset of the prefix cache is lost: the gateway asks again.
        self.openings[replica].clear()
        for to, opening in self._scheduler.resend(replica, is_removed=message.is_removed):
            self.openings[to].append(opening)
        # Each costs a look in each wake. One that is detached may still have sequences: if several are removed in one
        # wake, all are detached before the first of these messages is handled.
        while len(self._outboxes) - 1 in self._gone:
            self._gone.remove(len(self._outboxes) - 1)
            self._outboxes.pop()
            self.openings.pop()
            self._scheduler.remove_detokenize()
