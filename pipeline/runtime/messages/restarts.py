"""Messages about changes of the processes: one has died and another takes its place, one is new, or one is gone."""

from pipeline.runtime.messages.common import Message
from pipeline.runtime.messages.lifecycle import PeerInbox, Ring, Segment


class PeerRestarted(Message, frozen=True, tag="peer_restarted"):
    """From the supervisor: the process of a stage has died, and its successor starts. Answered with `Reconnected`.

    If the receiver does not know the process, its stage gets one process more. If it `is_removed`, there is no
    successor: its work goes to the stage's other processes.

    `Stage` renews the channels when it takes this message from the inbox; the stage then tells the successor again what
    it owns. Messages of the dead process that come later are dropped; those of the successor come after this one.
    Gateways get it last, when all other stages have answered.
    """

    epoch: int
    """Counts the restarts of this server."""
    peer: PeerInbox
    """The successor's inbox. Its address is empty if the receiver never sends to this stage."""
    incarnation: int
    """The successor's."""
    rings: list[Ring]
    """The edges between the two that use shared memory. Here a descriptor is an index into those that came through
    the receiver's `Launch.control_fd` with this epoch; likewise the next."""
    segment: Segment | None = None
    """The successor's arena, if the receiver reads it."""
    has_other_settings: bool = False
    """Whether settings of its stage have changed since the dead process started."""
    is_removed: bool = False
    """The process is gone for good. `incarnation` is its own then, and nothing can be sent to it."""
    crash_counts: dict[int, int] = {}
    """As in `Launch`. Schedule gets it if the executor has died."""
    has_saved_kv: bool = False
    """The executor has saved its KV cache before it ended, since the server sleeps: the successor will have it."""


class FailRequests(Message, frozen=True, tag="fail_requests"):
    """From the supervisor: these requests have killed a stage again and again. Schedule forgets them, before it learns
    of the successor (`PeerRestarted` follows), and gateways fail those that are theirs."""

    errors: dict[int, str]
    """The reason for the client, by request id; it ends with `DIED_OF_REQUEST`."""


class Rescaled(Message, frozen=True, tag="rescaled"):
    """From the supervisor: from now on, new work of a stage goes to its first `num_replicas` processes. The receiver
    knows all of them. Gateways and schedule get it, which distribute the work; it is answered with `Reconnected`.

    For the stage `gateway`, it means that so many gateways share the limits of what may be open. A gateway answers when
    it has no more open sequences than its new share.
    """

    epoch: int
    stage: str
    num_replicas: int
