"""`pipeline record traffic`: the requests of a running server as a trace, without text.

The command takes what schedule has noted, about once a second, and writes it at once, so that a trace is valid if the
command is killed. At the end it sorts the lines by time.
"""

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec
from rich.console import Console

from pipeline.cli.complain import complain
from pipeline.cli.json_output import as_json
from pipeline.cli.out_file import PRIVATE, output, require_writable, write_output, writing
from pipeline.cli.replay.signals import signals_as_interrupt
from pipeline.cli.server_choice import choose_server
from pipeline.config.load import ConfigError
from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile, TrafficRecord, TrafficReply, line_of
from pipeline.runtime import messages as m
from pipeline.runtime.files.private_files import open_output
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.admin.admin_client import Admin

STAGE = "schedule"
BLOCK_TOKENS = 64
MAX_BYTES = 2**28
SALT_BYTES = 32
TAKE_S = 1.0
LEASE_S = 15.0
FAILED = 1


class TraceFile:
    """A trace that grows up to a limit. Raises OSError."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: list[tuple[float, bytes]] = []
        self._file: BinaryIO = os.fdopen(open_output(path), "wb")
        self.num_bytes = 0
        self.is_full = False

    @property
    def num_requests(self) -> int:
        return len(self._lines)

    def add(self, records: list[TrafficRecord]) -> None:
        """Write these, as far as there is room."""
        for record in records:
            line = line_of(record)
            if self.num_bytes + len(line) > self._max_bytes:
                self.is_full = True
                break
            self._lines.append((record.timestamp, line))
            self._file.write(line)
            self.num_bytes += len(line)
        self._file.flush()

    def close(self) -> None:
        """Sort the lines by time. Until that is done, the file has them in the order in which requests ended."""
        self._lines.sort(key=lambda line: line[0])
        self._file.close()
        if self._path.is_symlink() or not self._path.is_file():
            return  # a pipe or a device has no order to change, and an open descriptor is not replaced
        with output(self._path, PRIVATE) as file:
            file.writelines(line for _, line in self._lines)


class _Recording:
    """The recording at the server."""

    def __init__(self, server: Admin, block_tokens: int) -> None:
        self._server = server
        self._salt = secrets.token_bytes(SALT_BYTES)
        self._decoder: MessageDecoder[TrafficReply] = MessageDecoder(TrafficReply)
        self._send(m.RecordTraffic(0, self._salt, block_tokens, LEASE_S))

    def take(self, *, goes_on: bool) -> TrafficReply:
        return self._decoder.decode(bytes(self._send(m.TakeTraffic(0, self._salt, goes_on))))

    def _send(self, request: m.ControlRequest) -> msgspec.Raw:
        (answer,) = self._server.send_command(request, [STAGE]).values()
        if answer.error:
            raise UserError(answer.error)
        return answer.body


def record_traffic(args: argparse.Namespace) -> int:
    """Record until the time is up, the file is full, Ctrl-C, or another termination signal. Returns 1 if the server
    can't be recorded, or ends. Raises ConfigError."""
    if args.no_sent:
        raise ConfigError(["--no-sent: traffic has no messages; remove it"])
    require_writable(args.out, "--out")
    if args.replica is not None:
        require_writable(args.replica, "--replica")
    try:
        with Admin(choose_server(args)) as server, signals_as_interrupt(), writing(args.out, "--out"):
            recording = _Recording(server, args.block_tokens or BLOCK_TOKENS)
            file = TraceFile(args.out, args.max_bytes or MAX_BYTES)
            try:
                num_lost, profile = _take_all(recording, file, args.seconds)
            finally:
                file.close()
    except UserError as error:
        complain("pipeline record", error)
        return FAILED
    if file.is_full:
        print("pipeline record: ended early: the file reached its size limit", file=sys.stderr)
    if num_lost:
        complain("pipeline record", f"{num_lost:,} requests were lost: too many at once", "warning")
    print(f"{args.out}: {file.num_requests:,} requests, {file.num_bytes:,} bytes")
    return _write_profile(args.replica, profile) if args.replica is not None else 0


def _take_all(recording: _Recording, file: TraceFile, seconds: float | None) -> tuple[int, ReplicaProfile]:
    """Write what the server notes until the end. Returns how many requests it lost, and its profile."""
    end = time.monotonic() + (seconds if seconds is not None else float("inf"))
    num_lost = 0
    screen = Console(stderr=True, highlight=False)
    try:
        with screen.status("recording traffic; Ctrl-C ends it") as status:
            while (left_s := end - time.monotonic()) > 0 and not file.is_full:
                time.sleep(min(left_s, TAKE_S))
                reply = recording.take(goes_on=True)
                num_lost += reply.num_lost
                file.add(reply.records)
                status.update(f"recording traffic: {file.num_requests:,} requests; Ctrl-C ends it")
    except KeyboardInterrupt:
        pass
    reply = recording.take(goes_on=False)
    if not file.is_full:
        file.add(reply.records)
    return num_lost + reply.num_lost, reply.profile


def _write_profile(path: Path, profile: ReplicaProfile) -> int:
    if not profile.is_known:
        print(
            f"pipeline record: error: {path} is not written: the server has computed too little to know its speed",
            file=sys.stderr,
        )
        return FAILED
    with writing(path, "--replica"):
        write_output(path, as_json(profile))
    print(f"{path}: the speed and the size of the server")
    return 0


def write_trace(path: Path, records: Iterable[TrafficRecord]) -> None:
    """Write a trace. Raises OSError."""
    with output(path) as file:
        file.writelines(line_of(record) for record in records)
