"""All processes of the modelled server, and what the supervisor does about them."""

from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np

from pipeline.config.settings import (
    DetokenizeSettings,
    GatewaySettings,
    IngestSettings,
    ScheduleSettings,
    Settings,
    SupervisorSettings,
)
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.process.black_box import breadcrumbs_in, suspects_in
from pipeline.runtime.topology import SCHEDULE, SUPERVISOR
from pipeline.supervisor.crashes.crash_counts import CrashCounts
from pipeline.supervisor.reconfigure.scaling import Scaling
from pipeline.supervisor.restart.recovery import Recovery, RestartBudget
from pipeline.text.vocabulary import Vocabulary
from tests.fakes import VOCAB
from tests.recovery import poison
from tests.recovery.ledger import Ledger
from tests.recovery.network import ModelContext, ModelStage, Network
from tests.recovery.replicas import ModelProcesses
from tests.recovery.stages import (
    UNIONS,
    DetokenizeProcess,
    ExecuteProcess,
    GatewayProcess,
    IngestProcess,
    Process,
    ScheduleProcess,
)

BLOCK_SIZE = 16
MAX_MODEL_LEN = 96
MAX_RESTARTS = SupervisorSettings().max_restarts
MANY_POISONS = 7
"""More than `MAX_RESTARTS`, in each `MANY_POISONS_EVERY`th run that has any."""
MANY_POISONS_EVERY = 4

MIXED_EVERY = 5
"""Of so many runs, one has requests that kill different stages."""


class SupervisedProcesses:
    """All processes of a server with random settings. The supervisor starts them, and tells each when another dies."""

    def __init__(self, seed: int, vocabulary: Vocabulary, model_dir: Path) -> None:
        self.rng = rng = Random(seed)
        self._vocabulary = vocabulary
        self._model_dir = model_dir
        self.settings = Settings(
            gateway=GatewaySettings(replicas=rng.choice([1, 1, 2])),
            ingest=IngestSettings(replicas=rng.choice([1, 1, 2])),
            detokenize=DetokenizeSettings(replicas=rng.choice([1, 1, 2])),
            schedule=ScheduleSettings(
                max_num_seqs=rng.choice([1, 3, 4, 6, 8]),
                max_num_batched_tokens=rng.choice([16, 24, 64]),
                max_steps_in_flight=rng.choice([1, 2, 3]),
                policy=rng.choice(["fcfs", "priority", "longest-prefix-match"]),
                preemption=rng.choice(["auto", "swap", "swap", "recompute"]),
                kv_offload=rng.choice([True, True, False]),
            ),
        )
        self._facts = m.ExecuteFacts(
            rng.choice([5, 6, 6, 7, 9]), BLOCK_SIZE, MAX_MODEL_LEN, VOCAB, rng.choice([0, 3, 30, 30])
        )
        self.network = Network(rng)
        self._context = ModelContext(rng)
        self.recovery = Recovery()
        self._replicas = ModelProcesses(self)
        self._scaling = Scaling(self._replicas, lambda: 0.0)
        self.processes: dict[str, Process] = {}
        """The living processes."""
        self.stages: dict[str, ModelStage] = {}
        self.names = [name for row in topology.TOPOLOGY for name in topology.replicas_of(self.settings, row.name)]
        self._unnoticed: list[str] = []
        """Processes whose death the supervisor has not noticed."""
        self._due: list[str] = []
        """Those whose successor has not started."""
        self._starting: list[str] = []
        """Those that have not got `Start`."""
        self._swap: np.ndarray[Any, Any] | None = None
        """The blocks in swap space when the executor died."""
        self._owners: dict[tuple[int, int], int] = {}
        """The scheduler's incarnation, by request id and attempt."""
        self.ledgers: list[Ledger] = []
        self.num_deaths: dict[str, int] = {}
        """By stage."""
        self.num_random_deaths: dict[str, int] = {}
        """Those that no request has caused."""
        self._has_poison = rng.random() < 0.3
        """Whether some requests kill schedule again and again."""
        self._num_poisons = (rng.choice([1, 2]) if seed % MANY_POISONS_EVERY else MANY_POISONS) * self._has_poison
        self._budget = RestartBudget(MAX_RESTARTS)
        self._is_mixed = seed % MIXED_EVERY == 3
        """Whether some requests kill different stages, and nothing else does but a gateway."""
        if self._is_mixed:
            self._has_poison, self._num_poisons = True, rng.randint(1, 4)
        self._poisons: dict[int, poison.Poison] = {}
        self._crash_counts = CrashCounts()
        self._failed: set[int] = set()
        """Requests that have failed for the deaths of a stage."""
        self._failed_before: dict[str, frozenset[int]] = {}
        """Those of them that no one may send to the newest process of a name: they failed before it was announced."""
        self._black_boxes: dict[str, memoryview] = {}
        """Of the newest process of each name, until the supervisor has noticed its death."""
        self._at_work: dict[str, bool] = {}
        """Whether a process was at work when it died, and not replaced on purpose."""
        self._poisoned_names: list[str] = []
        """Processes that a request has killed, and whose death was not noticed."""
        self.killed_by: defaultdict[int, set[str]] = defaultdict(set)
        """By request: the processes of detokenize that it has killed."""
        self.num_poison_deaths: Counter[str] = Counter()
        """By stage."""
        self.num_handed_over = 0
        self._num_without_suspects: Counter[str] = Counter()
        """Deaths of a stage's processes that were being added or removed."""
        self._num_asked: Counter[str] = Counter()
        """How often another number of a stage's processes was asked for."""

    def start(self, name: str) -> None:
        stage_name = name.partition(".")[0]
        stage = ModelStage(
            self.network,
            name,
            UNIONS[stage_name],
            self.settings,
            self._model_dir,
            self._context,
            self.names,
            self._crash_counts.of(stage_name),
        )
        self._black_boxes[name] = stage.black_box
        process: Process
        match stage_name:
            case "gateway":
                self.ledgers.append(Ledger(self.num_random_deaths, is_strict=self._is_mixed))
                process = GatewayProcess(stage, self.ledgers[-1])
            case "ingest":
                process = IngestProcess(stage, self._poisons)
            case "schedule":
                process = ScheduleProcess(stage, self._owners, self._poisons)
            case "execute":
                process = ExecuteProcess(stage, self._facts, self._swap, self._poisons)
            case _:
                process = DetokenizeProcess(stage, self._vocabulary, self._poisons, self._failed_before.get(name, ()))
        self.processes[name], self.stages[name] = process, stage
        self._starting.append(name)

    def _ready(self, name: str) -> None:
        self._starting.remove(name)
        self.send(name, m.Start(self._facts))
        if name in self._replicas.joining:
            self._scaling.ready(name)

    def send(self, name: str, message: m.Start | m.PeerRestarted | m.Rescaled | m.HandOver | m.FailRequests) -> None:
        self.network.send((SUPERVISOR, 1, name, self.network.incarnations[name]), message)

    def kill(self, name: str, *, is_poisoned: bool = False, is_planned: bool = False) -> None:
        """Let a process die at this moment."""
        process = self.processes.pop(name)
        self._at_work[name] = name not in self._starting
        if is_planned:
            self._black_boxes.pop(name)
        del self.stages[name]
        if isinstance(process, ExecuteProcess):
            self._swap = process.swap
        if isinstance(process, GatewayProcess):
            self.ledgers.remove(process.ledger)  # its clients are disconnected
        if name in self._starting:
            self._starting.remove(name)
        self.network.killed(name)
        self._unnoticed.append(name)
        stage = name.partition(".")[0]
        if is_planned:
            return
        self.num_deaths[stage] = self.num_deaths.get(stage, 0) + 1
        if is_poisoned:
            self.num_poison_deaths[stage] += 1
            most = self._most_deaths(stage) + self._num_without_suspects[stage]
            assert self.num_poison_deaths[stage] <= most, "a request that kills is not found"
            self._poisoned_names.append(name)
        else:
            self.num_random_deaths[stage] = self.num_random_deaths.get(stage, 0) + 1

    def _suspects(self, name: str) -> list[int]:
        """As Restarts and BlackBoxes."""
        if name not in self._black_boxes:
            return []
        if at_work := list(dict.fromkeys(one.request_id for one in breadcrumbs_in(self._black_boxes[name]))):
            return at_work
        is_listed = self._at_work[name] and name.startswith(("schedule.", "execute.")) and SCHEDULE in self._black_boxes
        return suspects_in(self._black_boxes[SCHEDULE]) if is_listed else []

    def _most_deaths(self, stage: str) -> int:
        """Those that the requests may cost that kill this stage."""
        num_of = Counter(
            one.point if one.point in poison.MAX_DEATHS_OF else "schedule" for one in self._poisons.values()
        )
        match stage:
            case "schedule":
                # Output that a detokenizer has lost arrives late, and clears a request once more. When the executor
                # dies, those that ran are listed until the wake is over, beside the group that runs next.
                num_others = self.num_deaths.get("detokenize", 0) + self.num_deaths.get("execute", 0)
                return poison.MAX_DEATHS * num_of[stage] + num_others
            case "execute":
                # If schedule dies before it learns of one, its successor does not know that, and its verdict may come
                # too late if ingest dies.
                num_others = self.num_deaths.get("schedule", 0) + self.num_deaths.get("ingest", 0)
                return num_of[stage] * (poison.MAX_DEATHS_OF[stage] + num_others)
            case "ingest":
                # A request may go to a process that ran already when it killed another one, and does not know of it.
                return poison.MAX_DEATHS_OF[stage] * num_of[stage] + self._num_asked[stage]
            case _:
                # Another process may have had some of its sequences, or those of an earlier attempt.
                num_others = sum(len(names) - 1 for names in self.killed_by.values())
                return poison.MAX_DEATHS_OF[stage] * num_of[stage] + num_others

    def _notice(self, name: str) -> None:
        self._unnoticed.remove(name)
        if self._scaling.died(name, "was killed"):
            self._num_without_suspects[name.partition(".")[0]] += 1  # it has no suspects (docs/recovery.md)
            return
        stage, suspects = name.partition(".")[0], self._suspects(name)
        if name in self._poisoned_names:
            self._poisoned_names.remove(name)
            delay_s = self._budget.died(name, 0.0, was_ready=True, suspects=suspects)
            assert isinstance(delay_s, float), f"the server has ended: {delay_s}"
        failing = self._crash_counts.crashed(stage, suspects)
        self._black_boxes.pop(name, None)
        self.network.renew(name)
        self._due.append(name)
        if failing is not None:
            self._failed |= failing.errors.keys()
            for other in self.processes:
                if other.startswith(("schedule.", "gateway.")):
                    self.send(other, failing)
        self._failed_before[name] = frozenset(self._failed)
        self.inform(name)

    def is_ready(self, name: str) -> bool:
        """Whether the supervisor takes a process for one that runs."""
        return name in self.alive_or_unnoticed() and name not in self._starting

    def alive_or_unnoticed(self) -> list[str]:
        return [*self.processes, *self._unnoticed]

    def forget(self, name: str) -> None:
        """A process is gone for good."""
        self.names.remove(name)
        if name in self._unnoticed:
            self._unnoticed.remove(name)
        self.network.forget(name)

    def inform(self, name: str) -> None:
        """Inform the others of the newest channels of a process, or that it is gone."""
        known = [other for other in self.processes if _share_edge(name, other)]
        gateways = [other for other in known if other.startswith("gateway.")]
        stages = [other for other in known if other not in gateways]
        epoch = self.recovery.died(name, stages, gateways)
        self.rng.shuffle(stages)
        for other in stages:
            self._tell(other, name, epoch)
        self._tell_gateways()

    def _tell(self, other: str, name: str, epoch: int) -> None:
        peer, network = m.PeerInbox(name, "", 0), self.network
        if name in network.incarnations:
            counts = self._crash_counts.of(topology.stage_of(other)) if topology.stage_of(name) == "execute" else {}
            self.send(other, m.PeerRestarted(epoch, peer, network.incarnations[name], [], crash_counts=counts))
        else:
            self.send(other, m.PeerRestarted(epoch, peer, network.last_of_removed[name], [], is_removed=True))

    def _tell_gateways(self) -> None:
        for one in self.recovery.rounds_for_gateways():
            for gateway in sorted(one.gateways):
                self._tell(gateway, one.name, one.epoch)

    def _answered(self) -> None:
        """The supervisor reads one message."""
        arrival = self.network.take(self.rng.choice(self.network.edges_to(SUPERVISOR)))
        message = msgspec.msgpack.decode(arrival.body, type=m.SupervisorInbox)
        if isinstance(message, m.Drained):
            if arrival.sender in self.processes and arrival.incarnation == self.network.incarnations[arrival.sender]:
                self.num_handed_over += 1
                poison.let_end(self, self._poisons)
                self.kill(arrival.sender, is_planned=True)
            return
        if isinstance(message, m.Cleared):
            self._crash_counts.cleared(message.request_ids)
            return
        assert isinstance(message, m.Reconnected)
        self.recovery.answered(arrival.sender, message.epoch)
        self._scaling.answered(arrival.sender, message.epoch)
        self._tell_gateways()


def _share_edge(name: str, other: str) -> bool:
    rows = topology.row(name.partition(".")[0]), topology.row(other.partition(".")[0])
    return any(b.name in (*a.sends_to, *a.reads) for a, b in (rows, rows[::-1]))
