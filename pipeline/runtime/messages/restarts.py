"""Messages of a recovery: a stage's process has died and another one takes its place."""

from pipeline.runtime.messages.common import Message
from pipeline.runtime.messages.lifecycle import PeerInbox, Ring, Segment


class PeerRestarted(Message, frozen=True, tag="peer_restarted"):
    """From the supervisor: the process of a stage has died, and its successor starts. Answered with `Reconnected`.

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
    suspect: int | None = None
    """The id of the request that the dead process was working on, if that is known."""
    has_other_settings: bool = False
    """Whether settings of its stage have changed since the dead process started."""
