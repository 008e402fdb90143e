"""What the supervisor does with hosts, without processes: the one that finds hosts and the agents are fakes."""

import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from pipeline.config.settings import ExecuteSettings, Settings, TransportSettings
from pipeline.errors import UserError
from pipeline.hosts import hosts as hosts_module
from pipeline.hosts.agent import HostAgent
from pipeline.hosts.hosts import MAX_LOSSES, Hosts
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.messages.wire_version import wire_version
from pipeline.runtime.transport import curve
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.runtime.transport.outbox import Outbox
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.supervisor.shared.tcp_channels import TcpChannels

AGENT_KEY = curve.new_keys().public_key


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class FakeDriver:
    """The process that finds hosts."""

    name, pid, exit_code = "ray.0", 7, 1

    def __init__(self, launch: m.Launch, num_threads: int) -> None:
        self.launch, self.is_alive, self.was_closed = launch, True, False

    def terminate(self) -> None:
        self.is_alive = False

    def wait(self, timeout_s: float) -> bool:
        return True

    def describe_end(self) -> str:
        return "exited with code 1"

    def close(self) -> None:
        self.is_alive, self.was_closed = False, True


class FakeInbox:
    allowlist = None

    def __init__(self) -> None:
        self.incarnations: dict[str, int] = {}

    def replaced(self, name: str, incarnation: int) -> None:
        self.incarnations[name] = incarnation


class World:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_ranks: int = 2) -> None:
        self.drivers: list[FakeDriver] = []
        self.sent: list[m.HostInbox] = []
        self.reasons: dict[str, str] = {}
        self.num_ready = 0
        self.context: Any = zmq.Context()
        world = self

        class RecordingOutbox(Outbox[Any]):
            def send(self, message: Any) -> bool:
                world.sent.append(message)
                return True

        def start(launch: m.Launch, num_threads: int) -> FakeDriver:
            self.drivers.append(FakeDriver(launch, num_threads))
            return self.drivers[-1]

        monkeypatch.setattr(hosts_module, "ChildProcess", start)
        monkeypatch.setattr(hosts_module, "Outbox", RecordingOutbox)
        settings = Settings(
            execute=ExecuteSettings(launcher="ray", tensor_parallel=num_ranks),
            transport=TransportSettings(host_timeout_s=4.0),
        )
        self.resources = SharedResources(settings, [], [], None)
        self.resources.create_arenas()
        self.inbox = FakeInbox()
        inbox: Any = self.inbox
        log = logging.getLogger("tests.hosts")
        self.hosts = Hosts(self.resources, inbox, self.context, log, lambda name: self.reasons.pop(name, ""))
        self.hosts.on_ready = self._ready

    def _ready(self) -> None:
        self.num_ready += 1

    def find(self, digest: str = "same") -> None:
        """The driver finds a host, and the model is prepared there and here."""
        number = len(self.drivers)
        addresses = [f"tcp://10.0.0.{number}:{port}" for port in (2, 3)]
        found = m.HostFound("host.0", f"node {number}", f"tcp://10.0.0.{number}:1", AGENT_KEY, addresses)
        self.hosts.handle(found, topology.RAY)
        self.hosts.prepared_here("same")
        self.hosts.prepared("prepare.1", m.Prepared(f"/models/{number}", "x", [], digest))

    def start(self, name: str) -> Any:
        row = topology.row("execute")
        replica = topology.replica_of(name)
        peers = topology.peers_of(row, self.resources.addresses, self.resources.settings, replica)
        return self.hosts.start(self.resources.launch("execute", row.entry, peers, replica), waits=False)

    def close(self) -> None:
        self.hosts.close()
        self.resources.close()
        self.context.term()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    one = World(monkeypatch)
    one.hosts.find()
    yield one
    one.close()


def test_processes_start_on_a_host_with_the_model_that_was_prepared_there(world: World) -> None:
    (orders,) = world.drivers[0].launch.host_orders
    assert orders.processes == ["execute.0", "execute.1"] and orders.supervisor.public_key
    assert not world.hosts.are_found and not world.hosts.has_host("execute.0") and world.hosts.has_host("schedule.0")
    world.find()
    assert world.hosts.are_ready and world.num_ready == 1
    assert world.resources.addresses["execute.1"] == "tcp://10.0.0.1:3"
    child = world.start("execute.1")
    spawn = world.sent[-1]
    assert isinstance(spawn, m.Spawn) and spawn.launch.model_dir == "/models/1" and child.node == "node 1"
    assert spawn.launch.tcp is not None and spawn.launch.segments == [] == spawn.launch.rings
    assert {peer.name for peer in spawn.launch.peers} == {"supervisor.0", "schedule.0"}
    assert all(peer.address.startswith("tcp://127.0.0.1:") and peer.public_key for peer in spawn.launch.peers)
    assert MessageDecoder[Any](m.HostInbox).decode(msgspec.msgpack.encode(spawn)) == spawn


def test_schedule_reaches_the_ranks_with_their_keys_and_gets_no_arena_of_theirs(world: World) -> None:
    world.find()
    row = topology.row("schedule")
    peers = topology.peers_of(row, world.resources.addresses, world.resources.settings)
    launch = world.resources.launch("schedule", row.entry, peers)
    keys = {peer.name: peer.public_key for peer in launch.peers}
    assert launch.tcp is not None and keys["execute.0"] != keys["execute.1"] != "" == keys["ingest.0"]
    assert launch.tcp.allowed == {name: keys[name] for name in ("execute.0", "execute.1")}
    assert not any(one.name.startswith("execute") for one in launch.segments)
    world.resources.renew("execute.0")
    found = world.resources.restart_of("execute.0", "schedule.0", 5)
    assert found is not None and not found[1] and found[0].segment is None and found[0].rings == []
    assert found[0].peer.address == "tcp://10.0.0.1:2" and found[0].peer.public_key not in ("", keys["execute.0"])
    back = world.resources.restart_of("schedule.0", "execute.0", 6)
    assert back is not None and not back[1] and back[0].segment is None
    assert back[0].peer.address.startswith("tcp://127.0.0.1:") and back[0].peer.public_key == launch.tcp.public_key


def test_another_model_under_the_same_name_is_refused(world: World) -> None:
    world.find(digest="other")
    assert not world.hosts.are_ready
    assert "node 1 has another model than this machine under the name" in world.hosts.problem


def test_a_silent_host_is_lost_and_another_one_is_found(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.find()
    children = [world.start(f"execute.{rank}") for rank in range(2)]
    world.hosts.turn()
    assert isinstance(world.sent[-1], m.Ping) and all(child.is_alive for child in children)
    world.hosts.suspended(-3.9)
    world.hosts.handle(m.HostPong(1, [m.ChildUsage("execute.0", 4096, 1.5, 3)]), "host.0")
    assert children[0].usage().cpu_s == 1.5
    world.hosts.suspended(-3.9)
    world.hosts.turn()
    assert all(child.is_alive for child in children), "it has answered 3.9 s ago"
    world.hosts.suspended(-0.2)
    world.hosts.turn()
    assert "node 1 has not answered for 4 s (transport.host_timeout_s); finding a host again" in caplog.text
    assert not any(child.is_alive for child in children) and children[0].is_lost
    assert children[0].describe_end() == "node 1 has not answered for 4 s (transport.host_timeout_s)"
    assert world.drivers[0].was_closed and len(world.drivers) == 2 and not world.hosts.has_host("execute.0")
    assert world.inbox.incarnations["host.0"] == world.drivers[1].launch.incarnation == 2
    world.find()
    assert world.num_ready == 2 and world.resources.addresses["execute.0"] == "tcp://10.0.0.2:2"
    for child in children:
        child.close()


def test_the_end_of_an_agent_is_a_loss_and_too_many_in_a_row_are_an_error(world: World) -> None:
    for number in range(MAX_LOSSES):
        assert not world.hosts.problem and len(world.drivers) == number + 1
        world.hosts.handle(m.HostEnded("host.0", "the actor died"), topology.RAY)
    assert world.hosts.problem == "the agent on host.0 has ended: the actor died"


def test_what_the_driver_says_ends_the_server(world: World) -> None:
    world.drivers[0].is_alive = False
    world.reasons[topology.RAY] = "ray: no node has 2 free GPUs; nodes have 1, 1"
    world.hosts.turn()
    assert world.hosts.problem == "ray: no node has 2 free GPUs; nodes have 1, 1"


def test_the_end_of_a_process_is_reported_with_what_it_left(world: World) -> None:
    world.find()
    child = world.start("execute.0")
    world.hosts.handle(m.ChildStarted("execute.0", 1, 4711), "host.0")
    world.hosts.handle(m.ChildEnded("execute.0", 9, -11), "host.0")
    assert child.pid == 4711 and child.is_alive, "it was of another incarnation"
    world.hosts.handle(m.ChildEnded("execute.0", 1, -11, b"Fatal Python error"), "host.0")
    assert not child.is_alive and child.describe_end() == "was killed by SIGSEGV" and not child.is_lost
    box = world.resources.black_boxes.get("execute.0", 1)
    assert box is not None and os.pread(box.stacks_fd, 100, 0) == b"Fatal Python error"
    child.close()


def test_processes_of_this_host_listen_where_the_settings_say() -> None:
    port = free_port()
    transport = TransportSettings(host="127.0.0.2", ports=f"{port}-{port + 5}")
    channels = TcpChannels(Settings(execute=ExecuteSettings(launcher="ray"), transport=transport))
    tcp = channels.of_process("schedule.0")
    assert tcp is not None and tcp.address.startswith("tcp://127.0.0.2:")
    assert port <= int(tcp.address.rpartition(":")[2]) <= port + 5
    channels.close()
    assert TcpChannels(Settings(transport=transport)).of_process("schedule.0") is None


def test_an_agent_refuses_other_code() -> None:
    keys = curve.new_keys()
    peer = m.PeerInbox("supervisor.0", "tcp://127.0.0.1:9", 8, keys.public_key)
    orders = m.HostOrders("host.0", 1, peer, ["execute.0"], "127.0.0.1", [], "0123456789abcdef", 5.0)
    with pytest.raises(UserError, match="node b has other code than the supervisor"):
        HostAgent(orders, "node b", "127.0.0.1")
    agent = HostAgent(msgspec.structs.replace(orders, wire_version=wire_version()), "node b", "127.0.0.1")
    assert agent.found.node == "node b" and len(agent.found.addresses) == 1
    agent.close()
