"""The supervisor's parts; end-to-end tests cover its lifecycle."""

import errno
import logging
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from pipeline.config.by_device import CPU_KV_BYTES
from pipeline.config.settings import DetokenizeSettings, ExecuteSettings, GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm import segment
from pipeline.supervisor.processes.health import HealthChecks, HealthRound
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.listeners import listen
from pipeline.supervisor.stopping import Stopping
from pipeline.supervisor.supervisor import Supervisor


class FakeChild:
    def __init__(self, name: str, state: str = "ready") -> None:
        self.name, self.state, self.pid = name, state, os.getpid()


def none_computes(child: Any) -> bool:
    """No executor computes."""
    return False


LOAD = m.ScheduleLoad(1, 2, 3, 4, 5, 12)


def test_stages_that_answer_are_ready_and_the_server_is_ok() -> None:
    children: list[Any] = [FakeChild("schedule.0"), FakeChild("gateway.0")]
    round_ = HealthRound("gateway.0", nonce=7, timeout_s=5)
    round_.answered("schedule.0", m.Pong(1, LOAD))
    assert not round_.is_over(children)
    round_.answered("gateway.0", m.Pong(1, m.GatewayLoad(3)))
    assert round_.is_over(children)
    health = round_.result(children, none_computes)
    assert (health.nonce, health.status, health.schedule) == (7, "ok", LOAD)
    assert all(stage.answer_ms >= 0 for stage in health.stages)


def test_a_stage_that_does_not_answer_in_time_is_late() -> None:
    children: list[Any] = [FakeChild("schedule.0"), FakeChild("execute.0")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=0.0)
    round_.answered("schedule.0", m.Pong(1, LOAD))
    assert round_.is_over(children)
    health = round_.result(children, none_computes)
    assert (health.status, [stage.state for stage in health.stages]) == ("late", ["ready", "late"])
    assert health.stages[1].answer_ms < 0


def test_an_executor_that_computes_is_not_late() -> None:
    children: list[Any] = [FakeChild("schedule.0"), FakeChild("execute.0")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=0.0)
    health = round_.result(children, lambda child: bool(child.name == "execute.0"))
    assert (health.status, [stage.state for stage in health.stages]) == ("late", ["late", "ready"])


def test_a_starting_stage_is_reported_as_starting() -> None:
    children: list[Any] = [FakeChild("execute.0", "starting")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=5)
    assert round_.result(children, none_computes).status == "starting"


def test_however_often_someone_asks_a_stage_that_answers_nothing_gets_no_more_pings() -> None:
    children: list[Any] = [FakeChild("schedule.0"), FakeChild("execute.0"), FakeChild("ingest.0", "recovering")]
    pinged: list[str] = []
    found: list[m.Health] = []
    checks = HealthChecks(
        lambda name, _: pinged.append(name),
        lambda _, health: found.append(health),
        none_computes,
        lambda child: bool(child.name == "execute.0"),
    )
    for nonce in range(3):
        checks.start("gateway.0", nonce, 60.0, children)
        checks.answered(nonce + 1, "schedule.0", m.Pong(nonce + 1, LOAD), children)
    assert pinged == ["schedule.0"] * 3
    states = [[stage.state for stage in health.stages] for health in found]
    assert states == [["ready", "late", "recovering"]] * 3, "and the answer does not wait for it"


def test_a_health_round_goes_on_after_the_supervisor_was_suspended() -> None:
    children: list[Any] = [FakeChild("schedule.0")]
    found: list[m.Health] = []
    checks = HealthChecks(lambda *_: None, lambda _, health: found.append(health), none_computes, none_computes)
    checks.start("gateway.0", 7, -100.0, children)
    checks.suspended(160.0)
    checks.end_rounds(children)
    assert not found
    checks.answered(1, "schedule.0", m.Pong(1, LOAD), children)
    assert [health.status for health in found] == ["ok"]


def test_a_port_in_use_is_an_error_that_names_the_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: .* gateway.port"):
            listen("127.0.0.1", port)


def test_several_gateways_share_a_port_that_no_other_server_can_use() -> None:
    sockets = listen("127.0.0.1", 0, 3)
    try:
        (port,) = {one.getsockname()[1] for one in sockets}
        assert len(sockets) == 3
        for num_sockets in (1, 2):
            with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: .* gateway.port"):
                listen("127.0.0.1", port, num_sockets)
    finally:
        for one in sockets:
            one.close()


def test_replicas_have_names_peers_and_a_share_of_the_credits() -> None:
    settings = Settings(
        gateway=GatewaySettings(replicas=3, max_open_sequences=10), detokenize=DetokenizeSettings(replicas=2)
    )
    assert topology.replicas_of(settings, "gateway") == ["gateway.0", "gateway.1", "gateway.2"]
    assert topology.replicas_of(settings, "execute") == ["execute.0"]
    assert topology.max_open_of_one(settings) == 3
    addresses = {
        name: f"ipc://@{name}" for stage in topology.FLOW for name in topology.replicas_of(settings, stage)
    } | {"supervisor.0": "ipc://@supervisor"}
    peers = topology.peers_of(topology.row("detokenize"), addresses, settings)
    assert [peer.name for peer in peers] == ["supervisor.0", "gateway.0", "gateway.1", "gateway.2", "schedule.0"]


def test_health_counts_open_requests_of_the_other_gateways() -> None:
    children: list[Any] = [FakeChild("gateway.0"), FakeChild("gateway.1")]
    round_ = HealthRound("gateway.1", nonce=7, timeout_s=5)
    round_.answered("gateway.0", m.Pong(1, m.GatewayLoad(3)))
    round_.answered("gateway.1", m.Pong(1, m.GatewayLoad(4)))
    assert round_.result(children, none_computes).num_open_elsewhere == 3


def test_every_edge_has_an_inbox_that_accepts_it() -> None:
    names = {row.name for row in topology.TOPOLOGY}
    assert names == set(topology.FLOW)
    for row in topology.TOPOLOGY:
        assert set(row.sends_to) <= names
        for owner in row.reads:
            assert topology.row(owner).has_arena
            assert owner in row.sends_to, "a reader of a segment must be able to release it"
            assert topology.arena_bytes(Settings(), owner) > 0


def test_a_port_that_needs_rights_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def create_server(*_: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied (while attempting to bind on address ('127.0.0.1', 80))")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(OSError) as caught:
        listen("127.0.0.1", 80)
    assert str(caught.value) == (
        "cannot listen on 127.0.0.1:80: Permission denied: ports below 1024 need root or CAP_NET_BIND_SERVICE; choose "
        "another gateway.port (--port)"
    )


def test_a_host_that_is_not_local_is_an_error_that_names_the_key() -> None:
    with pytest.raises(OSError, match=r"cannot listen on 192\.0\.2\.1:0: .* gateway\.host"):
        listen("192.0.2.1", 0)


def test_the_server_s_status_is_that_of_its_worst_stage() -> None:
    children: list[Any] = [FakeChild("execute.0", "starting"), FakeChild("ingest.0"), FakeChild("schedule.0", "dead")]
    round_ = HealthRound("gateway.0", nonce=1, timeout_s=60)
    round_.answered("execute.0", m.Pong(1, m.ExecuteLoad(0, 3, 1234.5)))
    round_.answered("ingest.0", m.Pong(1, m.PlainLoad()))
    assert round_.is_over(children), "dead stages are not waited for"
    result = round_.result(children, none_computes)
    assert (result.status, result.num_nan, result.last_nan_s) == ("dead", 3, 1234.5)


class EndedChild:
    """A child that has ended while its last messages are still in flight."""

    pid, state, is_alive = 1, "starting", False

    def __init__(self, stage: str, exit_code: int) -> None:
        self.name, self.stage, self.exit_code = f"{stage}.0", stage, exit_code
        self.incarnation = 1
        self.pidfd = os.open(os.devnull, os.O_RDONLY)

    def describe_end(self) -> str:
        return f"exited with code {self.exit_code}"

    def close(self) -> None:
        os.close(self.pidfd)


@pytest.mark.parametrize(
    ("stage", "exit_code", "words", "logged"),
    [
        ("prepare", 0, m.Prepared("/folder", "name"), ""),
        ("prepare", 1, m.StageFailed("no such model"), "cannot start: prepare: no such model"),
        ("execute", 1, m.StageFailed("no such memory"), "cannot start: execute: no such memory"),
    ],
)
def test_the_last_messages_of_an_ended_stage_are_read(
    stage: str, exit_code: int, words: m.SupervisorInbox, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    (listener,) = listen("127.0.0.1", 0)
    supervisor = Supervisor(Settings(), [listener], logging.getLogger("test"))
    child = EndedChild(stage, exit_code)
    try:
        supervisor._loop.table.children[child.name] = child  # type: ignore[assignment]
        supervisor._loop.table._watch(child)  # type: ignore[arg-type]
        supervisor._loop.table.outboxes[child.name] = Outbox(
            supervisor._loop._context, "inproc://unused", m.Envelope("test.0", 1), 1
        )
        supervisor._loop.state.prepared = None if stage == "prepare" else m.Prepared("/folder", "name")
        outbox: Outbox[m.SupervisorInbox] = Outbox(
            supervisor._loop._context, supervisor._resources.addresses["supervisor.0"], m.Envelope(child.name, 1), 1
        )
        late = threading.Timer(0.1, lambda: (outbox.send(words), outbox.flush(1.0)))
        late.start()
        if logged:
            with pytest.raises(Stopping):
                supervisor._loop._deaths.check()
        else:
            supervisor._loop._deaths.check()
            assert supervisor._loop.state.prepared == words
        assert caplog.text.count(logged)
        late.join()
    finally:
        supervisor._loop.table.children.clear()
        child.close()
        supervisor.close()
        listener.close()


# --- swap space


SWAP_BYTES = 2 * segment.PART_BYTES + 4096


def supervisor_with(swap_bytes: int, listener: socket.socket, run_mode: RunMode | None = None) -> Supervisor:
    return Supervisor(
        Settings(execute=ExecuteSettings(swap_bytes=swap_bytes)), [listener], logging.getLogger("test"), run_mode
    )


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    (one,) = listen("127.0.0.1", 0)
    yield one
    one.close()


def test_swap_space_belongs_to_the_executor_and_is_freed(listener: socket.socket) -> None:
    supervisor = supervisor_with(SWAP_BYTES, listener)
    supervisor._reserve_swap()
    indices = topology.private_segments(supervisor._resources.settings, "schedule")
    assert topology.OFFLOAD_INDEX in indices
    for name in [*(f"{row.name}.0" for row in topology.TOPOLOGY), *indices]:
        supervisor._resources.segments[name] = m.Segment(name, os.dup(listener.fileno()), 65536, False)
    for row in topology.TOPOLOGY:
        given = [
            one for one in supervisor._resources.launch(row.name, row.entry, []).segments if one.name == topology.SWAP
        ]
        assert [(one.num_bytes, one.writable) for one in given] == (
            [(SWAP_BYTES, True)] if row.name == "execute" else []
        )
    supervisor._loop.run_until(supervisor._is_swap_reserved, 30, "swap space")
    fd = supervisor._resources.segments[topology.SWAP].fd
    assert os.fstat(fd).st_blocks * 512 >= SWAP_BYTES
    assert supervisor._is_swap_reserved(), "it stays reserved"
    supervisor.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_without_swap_bytes_there_is_no_segment(listener: socket.socket) -> None:
    supervisor = supervisor_with(0, listener)
    supervisor._reserve_swap()
    assert supervisor._is_swap_reserved() and topology.SWAP not in supervisor._resources.segments
    assert topology.private_segments(Settings(), "execute") == {}
    assert topology.OFFLOAD_INDEX not in topology.private_segments(Settings(), "schedule")
    supervisor.close()


def test_a_server_that_waits_too_long_for_swap_space_reports_it(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: go_on.wait(30))
    supervisor = supervisor_with(SWAP_BYTES, listener)
    supervisor._reserve_swap()
    with pytest.raises(Stopping) as stopping:
        supervisor._loop.run_until(supervisor._is_swap_reserved, 0.1, "swap space")
    assert stopping.value.code == 1
    assert "timed out after 0.1 s waiting for swap space" in caplog.text
    go_on.set()
    supervisor._loop.run_until(supervisor._is_swap_reserved, 30, "swap space")
    supervisor.close()


@pytest.mark.parametrize("instant", [False, True])
def test_swap_space_must_fit_beside_kv_memory(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, instant: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Except for an executor without a model."""
    kv_bytes = CPU_KV_BYTES
    monkeypatch.setattr(segment, "available_bytes", lambda: kv_bytes + SWAP_BYTES - 1)
    supervisor = supervisor_with(SWAP_BYTES, listener, RunMode(instant=instant))
    if instant:
        supervisor._reserve_swap()
        supervisor._loop.run_until(supervisor._is_swap_reserved, 30, "swap space")
    else:
        assert supervisor.run(0.0) == 1
        assert "lower execute.swap_bytes" in caplog.text
    supervisor.close()


def test_memory_that_runs_out_later_ends_the_start(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = iter([1 << 40, 1 << 40, 4096])
    monkeypatch.setattr(segment, "available_bytes", lambda: next(free))
    supervisor = supervisor_with(SWAP_BYTES, listener)
    monkeypatch.setattr(
        supervisor, "_start_all", lambda _: supervisor._loop.run_until(supervisor._is_swap_reserved, 30, "it")
    )
    assert supervisor.run(0.0) == 1
    assert "shared memory for swap: only 64 MiB are available; lower execute.swap_bytes" in caplog.text
    supervisor.close()
