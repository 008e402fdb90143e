"""The topology: all stages, their code, and which stage sends to which.

client ⇄ gateway → ingest → schedule ⇄ execute
             ↑                  ↓
             └── detokenize ←───┘          supervisor ⇄ all

What has no text, the results of a model's pooler, goes from schedule to the gateway.

gateway, ingest and detokenize may have replicas. The kernel assigns a connection to a gateway. The gateway assigns a
request to an ingest, by its id, and schedule assigns a sequence to a detokenize, by its number (`shard`). They remember
the choice, because the number of replicas may change (`Rescaled`).

execute may have ranks (`execute.tensor_parallel`, `execute.pipeline_parallel`): all get every step, and the first one
of the last stage of the pipeline answers. They live and die together.
"""

from collections.abc import Collection

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime.messages import PeerInbox
from pipeline.shm import fence
from pipeline.shm.ring import ANNOUNCED_BYTES


class StageRow(msgspec.Struct, frozen=True):
    """One kind of stage."""

    name: str
    entry: str
    """Dotted module whose `run(launch)` is the stage. Only the child imports it."""
    sends_to: tuple[str, ...]
    """Receivers besides the supervisor. Releases of shared memory are sent too."""
    reads: tuple[str, ...] = ()
    """Stages whose segments it maps read-only."""
    has_arena: bool = False


# In start order, the slowest first. Stages stop in the order of `FLOW`.
TOPOLOGY = (
    StageRow("execute", "pipeline.stages.execute.stage", ("schedule",), reads=("schedule",), has_arena=True),
    StageRow(
        "schedule",
        "pipeline.stages.schedule.stage",
        ("execute", "detokenize", "ingest", "gateway"),
        reads=("ingest", "execute"),
        has_arena=True,
    ),
    StageRow("ingest", "pipeline.stages.ingest.stage", ("schedule", "gateway"), has_arena=True),
    StageRow("detokenize", "pipeline.stages.detokenize.stage", ("gateway", "schedule"), reads=("schedule",)),
    StageRow("gateway", "pipeline.stages.gateway.stage", ("ingest", "schedule", "gateway"), reads=("ingest",)),
)

RINGS = (
    ("gateway", "ingest"),
    ("ingest", "gateway"),
    ("ingest", "schedule"),
    ("schedule", "execute"),
    ("execute", "schedule"),
    ("schedule", "detokenize"),
    ("schedule", "gateway"),
    ("detokenize", "gateway"),
    ("detokenize", "schedule"),
    ("gateway", "schedule"),
)
"""Edges, from sender to receiver, that use a ring in shared memory: each request or each token crosses them, and a
wake-up through ZeroMQ's threads takes several times as long."""
RING_BYTES = 1024**2
"""Messages for which a ring has no room use ZeroMQ. Besides these bytes, it has room to announce them."""
MAX_RINGS = 16
"""An edge between more pairs of replicas uses ZeroMQ alone."""

FLOW = ("gateway", "ingest", "schedule", "execute", "detokenize")

SCALABLE = ("detokenize", "ingest", "gateway")
"""Stages whose number of processes may change while the server runs."""

SUPERVISOR = "supervisor.0"
SCHEDULE = "schedule.0"
EXECUTE = "execute.0"

PREPARE = "pipeline.stages.prepare.stage"

RAY = "ray.0"
"""The process that finds hosts for the executor (`execute.launcher`)."""
RAY_DRIVER = "pipeline.hosts.ray_driver"

INSTANT = "pipeline.stages.execute.measuring.instant"
"""An executor that computes nothing, for measuring the other stages; see `RunMode`."""

SWAP = "swap"
"""The segment for KV blocks of preempted sequences. The supervisor creates it; only the executor uses it, each of its
ranks a part of its own."""
SWAP_KEY = "execute.swap_bytes"
KV_INDEX = "kv-index"
"""The segment for the keys of the blocks in the KV cache. The supervisor creates it; only schedule uses it."""
KV_INDEX_BYTES = 16 * 1024**2
"""For about a million blocks; memory that is not used is not allocated. Later blocks have no entry."""
OFFLOAD_INDEX = "offload-index"
"""The segment for the keys of the blocks in swap space. The supervisor creates it; only schedule uses it."""
STATE_INDEX, OFFLOAD_STATE_INDEX = "state-index", "offload-state-index"
"""The segments for the keys of the snapshots of recurrent states, and of those in swap space. The supervisor creates
them; only schedule uses them."""
STATE_INDEX_BYTES = 1024**2
"""For 65,000 slots; memory that is not used is not allocated."""
SWAP_BYTES_PER_INDEX_BYTE = 32
"""A KV block of a real model has far more bytes of swap space than the index has for it; memory that is not used is not
allocated."""

MESSAGES_PER_REQUEST = 4
"""Maximum number of messages of one open request on one edge: submit, abort, closed, release."""


def bound_of(settings: Settings) -> int:
    """Maximum number of queued messages on an edge. Messages of requests always fit, because the gateway's credits
    bound them. `Settled` and `Deltas`, one per step, may fill an edge to a slow peer; their senders then merge them."""
    return settings.gateway.max_open_sequences * MESSAGES_PER_REQUEST + 64


def ring_bytes(settings: Settings) -> int:
    """The size of a ring."""
    return RING_BYTES + bound_of(settings) * ANNOUNCED_BYTES


def num_replicas(settings: Settings, name: str) -> int:
    """The number of processes of a stage."""
    match name:
        case "gateway":
            return settings.gateway.replicas
        case "ingest":
            return settings.ingest.replicas
        case "detokenize":
            return settings.detokenize.replicas
        case "execute":
            return settings.execute.num_ranks
        case _:
            return 1


def with_replicas(settings: Settings, name: str, num: int) -> Settings:
    """These settings with another number of processes of a stage."""
    section = msgspec.structs.replace(getattr(settings, name), replicas=num)
    return msgspec.structs.replace(settings, **{name: section})


def replicas_of(settings: Settings, name: str) -> list[str]:
    """The names of a stage's processes, such as `ingest.0`."""
    return [f"{name}.{replica}" for replica in range(num_replicas(settings, name))]


def lives_with(settings: Settings, name: str) -> list[str]:
    """The processes that are replaced together with this one, itself among them: the ranks of the executor. The others
    learn of the first one last."""
    return replicas_of(settings, "execute")[::-1] if stage_of(name) == "execute" else [name]


def stage_of(name: str) -> str:
    """The stage of a process, such as `ingest.0`."""
    return name.partition(".")[0]


def replica_of(name: str) -> int:
    """The number of a process, such as `ingest.0`, among those of its stage."""
    return int(name.partition(".")[2])


def among(names: Collection[str], stage: str) -> list[str]:
    """The processes of a stage among these, in order."""
    return sorted((name for name in names if stage_of(name) == stage), key=replica_of)


def rings(settings: Settings) -> list[tuple[str, str]]:
    """The pairs of processes, sender and receiver, that are connected by a ring when the server starts."""
    return rings_among(
        [name for stage in FLOW for name in replicas_of(settings, stage) if not is_remote(settings, name)]
    )


def is_remote(settings: Settings, name: str) -> bool:
    """Whether a process runs on another host, as far as its channels are concerned: a host that Ray chooses may be
    this one. Of prepare, only the first process is local."""
    if settings.execute.launcher == "process":
        return False
    return stage_of(name) == "execute" or (stage_of(name) == "prepare" and replica_of(name) > 0)


def host_of(settings: Settings, name: str) -> int:
    """The number of the host of a remote process: the ranks of a pipeline stage are on one."""
    return replica_of(name) // settings.execute.tensor_parallel


def num_hosts(settings: Settings) -> int:
    """On how many hosts the executor runs; 0 if it runs with the other stages."""
    return 0 if settings.execute.launcher == "process" else settings.execute.pipeline_parallel


def rings_among(names: Collection[str]) -> list[tuple[str, str]]:
    """The pairs of these processes, sender and receiver, that get a ring. On a machine where a `Fence` is not known to
    order memory, there are none: all edges use ZeroMQ."""
    if not fence.is_known():
        return []
    pairs = []
    for sender, receiver in RINGS:
        both = [(a, b) for a in among(names, sender) for b in among(names, receiver)]
        pairs += both if len(both) <= MAX_RINGS else []
    return pairs


def shard(number: int, num_shards: int) -> int:
    """The replica for a new request, by its id, or for a new sequence, by its number."""
    return number % num_shards


def max_open_of_one(settings: Settings) -> int:
    """Maximum number of open sequences of one gateway. Shares are fixed, so gateways need not coordinate."""
    return settings.gateway.max_open_sequences // settings.gateway.replicas


def max_open_tokens_of_one(settings: Settings) -> int:
    """Maximum number of open prompt tokens of one gateway; a fixed share too."""
    return max(1, settings.gateway.max_open_tokens // settings.gateway.replicas)


def max_open_bytes_of_one(settings: Settings) -> int:
    """Maximum size of what the open requests of one gateway keep, in bytes; a fixed share too."""
    return settings.gateway.max_open_bytes // settings.gateway.replicas


def max_open_media_bytes_of_one(settings: Settings) -> int:
    """Maximum size of the images that the open requests of one gateway keep, in bytes; a fixed share too."""
    return settings.gateway.max_open_media_bytes // settings.gateway.replicas


def row(name: str) -> StageRow:
    return next(stage for stage in TOPOLOGY if stage.name == name)


def arena_bytes(settings: Settings, name: str) -> int:
    """The size of a stage's segment."""
    match name:
        case "ingest":
            return settings.ingest.arena_bytes
        case "schedule":
            return settings.schedule.arena_bytes
        case "execute":
            return settings.execute.arena_bytes
    raise KeyError(name)


def private_segments(settings: Settings, name: str) -> dict[str, int]:
    """Sizes, by name, of the segments that only this stage uses."""
    swap_bytes = settings.execute.swap_bytes
    if name == "execute" and swap_bytes:
        return {SWAP: swap_bytes * settings.execute.num_ranks}
    if name == "schedule":
        index_bytes = -(-swap_bytes // SWAP_BYTES_PER_INDEX_BYTE)
        segments = {KV_INDEX: KV_INDEX_BYTES, STATE_INDEX: STATE_INDEX_BYTES}
        if index_bytes:
            segments |= {OFFLOAD_INDEX: index_bytes, OFFLOAD_STATE_INDEX: STATE_INDEX_BYTES}
        return segments
    return {}


def peers_of(stage: StageRow, addresses: dict[str, str], settings: Settings, replica: int = 0) -> list[PeerInbox]:
    """The inboxes that a replica of a stage sends to, including the supervisor's. For a stage that sends to itself,
    these are the other replicas. `addresses` are those of all processes."""
    names = [SUPERVISOR, *(peer for name in stage.sends_to for peer in among(addresses, name))]
    names = [name for name in names if name != f"{stage.name}.{replica}"]
    return [PeerInbox(name, addresses[name], bound_of(settings)) for name in names]
