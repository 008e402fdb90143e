"""The recordings of one stage: those that commands ask for, and the one for the case that it dies."""

from typing import Any

from pipeline.errors import UserError
from pipeline.replay.crash_recording import recording_of
from pipeline.replay.recorder import RecordingContext, RecordState, header_of
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.stage import Stage


class Recordings:
    """Gives the stage its replay context. There is one recording at a time."""

    def __init__(self, stage: Stage[Any]) -> None:
        """Begins the recording that the launch asks for."""
        self._stage = stage
        self._last: RecordingContext | None = None
        """The last recording that was asked for, until it has been ended and written."""
        if stage.launch.record is not None:
            self.start(stage.launch.record, from_start=True)
        elif (recording := recording_of(lambda: stage.launch, stage.memories, stage.log)) is not None:
            stage.use_context(recording)

    def start(self, order: m.Record, *, from_start: bool = False) -> None:
        """Start recording. Raises UserError if the stage is already recorded or is a replay, OSError if the file can't
        be written."""
        stage, before = self._stage, self._last
        if stage.launch.address.startswith("tcp://"):
            raise UserError(f"{stage.name} can't be recorded, because it runs on another host (execute.launcher)")
        if before is not None and not before.ends_alone():
            raise UserError(f"{stage.name} is already being recorded into {before.path}")
        if before is not None and not before.state.is_closed:
            raise UserError(f"{stage.name} is still writing its last recording into {before.path}")
        if stage.replay_context.is_replaying:
            raise UserError(f"{stage.name} is a replay and can't be recorded")
        header = header_of(stage.launch, order, from_start=from_start)
        self._last = RecordingContext(order, header, stage.memories, stage.log)
        if isinstance(stage.replay_context, RecordingContext):
            stage.replay_context.finish("another recording began")
        stage.use_context(self._last)

    def keep(self, path: str) -> RecordState:
        """Keep a recording running, for the client that started it. Returns its state."""
        if self._last is None or self._last.path != path:
            return RecordState(0, 0, ended=f"{self._stage.name} no longer records into that file", is_closed=True)
        self._last.keep()
        return self._last.state

    def end(self, path: str = "") -> RecordState:
        """End the recording; a thread writes the rest of it. Raises UserError if there is none."""
        stage, recording = self._stage, self._last
        if recording is None or (path and recording.path != path):
            raise UserError(f"{stage.name} is not being recorded{f' into {path}' if path else ''}")
        recording.finish("who began it ended it")
        if stage.replay_context is recording:
            stage.use_context(ReplayContext())
        state = recording.state
        if state.is_closed:
            self._last = None
        return state

    def close(self) -> None:
        (self._last or self._stage.replay_context).close()
