"""What is measured in a thread beside the load: memory of all processes, turns, and prompt tokens computed twice."""

import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from tools.soak.turns.server import Asked

EVERY_S = 0.5
RECOMPUTED = "pipeline_schedule_recomputed_prompt_tokens_total"
TURNS = "pipeline_model_turns_total"
EXCUSED_TURNS = 2
"""So many turns after its schedule or execute was killed, a model may have computed prompt tokens again."""


class Watch:
    """A context manager around the load."""

    def __init__(self, asked: Asked, memory_bytes: int) -> None:
        self._asked, self._memory_bytes = asked, memory_bytes
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._recomputed: dict[str, float] = {}
        self._excused: dict[str, float] = {}
        """Until which number of turns, by model."""
        self.turns: dict[str, float] = {}
        self.most_bytes = 0
        self.most_by_kind: Counter[str] = Counter()
        """Of the largest sample."""
        self.num_recomputed = 0.0
        """Of models whose schedule or execute was killed."""
        self.faults: Counter[str] = Counter()

    def killed(self, stage: str, model: str) -> None:
        """A stage of a model is going to be killed."""
        if stage in ("schedule", "execute"):
            self._excused[model] = self.turns.get(model, 0.0) + EXCUSED_TURNS

    def __enter__(self) -> "Watch":
        self.turns = self._asked.metric(TURNS)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(EVERY_S):
            self._sample_memory()
            try:
                recomputed, turns = self._asked.metric(RECOMPUTED), self._asked.metric(TURNS)
            except OSError:
                continue  # a gateway that is too busy to answer
            self.see(recomputed, turns)

    def see(self, recomputed: dict[str, float], turns: dict[str, float]) -> None:
        """Note the values of the metrics, by model. A schedule that was killed counts from 0 again."""
        for name, value in recomputed.items():
            grown = value - min(value, self._recomputed.get(name, 0.0))
            if grown and turns.get(name, 0.0) <= self._excused.get(name, -1.0):
                self.num_recomputed += grown
            elif grown:
                self.faults[f"{name}: {grown:.0f} prompt tokens were computed twice, and no stage had been killed"] += 1
        self._recomputed, self.turns = recomputed, turns

    def _sample_memory(self) -> None:
        found = memory_of(self._asked.processes())
        if (total := found.total()) > self.most_bytes:
            self.most_bytes, self.most_by_kind = total, found


def memory_of(processes: Iterable[psutil.Process]) -> Counter[str]:
    """The memory of processes in bytes, by kind: what each has for itself, its part of files that are mapped (weights,
    libraries), and shared memory, which counts once, also where no process has it mapped."""
    found: Counter[str] = Counter()
    segments: dict[tuple[int, int], int] = {}
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        try:
            for line in (folder / "smaps_rollup").read_text().splitlines():
                name, _, rest = line.partition(":")
                if name in ("Pss_Anon", "Pss_File", "Pss_Shmem"):
                    found[name] += int(rest.split()[0]) << 10
            segments |= segments_of(folder / "fd")
        except OSError:
            continue  # it has ended
    found["Pss_Shmem"] = max(found["Pss_Shmem"], sum(segments.values()))
    return found


def segments_of(folder: Path) -> dict[tuple[int, int], int]:
    """The bytes in memory of the memfds in a folder of descriptors, by device and inode."""
    found = {}
    for link in folder.iterdir():
        with suppress(OSError):  # it is closed by now
            if str(link.readlink()).startswith("/memfd:"):
                status = link.stat()
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return found
