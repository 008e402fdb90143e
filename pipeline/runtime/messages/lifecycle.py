"""What a stage's process gets when it is started."""

import struct

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime.messages.common import Adapter, ExecuteFacts
from pipeline.runtime.messages.control_requests import Record

LENGTH = struct.Struct("<I")
"""Precedes the bytes of a `Launch` in the pipe. A process that was started before the model was prepared gets the
`model_dir` after them, until the end of the pipe."""


EPOCH = struct.Struct("<Q")
"""Comes with the descriptors of a restart: `PeerRestarted.epoch`."""


class Segment(msgspec.Struct, array_like=True, frozen=True):
    """A shared-memory segment that a child inherits."""

    name: str
    fd: int
    num_bytes: int
    writable: bool
    incarnation: int = 1
    """Of the process that writes it."""


class Ring(msgspec.Struct, array_like=True, frozen=True):
    """One end of a ring in shared memory that a child inherits; see pipeline/shm/ring.py."""

    peer: str
    """The stage at the other end."""
    sends: bool
    """Whether this child writes to it."""
    data_fd: int
    position_fd: int
    event_fd: int
    num_bytes: int


class PeerInbox(msgspec.Struct, array_like=True, frozen=True):
    """An inbox that a child may send to."""

    name: str
    address: str
    bound: int
    """Maximum number of messages that may wait on this edge."""
    public_key: str = ""
    """Of its process, if it is on another host: the address is a tcp address, and arrays travel in the messages."""


class Tcp(msgspec.Struct, array_like=True, frozen=True):
    """For a process with peers on other hosts: its keys, and where it listens; see
    pipeline/runtime/transport/curve.py."""

    public_key: str
    secret_key: str
    allowed: dict[str, str]
    """The public keys of the processes that may connect, by name."""
    address: str = ""
    """Where it listens; empty if it receives nothing."""
    listen_fd: int = -1
    """The listening socket."""

    def __repr__(self) -> str:
        return f"Tcp({self.public_key!r}, {self.address!r})"


class HostOrders(msgspec.Struct, array_like=True, frozen=True):
    """What the agent of a host needs to begin; see pipeline/hosts/agent.py."""

    name: str
    """As `host.0`."""
    incarnation: int
    supervisor: PeerInbox
    processes: list[str]
    """The names of the processes that it is going to start, such as `execute.0`."""
    listen_host: str
    """Its own address, where these listen; empty for the address by which Ray knows the host."""
    ports: list[int]
    """On which they may listen; empty: on any."""
    wire_version: str
    """Of the supervisor's code."""
    timeout_s: float
    """The agent ends if it hears nothing from the supervisor for this long."""


class Replay(msgspec.Struct, array_like=True, frozen=True):
    """Replay a recording: the stage's input comes from it instead of its neighbours."""

    path: str
    out: str
    """File for what the stage sends."""
    paced: bool = False
    """At the recorded times, rather than as fast as the stage can."""


class BlackBox(msgspec.Struct, array_like=True, frozen=True):
    """Memory of the supervisor in which a process leaves what explains its death; see
    pipeline/runtime/process/black_box.py."""

    stacks_fd: int
    """A file for the stacks that faulthandler writes."""
    memory_fd: int
    """Breadcrumbs and the last log lines."""
    recording_fd: int = -1
    """A file for a recording from the process's start; -1: it is not recorded."""
    recording_bytes: int = 0
    """Maximum size of the recording."""

    @property
    def fds(self) -> list[int]:
        return [fd for fd in (self.stacks_fd, self.memory_fd, self.recording_fd) if fd >= 0]


class Launch(msgspec.Struct, array_like=True, frozen=True):
    """The parameters of a child process; read from an inherited descriptor."""

    stage: str
    replica: int
    rank: int
    incarnation: int
    entry: str
    """Dotted module whose `run` is called."""
    settings: Settings
    model_dir: str
    """The folder of the prepared model; empty for prepare itself."""
    address: str
    """Of its own inbox."""
    peers: list[PeerInbox]
    segments: list[Segment]
    death_fd: int
    """Reads end-of-file when the supervisor is gone."""
    listen_fd: int = -1
    """The HTTP socket, for the gateway."""
    record: Record | None = None
    replay: Replay | None = None
    foreground: bool = False
    """It owns the terminal, for a debugger."""
    break_at: str = ""
    """A function, as `pipeline.stages.schedule.scheduler:Scheduler.admit`, whose calls stop in the debugger."""
    keys_fd: int = -1
    """Digests of API keys, for the gateway; see pipeline.runtime.security.api_keys. -1: the server has no keys and
    requires none."""
    admin_fd: int = -1
    """The socket of the gateway's admin listener; -1: it has none."""
    rings: list[Ring] = []
    """Edges to and from other stages that use shared memory instead of ZeroMQ."""
    control_fd: int = -1
    """A Unix socket from the supervisor, for descriptors that a running process needs (`PeerRestarted`)."""
    incarnations: dict[str, int] = {}
    """Of the other stages' processes; 1 for those that it does not name."""
    facts: ExecuteFacts | None = None
    """For a process that replaces another one: what the first executor serves with, as the other stages know it."""
    wire_version: str = ""
    """For a process that replaces another one: what its code must have, as in wire_version.py."""
    black_box: BlackBox | None = None
    """None in a replay."""
    adapters: list[Adapter] = []
    """For a gateway or an executor that joins or replaces another one; the first ones get `Adapters`."""
    ranks_fd: int = -1
    """For an executor of several ranks: the memory that those of its stage of the pipeline share, empty at first."""
    stages_fd: int = -1
    """The same for the ranks of all stages."""
    tcp: Tcp | None = None
    """None if all peers are on this host."""
    host_orders: list[HostOrders] = []
    """For the process that finds hosts: one for each host."""
    library_fd: int = -1
    """For an executor: memory that outlives it, in which it leaves the library of its kernels to its successor. Empty
    at first; -1: there is none."""
    usage_fd: int = -1
    """For a gateway: memory in which it counts what each API key uses; see pipeline.runtime.security.key_usage. -1: the
    server has no keys."""
    crash_counts: dict[int, int] = {}
    """For ingest and schedule: how often processes have crashed of which each of these requests may be the reason, by
    request id. Ingest prepares them alone, schedule computes them beside few others."""
    model: str = ""
    """Of several models, the name of the one that it belongs to, for its title and its log."""
    models_fd: int = -1
    """For the gateway of several models: a socket from the supervisor; see messages/models.py."""
    saved_kv_fd: int = -1
    """For an executor: memory or a file that outlives it, for its KV cache while the server sleeps; see
    stages/execute/cpu/saved_kv.py. Empty, unless the executor before has saved its own; -1: there is none."""
    takes_over: bool = False
    """For a gateway: another server has its sockets until this one is ready. It listens once it takes requests."""

    @property
    def name(self) -> str:
        return f"{self.stage}.{self.replica}"
