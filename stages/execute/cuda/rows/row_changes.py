"""Sends the row changes of steps to the GPU."""

from pipeline.stages.execute.cuda.graphs.step_graphs import StepGraphs
from pipeline.stages.execute.cuda.rows.batches import EMPTY, Batch
from pipeline.stages.execute.cuda.rows.device_rows import DeviceRows
from pipeline.stages.execute.cuda.rows.staging import Run, Staging, num_words, split_runs


class RowChangeSender:
    """Owned by the runner."""

    def __init__(self, rows: DeviceRows, staging: Staging, step_graphs: StepGraphs) -> None:
        self._rows, self._staging, self._step_graphs = rows, staging, step_graphs

    def runs_of(self, batch: Batch) -> list[Run]:
        """The changes to send with a step. Those that don't fit into its words are sent ahead of it."""
        runs = self._rows.take_runs()
        room = self._staging.room(batch)
        while num_words(runs) > room:
            first, runs = split_runs(runs, self._staging.room(EMPTY))
            # Only hundreds of long prompts get here, and computing them takes far longer than this wait.
            self._apply(first)
        return runs

    def flush(self) -> None:
        """Send all changes now."""
        if runs := self.runs_of(EMPTY):
            self._apply(runs)

    def _apply(self, runs: list[Run]) -> None:
        slot = self._staging.take()
        self._staging.fill(slot, EMPTY, runs, one_each=True)
        self._step_graphs.apply()
        slot.done.record()
        slot.done.synchronize()
        self._staging.give(slot)
