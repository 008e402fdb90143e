"""The whole topology on one page: which stages there are, where their code is, and who may send to whom.

client ⇄ gateway → ingest → schedule ⇄ execute
             ↑                  ↓
             └── detokenize ←───┘          supervisor ⇄ all

Of gateway, ingest and detokenize there may be several. A connection belongs to the gateway that the system gave it to;
a request goes to the ingest that its id says, and its sequences to the detokenize that theirs say (`shard`): so who
sends an Abort needs no table.
"""

import msgspec

from pipeline.config.settings import Settings
from pipeline.runtime.messages import PeerInbox


class StageRow(msgspec.Struct, frozen=True):
    """One kind of stage."""

    name: str
    entry: str
    """Dotted module whose `run(launch)` is the stage; imported by the child alone."""
    sends_to: tuple[str, ...]
    """Besides the supervisor. Releases of shared memory run against these arrows."""
    reads: tuple[str, ...] = ()
    """Stages whose segments it maps read-only."""
    has_arena: bool = False


# In the order in which they start: the slowest first. They stop in the order of `FLOW`.
TOPOLOGY = (
    StageRow("execute", "pipeline.stages.execute.stage", ("schedule",), reads=("schedule",), has_arena=True),
    StageRow(
        "schedule",
        "pipeline.stages.schedule.stage",
        ("execute", "detokenize", "ingest"),
        reads=("ingest", "execute"),
        has_arena=True,
    ),
    StageRow("ingest", "pipeline.stages.ingest.stage", ("schedule", "gateway"), has_arena=True),
    StageRow("detokenize", "pipeline.stages.detokenize.stage", ("gateway", "schedule"), reads=("schedule",)),
    StageRow("gateway", "pipeline.stages.gateway.stage", ("ingest", "schedule", "gateway"), reads=("ingest",)),
)

FLOW = ("gateway", "ingest", "schedule", "execute", "detokenize")

PREPARE = "pipeline.stages.prepare.stage"

INSTANT = "pipeline.stages.execute.measuring.instant"
"""An executor that computes nothing, to measure the others: see `RunMode`."""

SWAP = "swap"
"""The segment of preempted sequences' KV blocks: the supervisor's, written and read by the executor."""
SWAP_KEY = "execute.swap_bytes"

MESSAGES_PER_REQUEST = 4
"""The most that one open request has on one edge: submit, abort, closed, release."""


def bound_of(settings: Settings) -> int:
    """Messages that may wait on an edge. What belongs to requests is bounded by the gateway's credits and always has
    room; `Settled` and `Deltas`, one a step, may fill an edge to a slow peer, and their senders then merge them."""
    return settings.gateway.max_open_sequences * MESSAGES_PER_REQUEST + 64


def num_replicas(settings: Settings, name: str) -> int:
    """How many processes of a stage there are."""
    match name:
        case "gateway":
            return settings.gateway.replicas
        case "ingest":
            return settings.ingest.replicas
        case "detokenize":
            return settings.detokenize.replicas
        case _:
            return 1


def replicas_of(settings: Settings, name: str) -> list[str]:
    """The names of a stage's processes, as `ingest.0`."""
    return [f"{name}.{replica}" for replica in range(num_replicas(settings, name))]


def shard(number: int, num_shards: int) -> int:
    """The replica that a request (by its id) or a sequence (by its number) belongs to."""
    return number % num_shards


def max_open_of_one(settings: Settings) -> int:
    """Sequences that one gateway may have open: credits are divided once and for all, so that none has to be asked
    for."""
    return settings.gateway.max_open_sequences // settings.gateway.replicas


def max_open_tokens_of_one(settings: Settings) -> int:
    """Prompt tokens that one gateway may have open, likewise."""
    return max(1, settings.gateway.max_open_tokens // settings.gateway.replicas)


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
    """Segments that a stage alone writes and reads: their sizes by name."""
    return {SWAP: settings.execute.swap_bytes} if name == "execute" and settings.execute.swap_bytes else {}


def peers_of(stage: StageRow, addresses: dict[str, str], settings: Settings, replica: int = 0) -> list[PeerInbox]:
    """The inboxes that a replica of a stage may send to, with the supervisor's. A stage that sends to itself sends to
    its other replicas."""
    names = ["supervisor.0", *(peer for name in stage.sends_to for peer in replicas_of(settings, name))]
    names = [name for name in names if name != f"{stage.name}.{replica}"]
    return [PeerInbox(name, addresses[name], bound_of(settings)) for name in names]
