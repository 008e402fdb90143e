"""The admin server: requests, replies, and that no peer can block its loop."""

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import zmq

from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats, StageCounts
from pipeline.runtime import messages as m
from pipeline.supervisor.admin import admin_client, admin_server
from pipeline.supervisor.admin.admin_client import Admin, find_servers, is_running
from pipeline.supervisor.admin.admin_server import AdminServer
from pipeline.supervisor.admin.questions import MAX_OPEN_QUESTIONS, Questions
from pipeline.supervisor.reconfigure.changed_settings import changes
from pipeline.supervisor.restart.restart_log import RestartLog
from tests.rig import PATIENCE_S, Rig

_numbers = itertools.count()
STATS = ServerStats("1-ab", 1, "0", "m", "http://x", "serving", 1.0, 2.0, [])


class Bench:
    """An admin server whose stages are simulated by the test."""

    def __init__(self) -> None:
        self.name = f"{os.getpid()}-{next(_numbers):08x}"
        self.sent: list[tuple[str, m.ControlRequest]] = []
        self.names = ["gateway.0", "gateway.1", "schedule.0"]
        self.refuses: set[str] = set()
        self.timeouts_s: list[float] = []
        """The timeouts of stats requests."""
        self.context: zmq.Context[Any] = zmq.Context()
        self.questions = Questions(self._send)
        self.restarts: list[tuple[str, Callable[[float, str], None]]] = []
        self.reloads: list[Any] = []
        self.sleeps: list[Any] = []
        self.server_restarts: list[Any] = []
        self.restart_log = RestartLog()
        self.server = AdminServer(
            self.context,
            self.name,
            self.questions,
            self._stats,
            lambda: self.names,
            lambda name, done: self.restarts.append((name, done)),
            lambda *reload: self.reloads.append(reload),
            lambda: SettingsSource(sets=["log_level=debug"]),
            self.restart_log.trace,
            lambda *asked: self.sleeps.append(asked),
            lambda *asked: self.server_restarts.append(asked),
        )
        self.peer = self.context.socket(zmq.DEALER)
        self.peer.connect(admin_server.address_of(self.name))

    def _send(self, name: str, control_request: m.ControlRequest) -> bool:
        self.sent.append((name, control_request))
        return name not in self.refuses

    def send(self, message: Any) -> None:
        self.peer.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def turn_until(self, condition: Any) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            self.server.turn()
            self.questions.end_late()
            assert time.monotonic() < end
            time.sleep(0.001)

    def receive(self) -> Any:
        self.turn_until(lambda: self.peer.poll(0))
        return msgspec.msgpack.decode(self.peer.recv(), type=admin_server.AdminReply)

    def _stats(self, timeout_s: float, then: Callable[[ServerStats], None]) -> None:
        self.timeouts_s.append(timeout_s)
        then(STATS)

    def close(self) -> None:
        self.server.close()
        self.peer.close(linger=0)
        self.context.term()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def test_stats_return_the_request_s_nonce(bench: Bench) -> None:
    bench.send(admin_server.AskStats(77, 1.5))
    assert bench.receive() == admin_server.Stats(77, STATS)
    assert bench.timeouts_s == [1.5], "the request sets the timeout of stages"
    for timeout_s in (0.0, -1.0, 1e9, float("nan")):
        bench.send(admin_server.AskStats(78, timeout_s))
        assert isinstance(bench.receive(), admin_server.Problem)


def test_a_control_request_goes_to_the_named_stages_and_their_replies_return(bench: Bench) -> None:
    bench.send(admin_server.StageCommand(5, ["gateway"], m.Count(999)))
    bench.turn_until(lambda: len(bench.sent) == 2)
    assert [name for name, _ in bench.sent] == ["gateway.0", "gateway.1"]
    nonce = bench.sent[0][1].nonce
    bench.questions.answered("schedule.0", m.Answer(nonce, error="not part of this request"))
    bench.questions.answered("gateway.1", m.Answer(nonce, msgspec.Raw(b"\x01")))
    bench.questions.answered("gateway.1", m.Answer(nonce, msgspec.Raw(b"\x02")))
    bench.questions.answered("gateway.0", m.Answer(nonce, error="no such folder"))
    reply = bench.receive()
    assert reply.nonce == 5
    assert [(a.stage, bytes(a.body), a.error) for a in reply.answers] == [
        ("gateway.0", b"\xc0", "no such folder"),
        ("gateway.1", b"\x01", ""),
    ]


def test_a_stage_that_hangs_is_late_and_the_others_reply(bench: Bench) -> None:
    bench.send(admin_server.StageCommand(5, [], m.Count(0), timeout_s=0.05))
    bench.turn_until(lambda: len(bench.sent) == 3)
    bench.questions.answered("schedule.0", m.Answer(bench.sent[0][1].nonce, msgspec.Raw(b"\x01")))
    errors = {answer.stage: answer.error for answer in bench.receive().answers}
    assert errors == dict.fromkeys(("gateway.0", "gateway.1"), "did not answer within 0.05 s") | {"schedule.0": ""}
    bench.questions.answered("gateway.0", m.Answer(bench.sent[0][1].nonce))  # too late: dropped


def test_a_stage_that_dies_or_refuses_a_message_is_not_waited_for(bench: Bench) -> None:
    bench.refuses = {"gateway.0"}
    bench.send(admin_server.StageCommand(5, ["gateway"], m.Count(0), timeout_s=600))
    bench.turn_until(lambda: len(bench.sent) == 2)
    bench.questions.lost("gateway.1")
    assert all(answer.error for answer in bench.receive().answers)


@pytest.mark.parametrize(
    ("question", "words"),
    [
        (admin_server.StageCommand(3, ["execute"], m.Count(0)), "no stage 'execute' is ready; ready: gateway.0"),
        (admin_server.StageCommand(3, [], m.Count(0), timeout_s=0), "timeout_s must be above 0"),
        (admin_server.StageCommand(3, [], m.Count(0), timeout_s=float("nan")), "timeout_s must be above 0"),
        (admin_server.StageCommand(3, [], m.Count(0), timeout_s=1e9), "at most 600"),
    ],
)
def test_an_invalid_request_gets_a_clear_error(bench: Bench, question: Any, words: str) -> None:
    bench.send(question)
    reply = bench.receive()
    assert isinstance(reply, admin_server.Problem)
    assert reply.nonce == 3
    assert words in reply.message
    assert bench.sent == []


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x91" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"\x92\xa1\xff\x00"])
def test_garbage_gets_an_error_and_harms_no_other_client(bench: Bench, data: bytes) -> None:
    bench.send(data)
    assert isinstance(bench.receive(), admin_server.Problem)
    bench.peer.send_multipart([b"a", b"b", b"c"])
    assert isinstance(bench.receive(), admin_server.Problem)
    bench.send(admin_server.AskStats(1))
    assert bench.receive() == admin_server.Stats(1, STATS)


def test_a_client_that_sends_too_much_is_disconnected_and_others_are_served(bench: Bench) -> None:
    flooder = bench.context.socket(zmq.DEALER)
    flooder.connect(admin_server.address_of(bench.name))
    flooder.send(b"x" * (admin_server.MAX_QUESTION_BYTES + 1))
    bench.send(admin_server.AskStats(1))
    assert bench.receive() == admin_server.Stats(1, STATS)
    assert not flooder.poll(50)
    flooder.close(linger=0)


CONNECT_AS_USER = """
import os, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setuid(int(sys.argv[3]))
context = zmq.Context()
socket = context.socket(zmq.DEALER)
monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send(bytes.fromhex(sys.argv[2]))
assert monitor.poll(20000), "nothing happened"
print("let in" if recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED else "refused")
socket.disable_monitor()
socket.close()
context.destroy(linger=0)
"""


@pytest.mark.parametrize("is_other", [True, False])
def test_other_users_are_rejected(is_other: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without root, the roles are reversed: a server that expects another user rejects this one."""
    user = os.geteuid()
    if is_other and user == 0:
        user = 65534
    elif is_other:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    bench = Bench()
    try:
        words = [
            admin_server.address_of(bench.name),
            msgspec.msgpack.encode(admin_server.AskStats(1)).hex(),
            str(user),
        ]
        done = subprocess.run(
            [sys.executable, "-c", CONNECT_AS_USER, *words], capture_output=True, text=True, timeout=60, check=True
        )
        assert done.stdout.strip() == ("refused" if is_other else "let in")
    finally:
        bench.close()


def test_open_requests_are_bounded_and_so_is_the_work_of_one_turn(bench: Bench) -> None:
    peers = [bench.context.socket(zmq.DEALER) for _ in range(8)]
    for peer in peers:
        peer.connect(admin_server.address_of(bench.name))
        for nonce in range(1, 13):
            peer.send(msgspec.msgpack.encode(admin_server.StageCommand(nonce, ["schedule"], m.Count(0), timeout_s=600)))
    bench.turn_until(lambda: len(bench.sent) == MAX_OPEN_QUESTIONS)
    bench.turn_until(lambda: any(peer.poll(0) for peer in peers))
    problem = next(peer for peer in peers if peer.poll(0)).recv()
    assert "ask again later" in msgspec.msgpack.decode(problem, type=admin_server.AdminReply).message
    assert len(bench.sent) == MAX_OPEN_QUESTIONS
    for peer in peers:
        peer.close(linger=0)


def test_a_flood_from_a_client_that_reads_nothing_does_not_block_the_server(bench: Bench) -> None:
    non_reader = bench.context.socket(zmq.DEALER)
    non_reader.set_hwm(100_000)
    non_reader.setsockopt(zmq.RCVHWM, 1)
    non_reader.connect(admin_server.address_of(bench.name))
    for nonce in range(5000):
        non_reader.send(msgspec.msgpack.encode(admin_server.AskStats(nonce)))
    bench.send(admin_server.AskStats(1))
    assert bench.receive() == admin_server.Stats(1, STATS)
    non_reader.close(linger=0)


def test_every_stage_answers_a_count_outside_of_its_own_loop(tmp_path: Any) -> None:
    with Rig("schedule") as rig:
        rig.start(m.ExecuteFacts(16, 16, 64, 100))
        rig.load()
        rig.send(m.Count(41))
        answer = rig.receive("supervisor", m.Answer)
        assert (answer.nonce, answer.error) == (41, "")
        counts = msgspec.msgpack.decode(answer.body, type=StageCounts)
        assert counts.num_received == 3, "Start, Ping, Count"
        edges = {edge.to: edge for edge in counts.edges}
        assert edges["supervisor.0"].num_sent == 2, "Ready, Pong"
        assert set(edges) == {"supervisor.0", "execute.0", "detokenize.0", "ingest.0", "gateway.0"}


def test_a_server_is_found_by_its_admin_socket(bench: Bench) -> None:
    assert bench.name in find_servers()
    assert is_running(bench.name) and not is_running("1-ab")


def test_a_server_that_one_reading_of_the_kernel_s_list_left_out_is_found(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`pipeline stop` did nothing then, and said so neither by words nor by its exit status."""
    for read in (["", admin_client._sockets()], [admin_client._sockets(), ""]):
        left = iter(read)
        monkeypatch.setattr(admin_client, "_sockets", lambda left=left: next(left))
        assert bench.name in find_servers()
        monkeypatch.undo()


def test_a_name_with_the_pid_of_another_process_is_no_server() -> None:
    """Any user can listen at any name: `pipeline stop` would end a process of the user who runs it."""
    with subprocess.Popen(["sleep", "60"]) as other, socket.socket(socket.AF_UNIX) as one:
        try:
            one.bind(f"\0pipeline/{other.pid}-abcd/admin")
            one.listen()
            assert f"{other.pid}-abcd" not in find_servers()
        finally:
            other.kill()
    with socket.socket(socket.AF_UNIX) as own:
        own.bind(f"\0pipeline/{os.getpid()}-abcd/admin")
        assert f"{os.getpid()}-abcd" not in find_servers(), "no process listens"
        own.listen()
        assert f"{os.getpid()}-abcd" in find_servers()


def test_a_server_that_does_not_answer_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_client, "ANSWER_S", 0.0)
    with Admin(bench.name) as client, pytest.raises(UserError, match=r"did not answer within 0\.05 s"):
        client.stats(0.05)


def test_a_restart_is_answered_when_the_successor_serves_or_with_the_reason_why_there_is_none(bench: Bench) -> None:
    bench.send(admin_server.RestartStage(5, "schedule.0"))
    bench.turn_until(lambda: bench.restarts)
    (name, done) = bench.restarts.pop()
    assert name == "schedule.0"
    done(0.25, "")
    assert bench.receive() == admin_server.StageRestarted(5, 0.25)
    bench.send(admin_server.RestartStage(6, "schedule.0"))
    bench.turn_until(lambda: bench.restarts)
    bench.restarts.pop()[1](0.0, "too little memory")
    assert bench.receive() == admin_server.Problem(6, "too little memory")


def test_sleep_is_answered_when_the_server_sleeps_or_with_the_reason_why_it_does_not(bench: Bench) -> None:
    for nonce, problem in ((5, ""), (6, "there is no room")):
        bench.send(admin_server.ChangeSleep(nonce, sleeps=True, wakes_on_request=True))
        bench.turn_until(lambda: bench.sleeps)
        sleeps, wakes_on_request, done = bench.sleeps.pop()
        assert (sleeps, wakes_on_request) == (True, True)
        done(problem)
        assert bench.receive() == (
            admin_server.Problem(nonce, problem) if problem else admin_server.SleepChanged(nonce)
        )


def test_a_stage_that_is_not_ready_can_t_be_restarted(bench: Bench) -> None:
    bench.send(admin_server.RestartStage(5, "schedule"))
    problem = bench.receive()
    assert problem.message == "no stage 'schedule' is ready; ready: gateway.0, gateway.1, schedule.0"
    assert not bench.restarts


def test_a_reload_is_answered_with_what_has_changed(bench: Bench) -> None:
    bench.send(admin_server.AskSource(4))
    assert bench.receive() == admin_server.Source(4, SettingsSource(sets=["log_level=debug"]))
    settings = Settings(log_level="debug")
    source = SettingsSource(config="/etc/pipeline.toml")
    bench.send(admin_server.Reload(5, settings, source, True))
    bench.turn_until(lambda: bench.reloads)
    (given, given_source, is_dry_run, done) = bench.reloads.pop()
    assert (given, given_source) == (settings, source) and is_dry_run
    changed = changes(Settings(), settings)
    done(changed, "execute.0 was not restarted: no", "added bob")
    assert bench.receive() == admin_server.Reloaded(5, changed, "execute.0 was not restarted: no", "added bob")
