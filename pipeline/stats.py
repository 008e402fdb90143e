"""What a server counts: the parts that each stage hands over, and the whole that the supervisor makes of them.

Counters are since the stage's start and only grow. Structs are arrays on the wire: fields are appended.
"""

import msgspec


class Part(msgspec.Struct, array_like=True, frozen=True):
    """What every struct here is."""


class EdgeCounts(Part, frozen=True):
    """One way out of a stage."""

    to: str
    num_sent: int
    num_refused: int
    """Sends that found the edge at its bound; what they carried went later, merged or kept by its sender."""


class PlainCounts(Part, frozen=True, tag="plain"):
    """Of a stage that has nothing to count but what it holds."""

    num_open: int


OwnCounts = PlainCounts


class StageCounts(Part, frozen=True):
    """What a stage answers to `Count`."""

    num_received: int
    num_stale: int
    """Dropped: from an incarnation that is over."""
    edges: list[EdgeCounts]
    own: OwnCounts | None = None


class StageStats(Part, frozen=True):
    """One stage, as the supervisor sees it."""

    name: str
    pid: int
    state: str
    """starting, ready, late (did not answer in time), stopping or dead"""
    num_restarts: int
    uptime_s: float
    rss_bytes: int
    """Resident memory, of which shared segments are counted in every process that has touched them."""
    cpu_s: float
    """User and system time of all its threads since its start."""
    num_threads: int
    counts: StageCounts | None
    """The last that it gave; None where it has not given any."""
    counts_age_s: float = 0.0
    """How old they are: 0 where it has just answered."""


class ServerStats(Part, frozen=True):
    """A whole server."""

    server: str
    """Its name: the supervisor's pid and some hexadecimal digits."""
    pid: int
    version: str
    model: str
    """The name that clients use; empty while it is prepared."""
    address: str
    """Of the HTTP door, as `http://127.0.0.1:8000`."""
    state: str
    """starting, serving, draining or stopping"""
    uptime_s: float
    unix_s: float
    """When these stats were made."""
    stages: list[StageStats]
    """The supervisor first, then the others in flow order."""
    num_blocks: int = 0
    """KV blocks there are; 0 before the executor is ready, as below."""
    block_size: int = 0
    max_model_len: int = 0
