"""Collect a server's stats: the counts of every stage, and the supervisor's own facts about their processes."""

import os
import time
from collections.abc import Callable, Sequence

import msgspec

from pipeline.metrics.stats import KeyUsage, ServerStats, StageCounts, StageStats
from pipeline.runtime import messages as m
from pipeline.runtime.channels import MessageDecoder
from pipeline.supervisor.admin_server import Answers, Questions
from pipeline.supervisor.process import Child
from pipeline.supervisor.process_usage import NOTHING, usage_of
from pipeline.version import VERSION


class StatsCollector:
    """Builds `ServerStats`. Keeps the last counts of each stage, for when it does not answer in time."""

    def __init__(
        self, server: str, supervisor: str, questions: Questions, is_computing: Callable[[Child], bool]
    ) -> None:
        """`is_computing`: whether a silent stage is not late (`Heartbeats.is_computing`)."""
        self._server = server
        self._supervisor = supervisor
        self._questions = questions
        self._is_computing = is_computing
        self._started_s = time.monotonic()
        self._decoder: MessageDecoder[StageCounts] = MessageDecoder(StageCounts)
        self._counts: dict[str, tuple[float, StageCounts]] = {}
        """By stage: time of arrival, and the counts."""

    def gather(
        self, facts: "ServerFacts", children: Sequence[Child], timeout_s: float, then: Callable[[ServerStats], None]
    ) -> None:
        """Ask every ready stage for its counts. Calls `then` when all have answered, or after `timeout_s`."""

        def made(answers: Answers) -> None:
            then(self._stats(facts, children, answers))

        ready = [child.name for child in children if child.state in ("ready", "leaving")]
        self._questions.ask(ready, m.Count(0), timeout_s, made)

    def forget(self, name: str) -> None:
        """A process is gone for good."""
        self._counts.pop(name, None)

    def _stats(self, facts: "ServerFacts", children: Sequence[Child], answers: Answers) -> ServerStats:
        now = time.monotonic()
        for name, answer in answers.items():
            self._counts[name] = now, self._decoder.decode(bytes(answer.body))
        own = usage_of(os.getpid())
        uptime_s = now - self._started_s
        stages = [
            StageStats(
                self._supervisor, os.getpid(), "ready", 0, uptime_s, own.rss_bytes, own.cpu_s, own.num_threads, None
            )
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
        return ServerStats(
            server=self._server,
            pid=os.getpid(),
            version=VERSION,
            model=facts.model,
            address=facts.address,
            state=facts.state,
            uptime_s=uptime_s,
            unix_s=time.time(),
            stages=stages,
            num_blocks=facts.execute.num_blocks if facts.execute else 0,
            block_size=facts.execute.block_size if facts.execute else 0,
            max_model_len=facts.execute.max_model_len if facts.execute else 0,
            quantization=facts.execute.quantization if facts.execute else "",
            kv_dtype=facts.execute.kv_dtype if facts.execute else "",
            adapters=facts.adapters,
            backend=str(facts.execute.backend) if facts.execute else "",
            is_batch_invariant=facts.execute is None or facts.execute.is_batch_invariant,
            keys=facts.keys,
        )


class ServerFacts(msgspec.Struct, frozen=True):
    """Facts of the supervisor that no stage reports."""

    model: str
    address: str
    state: str
    execute: m.ExecuteFacts | None
    adapters: dict[str, str] = {}
    keys: list[KeyUsage] = []
