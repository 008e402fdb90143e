"""Runs a stage from a recording, in a process of its own as under the supervisor, or in this one."""

import importlib
import os
import secrets
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.replay import format as f
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.model import generation_config
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.supervisor.processes.process import ChildProcess

LAST_WORDS_S = 0.5


class Replayed(msgspec.Struct, frozen=True):
    header: f.Header
    counts: dict[str, int]
    """Numbers of wakes and messages that the stage received, and of what was left out."""
    took_s: float
    flaw: str
    """Why the recording is incomplete."""


def replay(stage: str, path: Path, out: Path, *, paced: bool, inline: bool) -> Replayed:
    """Run `stage` from the recording at `path`, and write what it sends to `out`. Raises UserError if the file is not a
    recording of this stage, or if the stage deviates from it."""
    with f.RecordingReader(path) as reader:
        header = reader.header
        settings = f.settings_of(header)
        for _ in reader:
            pass  # refuse a damaged file before a stage is started
        flaw = reader.flaw
    if header.stage != stage:
        raise UserError(f"{path} is a recording of {header.name}, not of {stage}")
    if out.exists() and out.samefile(path):
        raise UserError(f"--out {out} is the recording itself")
    with TemporaryDirectory(prefix="pipeline-generation-") as folder:
        took_s = _run(header, _with_generation(settings, header, path, Path(folder)), path, out, paced, inline)
    with f.RecordingReader(out) as capture:
        for _ in capture:
            pass
        assert capture.end is not None, f"{out} has no end, although the stage ended without an error"
        return Replayed(header, capture.end.counts, took_s, flaw)


def _with_generation(settings: Settings, header: f.Header, path: Path, folder: Path) -> Settings:
    """The settings with the recorded sampling parameters, in `folder`, instead of the recorded server's folder, which
    may be gone. Raises UserError if the recording does not have them and the folder can't be used."""
    if not generation_config.names_folder(settings):
        return settings
    if header.generation is not None:
        recorded = msgspec.structs.asdict(header.generation) | msgspec.structs.asdict(header.excluded)
        generation_config.save(recorded, folder)
        return msgspec.structs.replace(settings, generation_config=str(folder))
    try:
        generation_config.load(settings, header.model_dir)
    except UserError as error:
        raise UserError(
            f"{path} does not contain the sampling parameters of the folder in the recorded server's setting "
            f"generation_config, and the folder can't be used: {error}"
        ) from error
    return settings


def _run(header: f.Header, settings: Settings, path: Path, out: Path, paced: bool, inline: bool) -> float:
    """Run the stage. Returns the time that it took."""
    entry = topology.INSTANT if header.instant else topology.row(header.stage).entry
    server = f"replay-{os.getpid()}-{secrets.token_hex(4)}"
    supervisor = address_of(server, SUPERVISOR, 1)
    death_read, death_write = os.pipe()
    try:
        launch = m.Launch(
            stage=header.stage,
            replica=header.replica,
            rank=header.rank,
            incarnation=header.incarnation,
            entry=entry,
            settings=settings,
            model_dir=header.model_dir,
            address=address_of(server, header.name, 1),
            peers=[m.PeerInbox(name, supervisor if name == SUPERVISOR else "", 16) for name in header.peers],
            segments=[],
            death_fd=death_read,
            replay=m.Replay(str(path.absolute()), str(out.absolute()), paced),
            facts=header.launch_facts,
            incarnations=header.incarnations,
            crash_counts=header.crash_counts,
        )
        begun = time.monotonic()
        if inline:
            importlib.import_module(entry).run(launch)
        else:
            _run_child(launch, supervisor)
        return time.monotonic() - begun
    finally:
        os.close(death_read)
        os.close(death_write)


def _run_child(launch: m.Launch, supervisor: str) -> None:
    """Run the stage as a process. Raises UserError with its last message if it fails."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    inbox: Inbox[m.SupervisorInbox] = Inbox(context, supervisor, m.SupervisorInbox)
    try:
        child = ChildProcess(launch, launch.settings.execute.num_threads or len(os.sched_getaffinity(0)))
        try:
            while child.is_alive:  # no deadline: a recording may take days, and the user can interrupt
                child.wait(1.0)
            if child.exit_code:
                reason = child.describe_end()
                while inbox.wait(LAST_WORDS_S) and (message := inbox.receive()) is not None:
                    if isinstance(message, m.StageFailed):
                        reason = message.reason
                        break
                raise UserError(reason)
        finally:
            child.close()
    finally:
        inbox.close()
        context.term()
