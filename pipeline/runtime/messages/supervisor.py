"""Messages that the supervisor receives."""

import msgspec
from msgspec import Raw

from pipeline.metrics.stats import ScheduleLoad
from pipeline.runtime.messages.common import Adapter, ExecuteFacts, Message


class GatewayLoad(msgspec.Struct, array_like=True, frozen=True, tag="gateway"):
    num_open_requests: int


class PlainLoad(msgspec.Struct, array_like=True, frozen=True, tag="plain"):
    """The load of a stage that has no counts of its own."""

    num_open: int = 0
    """Requests or sequences for which this stage holds state."""


class ExecuteLoad(msgspec.Struct, array_like=True, frozen=True, tag="execute"):
    num_open: int
    num_nan: int = 0
    """Sequences that failed because their logits were NaN, since the stage's start."""
    last_nan_s: float = 0.0
    """When the last one did: Unix time in seconds."""


Load = ScheduleLoad | GatewayLoad | PlainLoad | ExecuteLoad


class Ready(Message, frozen=True, tag="ready"):
    """The stage has loaded what it needs and its inbox is open."""

    facts: ExecuteFacts | None = None


class StageFailed(Message, frozen=True, tag="failed"):
    """The stage will exit with a non-zero code for this reason, in a line or two."""

    reason: str


class Compiling(Message, frozen=True, tag="compiling"):
    """From the executor before it is ready: it begins to compile kernels or to wait for a process that does, or has
    ended that. Compiling has a deadline of its own, so this time does not count as that of a start."""

    is_running: bool


class Pong(Message, frozen=True, tag="pong"):
    nonce: int
    load: Load


class AskServerStats(Message, frozen=True, tag="ask_server_stats"):
    """From the gateway. The supervisor collects the counts of every stage and answers with `StatsAnswer`."""

    nonce: int


class AskHealth(Message, frozen=True, tag="ask_health"):
    """From the gateway. The supervisor pings every stage and answers with `Health`."""

    nonce: int


class Drained(Message, frozen=True, tag="drained"):
    """From the gateway: no stream is open any more, and none is accepted. From schedule, after `HandOver`: no step is
    in flight, and none follows."""


class Prepared(Message, frozen=True, tag="prepared"):
    """From prepare: the folder of the prepared model."""

    model_dir: str
    model_name: str
    adapters: list[Adapter] = []
    digest: str = ""
    """Of what the executor reads of the folder, if executors run on other hosts: it must be the same there."""


class Reconnected(Message, frozen=True, tag="reconnected"):
    """The answer to `PeerRestarted`: the stage uses the channels to the successor, and has sent it what it owns. Also
    the answer to `Rescaled`."""

    epoch: int


class Cleared(Message, frozen=True, tag="cleared"):
    """From schedule: these requests got ids since the last crash of which they might have been the reason."""

    request_ids: list[int]


class Answer(Message, frozen=True, tag="answer"):
    """The reply to a `ControlRequest`."""

    nonce: int
    body: Raw = Raw(b"\xc0")
    """For the caller, who knows its type; the supervisor passes it on undecoded. Nil if the reply has no data."""
    error: str = ""
    """Why the request failed, in the user's words; empty on success."""


class SetAdapter(Message, frozen=True, tag="set_adapter"):
    """From the gateway: clients may use this adapter from now on, in place of one with its name. If its `id` is empty,
    they may use the one with its name no more. Answered with `AdapterSet`, after all gateways got `Adapters`."""

    nonce: int
    adapter: Adapter
    is_new: bool = False
    """Change nothing if there is one with its name: gateways may be asked for one name at the same time."""


class KVSaved(Message, frozen=True, tag="kv_saved"):
    """From a rank of the executor: the answer to `SaveKV`."""

    number: int
    num_bytes: int
    took_s: float
    problem: str = ""
    """Why nothing was saved; empty if all was."""


class WakeRequested(Message, frozen=True, tag="wake_requested"):
    """From schedule, which sleeps: a request has come, and may wake the server. From a gateway that drains: requests
    are open, so a server that ends must wake."""


class SetSleep(Message, frozen=True, tag="set_sleep"):
    """From the gateway: put the server to sleep, or wake it. Answered with `SleepSet` when it sleeps or is awake."""

    nonce: int
    sleeps: bool
    wakes_on_request: bool = False
    """Whether a new request wakes it."""


class AskSleep(Message, frozen=True, tag="ask_sleep"):
    """From the gateway: whether the server sleeps. Answered with `SleepSet` at once."""

    nonce: int


class HostFound(Message, frozen=True, tag="host_found"):
    """From the process that finds hosts: an agent runs on one."""

    name: str
    """Of the agent, as `host.0`."""
    node: str
    """The host, for people."""
    address: str
    """Of the agent's inbox."""
    public_key: str
    addresses: list[str]
    """Where its processes are going to listen, in the order of `HostOrders.processes`."""


class HostEnded(Message, frozen=True, tag="host_ended"):
    """From the process that finds hosts: an agent has ended, and its processes with it."""

    name: str
    reason: str


class ChildStarted(Message, frozen=True, tag="child_started"):
    """From an agent: the answer to `Spawn`."""

    name: str
    incarnation: int
    pid: int


class ChildEnded(Message, frozen=True, tag="child_ended"):
    """From an agent: a process has ended."""

    name: str
    incarnation: int
    exit_code: int
    """Negative: the signal that killed it."""
    stacks: bytes = b""
    memory: bytes = b""
    """What it left in its black box."""


class ChildUsage(msgspec.Struct, array_like=True, frozen=True):
    """What a process uses, as in process_usage.py."""

    name: str
    rss_bytes: int
    cpu_s: float
    num_threads: int


class HostPong(Message, frozen=True, tag="host_pong"):
    """From an agent: the answer to `Ping`."""

    nonce: int
    usages: list[ChildUsage]


StageReport = (
    Prepared
    | Ready
    | StageFailed
    | Pong
    | AskHealth
    | Drained
    | Answer
    | AskServerStats
    | Reconnected
    | Cleared
    | SetAdapter
    | Compiling
    | KVSaved
    | WakeRequested
    | SetSleep
    | AskSleep
)
HostReport = HostFound | HostEnded | ChildStarted | ChildEnded | HostPong
SupervisorInbox = StageReport | HostReport
