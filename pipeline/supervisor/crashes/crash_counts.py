"""Decides which requests kill a stage: they fail. The only place that does.

    a process crashed ──► its suspects: all requests that it had in work; each has crashed this stage once more
                            ├── one alone, the third time ──► `FailRequests` to schedule and the gateways
                            └── else ──► the suspects run beside fewer: `crash_counts` of `Launch` and `PeerRestarted`

A request fails only for a crash in which it was alone in work: beside others, any of them may be the reason. A restart
on purpose and a death before the process was ready are no crashes.

Schedule computes suspects in groups that get smaller with each crash (stages/schedule/policies/quarantine.py), and
clears those that get enough ids (`Cleared`). Ingest prepares each alone (stages/ingest/submit_queue.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pipeline.runtime import messages as m
from pipeline.runtime.process.black_box import MAX_SUSPECTS

MAX_CRASHES = 3
"""Of a stage, the last of them with the request alone in work, before it fails."""
CLEARED_STAGES = ("execute", "schedule")
"""Those that are known to have got over a request when it has new ids."""


class CrashCounts:
    """How often each stage has crashed with each request in work. It outlives all stages."""

    def __init__(self) -> None:
        self._by_stage: defaultdict[str, dict[int, int]] = defaultdict(dict)
        """By stage and request id, the one of the newest crash last."""

    def crashed(self, stage: str, suspects: Sequence[int]) -> m.FailRequests | None:
        """A process of this stage has crashed with these requests in work. Returns who fails for it."""
        counts = self._by_stage[stage]
        for request_id in suspects:
            counts[request_id] = counts.pop(request_id, 0) + 1
        for oldest in list(counts)[: -2 * MAX_SUSPECTS]:
            del counts[oldest]
        if len(suspects) != 1 or (num := counts[suspects[0]]) < MAX_CRASHES:
            return None
        return m.FailRequests({suspects[0]: f"{stage} died {num}{m.DIED_OF_REQUEST}"})

    def cleared(self, request_ids: Iterable[int]) -> None:
        """Schedule has cleared these requests."""
        for request_id in request_ids:
            for stage in CLEARED_STAGES:
                self._by_stage[stage].pop(request_id, None)

    def of(self, stage: str) -> dict[int, int]:
        """What a process of this stage must know, as in `Launch`."""
        found: dict[int, int] = {}
        for one in {"ingest": ("ingest",), "schedule": CLEARED_STAGES}.get(stage, ()):
            for request_id, num in self._by_stage[one].items():
                found[request_id] = max(num, found.get(request_id, 0))
        return found
