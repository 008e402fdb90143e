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


Load = ScheduleLoad | GatewayLoad | PlainLoad


class Ready(Message, frozen=True, tag="ready"):
    """The stage has loaded what it needs and its inbox is open."""

    facts: ExecuteFacts | None = None


class StageFailed(Message, frozen=True, tag="failed"):
    """The stage will exit with a non-zero code for this reason, in a line or two."""

    reason: str


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


class Reconnected(Message, frozen=True, tag="reconnected"):
    """The answer to `PeerRestarted`: the stage uses the channels to the successor, and has sent it what it owns. Also
    the answer to `Rescaled`."""

    epoch: int


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


SupervisorInbox = (
    Prepared | Ready | StageFailed | Pong | AskHealth | Drained | Answer | AskServerStats | Reconnected | SetAdapter
)
