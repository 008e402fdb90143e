"""What the real `Scaling` does with the model's processes."""

from typing import TYPE_CHECKING

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.reconfigure.stage_processes import RECEIVERS
from tests.recovery.stages import GatewayProcess, IngestProcess

if TYPE_CHECKING:
    from tests.recovery.supervised import SupervisedProcesses


class ModelProcesses:
    """Implements `scaling.Processes`."""

    def __init__(self, server: "SupervisedProcesses") -> None:
        self._server = server
        self.joining: set[str] = set()
        self.leaving: set[str] = set()
        self.draining: set[str] = set()

    def add(self, name: str) -> None:
        self._server.network.open(name)
        self._server.names.append(name)
        self.joining.add(name)
        self._server.inform(name)

    def may_start(self, name: str) -> bool:
        return self._server.recovery.may_start(name)

    def start(self, name: str) -> None:
        self._server.start(name)

    def join(self, name: str) -> None:
        self.joining.remove(name)

    def may_leave(self, name: str) -> bool:
        return self._server.is_ready(name)

    def leave(self, name: str) -> None:
        self.leaving.add(name)

    def drain(self, name: str) -> bool:
        self.draining.add(name)
        return False

    def is_drained(self, name: str) -> bool:
        """Whether a process has nothing left to do. It may get more, and what is on its way to it counts nowhere."""
        match self._server.processes.get(name):
            case GatewayProcess() as gateway:
                return not gateway.table.num_open and not gateway.unanswered_resets
            case IngestProcess() as ingest:
                return not ingest.has_work
        return True

    def stop(self, name: str) -> None:
        """As a kill: what it has sent last may be lost."""
        if name in self._server.processes:
            self._server.kill(name)

    def remove(self, name: str) -> None:
        self.draining.discard(name)
        if name not in self._server.names:
            return
        if name in self._server.processes:
            self._server.kill(name)
        self._server.forget(name)
        self.joining.discard(name)
        self.leaving.discard(name)
        self._server.inform(name)

    def is_known(self, name: str) -> bool:
        return self._server.recovery.is_known(name)

    def rescale(self, stage: str, num: int) -> tuple[int, set[str]]:
        server = self._server
        server.settings = topology.with_replicas(server.settings, stage, num)
        epoch = server.recovery.next_epoch()
        awaited = {name for name in server.alive_or_unnoticed() if topology.stage_of(name) in RECEIVERS[stage]}
        for name in sorted(awaited):
            server.send(name, m.Rescaled(epoch, stage, num))
        return epoch, awaited
