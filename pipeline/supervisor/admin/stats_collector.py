"""Collect a server's stats: the counts of every stage, and the supervisor's own facts about their processes."""

import os
import time
from collections.abc import Callable, Sequence

from pipeline.metrics.stats import ServerStats, SleepCounts, StageCounts, StageStats
from pipeline.runtime import messages as m
from pipeline.runtime.process.process_usage import NOTHING, usage_of
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.admin.questions import Answers, Questions
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.server_state import ServerState
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.version import VERSION


class StatsCollector:
    """Builds `ServerStats`. Keeps the last counts of each stage, for when it does not answer in time."""

    def __init__(
        self,
        resources: SharedResources,
        state: ServerState,
        table: ChildTable,
        url: str,
        questions: Questions,
        is_computing: Callable[[Child], bool],
        sleep: Callable[[], SleepCounts],
    ) -> None:
        """`is_computing`: whether a silent stage is not late (`Heartbeats.is_computing`). `sleep` returns the counts of
        the server's sleeps."""
        self._sleep = sleep
        self._resources = resources
        self._state = state
        self._table = table
        self._url = url
        self._questions = questions
        self._is_computing = is_computing
        self._started_s = time.monotonic()
        self._decoder: MessageDecoder[StageCounts] = MessageDecoder(StageCounts)
        self._counts: dict[str, tuple[float, StageCounts]] = {}
        """By stage: time of arrival, and the counts."""

    def gather(self, timeout_s: float, then: Callable[[ServerStats], None]) -> None:
        """Ask every ready stage for its counts. Calls `then` when all have answered, or after `timeout_s`, at most
        supervisor.health_timeout_s."""
        timeout_s = min(timeout_s, self._resources.settings.supervisor.health_timeout_s)
        children = self._table.in_flow_order()

        def made(answers: Answers) -> None:
            then(self._stats(children, answers))

        ready = [child.name for child in children if child.state in ("ready", "leaving")]
        self._questions.ask(ready, m.Count(0), timeout_s, made)

    def forget(self, name: str) -> None:
        """A process is gone for good."""
        self._counts.pop(name, None)

    def _stats(self, children: Sequence[Child], answers: Answers) -> ServerStats:
        now = time.monotonic()
        for name, answer in answers.items():
            self._counts[name] = now, self._decoder.decode(bytes(answer.body))
        own = usage_of(os.getpid())
        uptime_s = now - self._started_s
        stages = [
            StageStats(SUPERVISOR, os.getpid(), "ready", 0, uptime_s, own.rss_bytes, own.cpu_s, own.num_threads, None)
        ]
        for child in children:
            is_thread = child.pid == os.getpid() and not child.node
            usage = child.usage() if child.is_alive and not is_thread else NOTHING
            came, counts = self._counts.get(child.name, (now, None))
            is_late = child.state == "ready" and child.name not in answers and not self._is_computing(child)
            state = "late" if is_late else child.state
            stages.append(
                StageStats(
                    name=child.name,
                    pid=child.pid,
                    state=state,
                    num_restarts=child.num_restarts,
                    uptime_s=now - child.started_s if child.is_alive else 0.0,
                    rss_bytes=usage.rss_bytes,
                    cpu_s=usage.cpu_s,
                    num_threads=usage.num_threads,
                    counts=counts,
                    counts_age_s=now - came,
                    node=child.node,
                )
            )
        prepared, facts = self._state.prepared, self._state.facts
        return ServerStats(
            server=self._resources.server,
            pid=os.getpid(),
            version=VERSION,
            model=self._resources.settings.served_model_name or (prepared.model_name if prepared else ""),
            address=self._url,
            state=self._state.name,
            uptime_s=uptime_s,
            unix_s=time.time(),
            stages=stages,
            num_blocks=facts.num_blocks if facts else 0,
            block_size=facts.block_size if facts else 0,
            max_model_len=facts.max_model_len if facts else 0,
            quantization=facts.quantization if facts else "",
            kv_dtype=facts.kv_dtype if facts else "",
            adapters={one.name: one.id for one in self._resources.adapters.values()},
            backend=str(facts.backend) if facts else "",
            is_batch_invariant=facts is None or facts.is_batch_invariant,
            keys=self._resources.keys.usage(),
            sleep=self._sleep(),
        )
