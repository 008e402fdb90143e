"""The whole topology on one page: which stages there are, where their code is, and who may send to whom.

client ⇄ gateway → ingest → schedule ⇄ execute
             ↑                  ↓
             └── detokenize ←───┘          supervisor ⇄ all
"""

from typing import Literal

import msgspec

from pipeline.config.settings import Settings
from pipeline.messages import Peer


class StageRow(msgspec.Struct, frozen=True):
    """One kind of stage."""

    name: str
    entry: str
    """Dotted module whose `run(launch)` is the stage; imported by the child alone."""
    sends_to: tuple[str, ...]
    """Besides the supervisor. Releases of shared memory run against these arrows."""
    launcher: Literal["process"] = "process"
    reads: tuple[str, ...] = ()
    """Stages whose segments it maps read-only."""
    has_arena: bool = False
    num_replicas: int = 1


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
    StageRow("gateway", "pipeline.stages.gateway.stage", ("ingest", "schedule"), reads=("ingest",)),
)

FLOW = ("gateway", "ingest", "schedule", "execute", "detokenize")

PREPARE = "pipeline.stages.prepare.stage"

MESSAGES_PER_REQUEST = 4
"""The most that one open request has on one edge: submit, abort, closed, release."""


def bound_of(settings: Settings) -> int:
    """Messages that may wait on an edge. What belongs to requests is bounded by the gateway's credits and always has
    room; `Settled` and `Deltas`, one a step, may fill an edge to a slow peer, and their senders then merge them."""
    return settings.gateway.max_open_requests * MESSAGES_PER_REQUEST + 64


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


def peers_of(stage: StageRow, addresses: dict[str, str], settings: Settings) -> list[Peer]:
    """The inboxes a stage may send to, with the supervisor's."""
    names = ["supervisor.0"] + [
        f"{name}.{replica}" for name in stage.sends_to for replica in range(row(name).num_replicas)
    ]
    return [Peer(name, addresses[name], bound_of(settings)) for name in names]
