"""A model of the whole server: all stages, their channels and the supervisor's recovery, in one thread.

    a client acts ──┐
    a stage wakes ──┼── the random number generator chooses what happens next, until everything is over
    a process dies ─┤
    more or fewer ──┤
    it is noticed, its successor starts, it is ready

A process that wakes takes some of the messages that wait for it, from any of its senders, in each sender's order.
"""

from collections import Counter
from pathlib import Path

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.topology import SCHEDULE, SUPERVISOR
from pipeline.stages.gateway.errors import ApiError
from pipeline.text.vocabulary import Vocabulary
from tests.recovery import poison
from tests.recovery.ledger import random_case
from tests.recovery.stages import ExecuteProcess, GatewayProcess, ScheduleProcess
from tests.recovery.supervised import BLOCK_SIZE, MAX_MODEL_LEN, SupervisedProcesses

MAX_EVENTS = 50_000
KILL_WEIGHTS = {"schedule": 2.0, "execute": 2.0, "detokenize": 1.0, "ingest": 0.7, "gateway": 0.5}


class Server(SupervisedProcesses):
    """A server with random settings. `run` lets random things happen to it, and checks what came of them."""

    def __init__(self, seed: int, vocabulary: Vocabulary, model_dir: Path) -> None:
        super().__init__(seed, vocabulary, model_dir)
        rng, network = self.rng, self.network
        self._num_opens, self._num_kills = rng.randint(2, 10), rng.choice([0, 2, 3, 4, 6, 9])
        self._num_aborts, self._num_resets = rng.randint(0, 2), rng.randint(0, 2)
        self._num_scalings = rng.choice([0, 0, 1, 2, 4])
        self._num_restarts = rng.choice([0, 0, 1, 2])
        """Of schedule, on purpose."""
        self.num_scaled: Counter[str] = Counter()
        """How often the number of a stage's processes has changed, or failed to."""
        self._open_rate, self._kill_rate = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.03, 0.1, 0.3])
        """How likely these are compared with a turn."""
        self._num_opened = 0
        self.num_events = 0
        for name in self.names:
            network.open(name)
        for name in self.names:
            self.start(name)
        network.refusal_rate = rng.choice([0.0, 0.1, 0.4])
        if self._has_poison:
            network.refusal_rate = 0.0  # output that is late would clear the request at first

    # -------------------------------------------------------------------------------------------------- the clients

    @property
    def _gateways(self) -> list[GatewayProcess]:
        """Those that take requests."""
        leaving = self._replicas.leaving
        gateways = {name: one for name, one in self.processes.items() if isinstance(one, GatewayProcess)}
        return [one for name, one in gateways.items() if one.has_started and name not in leaving]

    def _scale(self) -> None:
        stage = self.rng.choice(topology.SCALABLE)
        self._num_asked[stage] += 1
        before = topology.num_replicas(self.settings, stage)
        after = self.rng.choice([num for num in (1, 2, 3) if num != before])
        self._scaling.ask(stage, before, after, float("inf"), float("inf"), self._scaled)

    def _scaled(self, problem: str) -> None:
        self.num_scaled["failed" if problem else "done"] += 1

    def _open(self) -> None:
        gateway = self.rng.choice(self._gateways)
        self._num_opened += 1
        case = random_case(
            self.rng, self._num_opened, self._vocabulary, MAX_MODEL_LEN, self._facts.num_blocks, BLOCK_SIZE
        )
        try:
            case.request = gateway.table.open(case.parsed(), None)
        except ApiError:
            return  # an edge is full
        gateway.ledger.add(case)
        if len(self._poisons) < self._num_poisons:
            points = poison.MIXED_POINTS if self._is_mixed else ("plan", "settle", "report")
            num_ids = self.rng.randrange(len(case.outcomes[0].ids)) if case.outcomes[0].ids else 0
            self._poisons[case.request_id] = one = poison.Poison(num_ids, self.rng.choice(points))
            num_in_one_turn = self.settings.schedule.max_steps_in_flight
            assert isinstance(num_in_one_turn, int)
            num_left = len(case.outcomes[0].ids) - max(num_ids, case.nums_given[0] if case.nums_given else 0)
            # A stream that a client resumes at its end needs no step.
            case.may_end = num_left <= (num_in_one_turn if one.point in ("plan", "report") else 0)

    def _abort(self) -> None:
        gateway = self.rng.choice(self._gateways)
        if not gateway.ledger.open_cases:
            return
        case = self.rng.choice(gateway.ledger.open_cases)
        assert case.request is not None
        if self.rng.random() < 0.5:
            case.is_aborted = True
            gateway.table.abort([case.request.id], "")
        else:
            case.has_left = case.is_over = True
            gateway.table.release(case.request)

    def _reset(self) -> None:
        gateway = self.rng.choice(self._gateways)
        try:
            gateway.unanswered_resets.add(gateway.resetter.begin())
        except ApiError:
            return  # the edge is full

    # ------------------------------------------------------------------------------------------------------- events

    def run(self) -> None:
        """Let things happen until nothing is left to happen. Raises AssertionError if anything is not as it must be."""
        while self._happens():
            self.num_events += 1
            assert self.num_events < MAX_EVENTS, "it never ends"
            self._scaling.turn()
        self._check_over()

    def _happens(self) -> bool:
        """Let one random thing happen. Returns False if nothing is left to happen."""
        network, rng = self.network, self.rng
        runnable = [name for name in self.names if self._is_runnable(name)]
        due = [name for name in self._due if self.recovery.may_start(name)]
        has_gateway = bool(self._gateways)
        drained = [name for name in self._replicas.draining if self._replicas.is_drained(name)]
        weights = {
            "wake": len(runnable),
            "answered": len(network.edges_to(SUPERVISOR)),
            "notice": 0.3 * len(self._unnoticed),
            "start": 0.3 * len(due),
            "ready": 0.5 * len(self._starting),
            "open": self._open_rate * (has_gateway and self._num_opens > 0),
            "abort": 0.03 * (has_gateway and self._num_aborts > 0),
            "reset": 0.03 * (has_gateway and self._num_resets > 0),
            "scale": 0.03 * (self._num_scalings > 0 and not self._scaling.is_busy),
            "drained": 0.3 * len(drained),
            "restart": 0.03 * (self._num_restarts > 0 and SCHEDULE in self.processes and self.is_ready(SCHEDULE)),
        }
        if not any(weights.values()):
            return False
        is_open = any(ledger.open_cases for ledger in self.ledgers)
        weights["kill"] = self._kill_rate * (self._num_kills > 0 and bool(self.processes)) * (1 if is_open else 0.05)
        match rng.choices(list(weights), list(weights.values()))[0]:
            case "wake":
                self._wake(rng.choice(runnable))
            case "answered":
                self._answered()
            case "notice":
                self._notice(rng.choice(self._unnoticed))
            case "start":
                name = rng.choice(due)
                self._due.remove(name)
                self.start(name)
            case "ready":
                self._ready(rng.choice(self._starting))
            case "open":
                self._num_opens -= 1
                self._open()
            case "abort":
                self._num_aborts -= 1
                self._abort()
            case "reset":
                self._num_resets -= 1
                self._reset()
            case "scale":
                self._num_scalings -= 1
                self._scale()
            case "drained":
                self._replicas.draining.remove(name := rng.choice(sorted(drained)))
                self._scaling.drained(name)
            case "restart":
                self._num_restarts -= 1
                self.send(SCHEDULE, m.HandOver())
            case "kill":
                for _ in range(rng.choice([1, 1, 2])):
                    self._kill_any()
        return True

    def _kill_any(self) -> None:
        weights = poison.KILL_WEIGHTS if self._has_poison else KILL_WEIGHTS
        weights = poison.MIXED_KILL_WEIGHTS if self._is_mixed else weights
        names = [name for name in self.processes if name.partition(".")[0] in weights]
        if names:
            self._num_kills -= 1
            # Processes that join do so for a few wakes only: else hardly one of them would ever die.
            likely = [weights[name.partition(".")[0]] * (5 if name in self._replicas.joining else 1) for name in names]
            self.kill(self.rng.choices(names, likely)[0])

    def _is_runnable(self, name: str) -> bool:
        process = self.processes.get(name)
        if isinstance(process, ExecuteProcess) and name in self._starting:
            return False  # it loads the model
        return process is not None and (bool(self.network.edges_to(name)) or process.has_work)

    def _wake(self, name: str) -> None:
        """Let a process take some of its messages, and handle them."""
        arrivals = []
        num_left = self.rng.choice([1, 2, 5, 1000])
        while num_left and (edges := self.network.edges_to(name)):
            arrivals.append(self.network.take(self.rng.choice(edges)))
            num_left -= 1
        self.stages[name].fill(arrivals)
        process = self.processes[name]
        try:
            process.wake()
        except poison.Poisoned as death:
            self.poisoned(name, death.request_ids)
            return
        if isinstance(process, ScheduleProcess) and self.rng.random() < 0.02:
            process.check()

    def poisoned(self, name: str, request_ids: list[int]) -> None:
        """A process dies of these requests."""
        poison.note_killers(self, request_ids)
        if name.startswith("detokenize."):
            for request_id in request_ids:
                self.killed_by[request_id].add(name)
        if name == SCHEDULE:
            poison.deliver_output(self, name)
        self.kill(name, is_poisoned=True)

    def _check_over(self) -> None:
        """Assert that every request has ended as it must, and that no process holds anything of it."""
        assert not self._scaling.is_busy, "a change of the number of processes never ends"
        assert sorted(self.processes) == sorted(self.names)
        assert self.recovery.is_over and self.network.num_queued == 0
        for ledger in self.ledgers:
            ledger.check_outcomes()
        for name, process in self.processes.items():
            if isinstance(process, ScheduleProcess):
                process.check_empty(self.num_deaths)
            else:
                process.check_empty()
            arena = self.stages[name].arrays.arena
            assert arena is None or arena.num_live == 0, f"{arena.num_live} slabs of {name} were not released"
