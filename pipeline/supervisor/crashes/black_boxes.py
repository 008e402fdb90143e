"""Black boxes: for each process of a stage, memory in which it leaves what explains its death.

    created for the launch ──► the process writes ──► it dies ──► read ──► freed when its successor is ready

They are anonymous files of this process, so they outlive a stage that is killed, and take memory only for what is
written.
"""

import os
from collections.abc import Mapping

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.process import black_box


class BlackBoxes:
    """Owns the black boxes of the newest two processes of each stage: one may still serve while the other starts."""

    def __init__(self, settings: Settings) -> None:
        supervisor = settings.supervisor
        self._recording_bytes = supervisor.crash_recording_bytes if supervisor.crash_reports else 0
        self._first_recorded = 1 if supervisor.record_first_processes else 2
        """Incarnation."""
        self._boxes: dict[tuple[str, int], m.BlackBox] = {}
        """By name and incarnation."""

    def create(self, name: str, incarnation: int) -> m.BlackBox:
        """For a process that is about to start; frees those of all processes but the one before."""
        if known := [number for one, number in self._boxes if one == name]:
            self.keep_only(name, max(known))
        fds: list[int] = []
        try:
            is_recorded = incarnation >= self._first_recorded and self._recording_bytes > 0
            for part in ("stacks", "black-box", "recording")[: 2 + is_recorded]:
                fds.append(os.memfd_create(f"pipeline-{name}-{part}", os.MFD_CLOEXEC))  # noqa: PERF401 - closed below
            os.ftruncate(fds[1], black_box.NUM_BYTES)
        except OSError:
            for fd in fds:
                os.close(fd)
            raise
        recording_fd = fds[2] if is_recorded else -1
        self._boxes[name, incarnation] = m.BlackBox(fds[0], fds[1], recording_fd, self._recording_bytes)
        return self._boxes[name, incarnation]

    def get(self, name: str, incarnation: int) -> m.BlackBox | None:
        return self._boxes.get((name, incarnation))

    def fill(self, name: str, incarnation: int, stacks: bytes, memory: bytes) -> None:
        """Keep what a process on another host has left."""
        if (box := self._boxes.get((name, incarnation))) is not None:
            os.pwrite(box.stacks_fd, stacks, 0)
            os.pwrite(box.memory_fd, memory[: black_box.NUM_BYTES], 0)

    def at_work(self, name: str, incarnation: int) -> list[int]:
        """The ids of the requests that the threads of a process were working on when it died."""
        box = self._boxes.get((name, incarnation))
        found = [] if box is None else black_box.breadcrumbs_of(box)
        return list(dict.fromkeys(one.request_id for one in found))

    def suspects(self, name: str, incarnations: Mapping[str, int]) -> list[int]:
        """The ids of the requests of which each may be the reason why this process has crashed: those that its threads
        were working on, or else all that schedule has listed, if it or a rank of the executor has crashed.
        `incarnations` are those of the processes, by name."""
        if at_work := self.at_work(name, incarnations[name]):
            return at_work
        box = self._boxes.get((topology.SCHEDULE, incarnations[topology.SCHEDULE]))
        if box is None or topology.stage_of(name) not in ("schedule", "execute"):
            return []
        return black_box.suspects_of(box)

    def keep_only(self, name: str, incarnation: int) -> None:
        """Free the black boxes of all other processes of this name."""
        for one, number in list(self._boxes):
            if one == name and number != incarnation:
                self._free(name, number)

    def free(self, name: str) -> None:
        """Free those of a process that is gone for good."""
        for one, number in list(self._boxes):
            if one == name:
                self._free(name, number)

    def _free(self, name: str, incarnation: int) -> None:
        for fd in self._boxes.pop((name, incarnation)).fds:
            os.close(fd)

    def close(self) -> None:
        for name, incarnation in list(self._boxes):
            self._free(name, incarnation)
