"""The hosts on which the executor runs, if `execute.launcher` is not "process".

    place: a process finds hosts ──► HostFound ──► prepare there ──► same digest ──► ready
                 ▲                                                                     │ an agent ends or is silent,
                 └────────────────── lost: what ran there has ended ◄──────────────────┘ or what finds hosts ends

The process that finds hosts (`ray.0`) starts an agent on each. From then on the supervisor talks to the agents itself.
If a host is lost, everything begins again, with a new process that finds hosts.
"""

import logging
import signal
import time
from collections.abc import Callable

import msgspec
import zmq

from pipeline.config.values import port_range
from pipeline.hosts.remote_child import RemoteChild
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.messages.wire_version import wire_version
from pipeline.runtime.process.process_usage import ProcessUsage
from pipeline.runtime.topology import RAY, SUPERVISOR
from pipeline.runtime.transport.curve import ClientKeys, is_loopback
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.outbox import Outbox
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.process import ChildProcess
from pipeline.supervisor.shared.resources import INCARNATION, SharedResources

PING_S = 1.0
BOUND = 256
MAX_LOSSES = 3
"""In a row, before a host was ready."""
AGENT_PATIENCE = 3
"""How many times longer an agent waits for the supervisor than the supervisor for the agent."""
STOP_S = 5.0
"""Maximum time for the process that finds hosts to end, which may stop a Ray of its own."""
FLUSH_S = 0.5
LAST_WORDS_S = 0.5
"""From the end of a process until its `StageFailed` must have arrived."""


class Host:
    """One host with an agent."""

    def __init__(self, number: int, found: m.HostFound, outbox: Outbox[m.HostInbox], group: Callable[[], int]) -> None:
        """`group` returns the number of the current ranks; see `Spawn`."""
        self.number = number
        self.node = found.node
        self.prepared: m.Prepared | None = None
        """The model that was prepared there."""
        self.model_dir = ""
        """Of the prepared model; empty until it is known to be the same as here."""
        self.alive_s = time.monotonic()
        """When the agent was last known to run."""
        self.pinged_s = 0.0
        self.outbox = outbox
        self._group = group

    def send(self, message: m.HostInbox) -> None:
        # If it is full, the agent reads nothing, and its silence is going to be noticed.
        self.outbox.send(message)

    def spawn(self, launch: m.Launch) -> None:
        self.send(m.Spawn(launch, self._group(), launch.settings.execute.num_threads))


class Hosts:
    """Owns the process that finds hosts, and what runs on them."""

    def __init__(
        self,
        resources: SharedResources,
        inbox: Inbox[m.SupervisorInbox],
        context: "zmq.Context[zmq.Socket[bytes]]",
        log: logging.Logger,
        reason_of: Callable[[str], str],
    ) -> None:
        """`reason_of` takes the reason that a process gave for its failure, or returns an empty string."""
        self._resources = resources
        self._inbox = inbox
        self._context = context
        self._log = log
        self._reason_of = reason_of
        self.num_hosts = topology.num_hosts(resources.settings)
        self._driver: ChildProcess | None = None
        self._incarnation = 0
        """Of the process that finds hosts, and of its agents."""
        self._hosts: dict[int, Host] = {}
        self._children: dict[str, RemoteChild] = {}
        """The newest of each name."""
        self._digest: str | None = None
        """Of the model that was prepared on this host."""
        self._num_losses = 0
        self._nonce = 0
        self.problem = ""
        """Why the executor can't run; the server must end."""
        self.receive: Callable[[float], None] = lambda _: None
        """Handles messages to the supervisor, waiting at most so many seconds for one."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when new hosts are ready in place of ones that were lost."""

    @property
    def are_found(self) -> bool:
        """Whether all hosts have an agent, so that addresses are known."""
        return len(self._hosts) == self.num_hosts

    @property
    def are_ready(self) -> bool:
        """Whether the model is prepared on all of them, too."""
        return self.are_found and all(host.model_dir for host in self._hosts.values())

    def has_host(self, name: str) -> bool:
        """Whether a process may start, as far as its host is concerned."""
        return self.are_ready or not topology.is_remote(self._resources.settings, name)

    def keys_to(self, name: str) -> ClientKeys | None:
        return self._resources.tcp.keys_to(name)

    # ------------------------------------------------------------------------------------------------------- begin

    def find(self) -> None:
        """Begin to find hosts, if any are needed."""
        if not self.num_hosts:
            return
        settings = self._resources.settings
        self._incarnation += 1
        self._inbox.replaced(RAY, self._incarnation)
        address = self._resources.addresses[SUPERVISOR]
        local = m.PeerInbox(SUPERVISOR, address, BOUND)
        orders = []
        for number in range(self.num_hosts):
            self._inbox.replaced(_agent(number), self._incarnation)
            self._inbox.replaced(_prepare(number), self._incarnation)
            names = topology.replicas_of(settings, "execute")
            orders.append(
                m.HostOrders(
                    name=_agent(number),
                    incarnation=self._incarnation,
                    supervisor=self._resources.tcp.reached_by(_prepare(number), local),
                    processes=[name for name in names if topology.host_of(settings, name) == number],
                    listen_host=settings.transport.host if is_loopback(settings.transport.host) else "",
                    ports=list(port_range.parse(settings.transport.ports)),
                    wire_version=wire_version(),
                    timeout_s=AGENT_PATIENCE * settings.transport.host_timeout_s,
                )
            )
        stage, _, replica = RAY.partition(".")
        launch = self._resources.launch(stage, topology.RAY_DRIVER, [local], int(replica), self._incarnation)
        self._driver = ChildProcess(msgspec.structs.replace(launch, host_orders=orders), 1)
        self._log.debug("finding hosts", extra={"fields": {"pid": self._driver.pid, "hosts": self.num_hosts}})

    def _found(self, found: m.HostFound) -> None:
        number = topology.replica_of(found.name)
        keys = self._resources.tcp.add_agent(found.name, found.public_key)
        if self._inbox.allowlist is not None:
            self._inbox.allowlist.allow(found.name, found.public_key)
        envelope = m.Envelope(SUPERVISOR, INCARNATION)
        outbox: Outbox[m.HostInbox] = Outbox(self._context, found.address, envelope, BOUND, keys=keys)
        host = Host(number, found, outbox, lambda: self._resources.incarnations[topology.EXECUTE])
        self._hosts[number] = host
        settings = self._resources.settings
        names = [
            name for name in topology.replicas_of(settings, "execute") if topology.host_of(settings, name) == number
        ]
        for name, address in zip(names, found.addresses, strict=True):
            self._resources.set_address(name, address)
        self._log.info("found a host", extra={"fields": {"node": host.node, "processes": ",".join(names)}})
        name = _prepare(number)
        local = m.PeerInbox(SUPERVISOR, self._resources.addresses[SUPERVISOR], BOUND)
        launch = self._resources.launch(
            "prepare", topology.PREPARE, [local], topology.replica_of(name), self._incarnation
        )
        self.start(launch, waits=False)

    def prepared_here(self, digest: str) -> None:
        """The model is prepared on this host."""
        self._digest = digest
        self._compare()

    def prepared(self, sender: str, message: m.Prepared) -> None:
        """The model is prepared on another host."""
        if (host := self._hosts.get(topology.replica_of(sender) - 1)) is not None:
            host.prepared = message
            self._compare()

    def _compare(self) -> None:
        """Accept the hosts on which the same model was prepared as here. Calls `on_ready` if that were the last."""
        if self._digest is None or self.are_ready:
            return
        for host in self._hosts.values():
            if host.prepared is None:
                continue
            if host.prepared.digest != self._digest:
                self.problem = (
                    f"{host.node} has another model than this machine under the name "
                    f"{self._resources.settings.model!r}: copy the same files to both"
                )
                return
            host.model_dir = host.prepared.model_dir
        if self.are_ready:
            self._num_losses = 0
            self.on_ready()

    # ------------------------------------------------------------------------------------------------------- serve

    def start(self, launch: m.Launch, *, waits: bool) -> RemoteChild:
        """Start a process on its host. If it `waits`, it starts at `begin`."""
        assert launch.tcp is not None
        if self._inbox.allowlist is not None:
            self._inbox.allowlist.allow(launch.name, launch.tcp.public_key)
        number = launch.replica - 1 if launch.stage == "prepare" else topology.host_of(launch.settings, launch.name)
        child = RemoteChild(launch, self._hosts[number], self.receive, waits=waits)
        if (before := self._children.get(launch.name)) is not None and launch.stage == "prepare":
            before.close()
        self._children[launch.name] = child
        return child

    def handle(self, message: m.HostReport, sender: str) -> None:
        """A message of an agent, or of the process that finds hosts."""
        match message:
            case m.HostFound():
                self._found(message)
            case m.HostEnded(name, reason):
                host = self._hosts.get(topology.replica_of(name))
                self._lost(f"the agent on {host.node if host else name} has ended: {reason}")
            case m.ChildStarted(name, incarnation, pid):
                if (child := self._child(name, incarnation)) is not None:
                    child.started(pid)
            case m.ChildEnded(name, incarnation, exit_code, stacks, memory):
                self._resources.black_boxes.fill(name, incarnation, stacks, memory)
                if (child := self._child(name, incarnation)) is not None:
                    child.ended(exit_code)
            case m.HostPong():
                if (host := self._hosts.get(topology.replica_of(sender))) is not None:
                    host.alive_s = time.monotonic()
                for one in message.usages:
                    if one.name in self._children:
                        self._children[one.name].used(ProcessUsage(one.rss_bytes, one.cpu_s, one.num_threads))

    def _child(self, name: str, incarnation: int) -> RemoteChild | None:
        child = self._children.get(name)
        return child if child is not None and child.incarnation == incarnation else None

    def turn(self) -> None:
        """Ping the agents, and notice what has ended. Afterwards, `problem` may be set."""
        if self._driver is None or self.problem:
            return
        driver = self._driver
        if not driver.is_alive:
            reason = self._last_words(driver)
            if self._driver is driver:  # what came last may have been the end of an agent
                self._lost(reason or f"{RAY} {driver.describe_end()}", is_final=bool(reason))
            return
        for number in list(self._hosts):
            child = self._children.get(_prepare(number))
            if child is not None and not child.is_alive and not self._hosts[number].model_dir and not child.is_lost:
                reason = self._last_words(child) or child.describe_end()
                if not child.is_lost:
                    self._lost(f"preparing the model on {child.node}: {reason}", is_final=child.exit_code == 1)
                return
        now_s = time.monotonic()
        timeout_s = self._resources.settings.transport.host_timeout_s
        for host in list(self._hosts.values()):
            if now_s >= host.alive_s + timeout_s:
                self._lost(f"{host.node} has not answered for {timeout_s:g} s (transport.host_timeout_s)")
                return
            if now_s >= host.pinged_s + PING_S:
                host.pinged_s = now_s
                self._nonce += 1
                host.send(m.Ping(self._nonce))

    def _last_words(self, child: Child) -> str:
        """Why a process has failed, if it says so. The message may still be on its way."""
        end_s = time.monotonic() + LAST_WORDS_S
        while not (reason := self._reason_of(child.name)) and (child.exit_code or 0) > 0:
            if (left_s := end_s - time.monotonic()) <= 0:
                break
            self.receive(left_s)
        return reason

    def suspended(self, seconds: float) -> None:
        """This process did not run for so long."""
        for host in self._hosts.values():
            host.alive_s += seconds

    def _lost(self, reason: str, *, is_final: bool = False) -> None:
        """A host is gone: end what is left, and find hosts anew."""
        self._num_losses += 1
        for child in self._children.values():
            child.ended(-signal.SIGKILL, reason)
        self._end(STOP_S if is_final else 0.0)
        if is_final or self._num_losses >= MAX_LOSSES:
            self.problem = reason
            return
        self._log.error(f"{reason}; finding a host again")
        self.find()

    def _end(self, timeout_s: float) -> None:
        """End the agents, and the process that finds hosts."""
        for host in self._hosts.values():
            host.send(m.Stop())
            host.outbox.flush(FLUSH_S)
        self._hosts.clear()
        if self._driver is not None:
            if timeout_s:
                self._driver.terminate()
                self._driver.wait(timeout_s)
            self._driver.close()
            self._driver = None

    def close(self) -> None:
        """End everything that runs on hosts. The processes are closed by their table."""
        for number in range(self.num_hosts):
            if (child := self._children.pop(_prepare(number), None)) is not None:
                child.close()
        self._end(STOP_S)


def _agent(number: int) -> str:
    return f"host.{number}"


def _prepare(number: int) -> str:
    """The process that prepares the model on a host; prepare.0 does it on this one."""
    return f"prepare.{number + 1}"
