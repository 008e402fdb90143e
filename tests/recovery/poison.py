"""Requests that make a stage die again and again: schedule while it runs their sequences, or, in other runs, each of
several a stage of its own: execute, ingest, detokenize, or schedule while they wait in its queue."""

from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.runtime import messages as m
from pipeline.runtime.topology import SUPERVISOR
from pipeline.stages.detokenize.output_processor import OutputProcessor
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.stage import ScheduleStage

if TYPE_CHECKING:
    from tests.recovery.network import ModelStage
    from tests.recovery.protocol import Server
    from tests.recovery.supervised import SupervisedProcesses

MAX_DEATHS = 5
"""Of schedule, until a request is found. It is one more than it takes beside others
(stages/schedule/policies/quarantine.py) if a request gets enough ids to be cleared before it kills again."""
KILL_WEIGHTS = {"execute": 1.0, "ingest": 1.0, "gateway": 0.3}
"""Of random kills in a run with such a request."""
MIXED_POINTS = ("execute", "ingest", "detokenize", "queue")
"""Places of poisons of different kinds, in one run."""
MIXED_KILL_WEIGHTS = {"gateway": 1.0}
"""Of random kills in such a run: none that may be taken for the fault of a request."""
MAX_DEATHS_OF = {"execute": 4, "ingest": 3, "detokenize": 3}
"""Of these stages, until a request is found (docs/recovery.md)."""
MAX_WAKES = 100


class Poisoned(Exception):
    """A process dies of requests."""

    def __init__(self, request_ids: list[int]) -> None:
        self.request_ids = request_ids


class Poison(NamedTuple):
    """What makes a request kill schedule."""

    num_ids: int
    """Output ids that its first sequence has then."""
    point: str
    """Where schedule dies: at the next `plan`, `settle` or `report`, or at a `plan` while the request waits in the
    `queue`; or the stage that dies, `execute`, `ingest` or `detokenize`."""


def poison(loop: ScheduleStage, poisons: dict[int, Poison]) -> None:
    """Let the loop raise Poisoned when it runs one of these requests, by id."""
    scheduler = loop._scheduler

    def deadly(point: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            due = [number for number, one in poisons.items() if one.point == point and _is_due(scheduler, number, one)]
            if due:
                raise Poisoned(due)
            return call(*args)

        return wrapped

    scheduler.plan = deadly("queue", deadly("plan", scheduler.plan))  # type: ignore[method-assign]
    scheduler.settle = deadly("settle", scheduler.settle)  # type: ignore[method-assign]
    loop._reports.send = deadly("report", loop._reports.send)  # type: ignore[method-assign]


def poison_detokenize(
    stage: "ModelStage", processor: OutputProcessor, poisons: dict[int, Poison], failed: Container[int]
) -> None:
    """Let a process of detokenize raise Poisoned when it decodes one of these requests, by id. Requests that have
    `failed` must not come."""
    really, really_open = processor.settle, processor.open

    def open_one(message: m.Open, *rest: Any) -> Any:
        assert message.request_id not in failed, "a request that has failed goes to a successor"
        return really_open(message, *rest)

    def settle(seqs: list[int], starts: list[int], counts: list[int], *rest: Any) -> Any:
        for seq, start, num_ids in zip(seqs, starts, counts, strict=True):
            sequence = processor._live[seq]
            one = poisons.get(sequence.request_id)
            is_first = sequence.index == 0
            if one is not None and one.point == "detokenize" and is_first and start + num_ids > one.num_ids:
                stage.breadcrumb.at(sequence.request_id, sequence.attempt)
                raise Poisoned([sequence.request_id])
        return really(seqs, starts, counts, *rest)

    patched: Any = processor
    patched.open, patched.settle = open_one, settle


def _is_due(scheduler: Scheduler, request_id: int, poison: Poison) -> bool:
    request = scheduler.requests.get(request_id)
    first = None if request is None else request.open_sequences.get(0)
    if request is None or first is None:
        return False
    if poison.point == "queue":
        return first in scheduler.lifecycle.waiting
    if first.row < 0:
        return False
    return int(scheduler.rows.num_tokens[first.row]) - len(request.prompt) >= poison.num_ids


def note_killers(server: "Server", request_ids: list[int]) -> None:
    """Note that a stage dies of these requests."""
    for ledger in server.ledgers:
        for case in ledger.cases:
            case.has_killed |= case.request_id in request_ids


def let_end(server: "SupervisedProcesses", poisons: dict[int, Poison]) -> None:
    """Schedule hands over: requests that kill it when it plans may get their last ids without a plan."""
    for ledger in server.ledgers:
        for case in ledger.cases:
            case.may_end |= case.request_id in poisons and poisons[case.request_id].point == "plan"


def deliver_output(server: "Server", name: str) -> None:
    """Let all output arrive that this process of schedule has sent. On its way, it takes much less time than a step."""
    schedule = name, server.network.incarnations[name]
    for stage in ("detokenize", "gateway"):
        for other in [one for one in server.processes if one.startswith(f"{stage}.")]:
            for _ in range(MAX_WAKES):
                edges = [edge for edge in server.network.edges_to(other) if edge[0] != SUPERVISOR]
                edges = [edge for edge in edges if stage == "gateway" or edge[:2] == schedule]
                if not (edges or server.processes[other].has_work):
                    break
                server.stages[other].fill([server.network.take(edge) for edge in edges])
                try:
                    server.processes[other].wake()
                except Poisoned as death:
                    server.poisoned(other, death.request_ids)
                    break
