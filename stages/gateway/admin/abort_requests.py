"""POST /abort_requests: aborts requests by id, in whichever gateway they are open. POST /v1/chat/completions/control
ends their reasoning the same way.

    client ──► this gateway ──AbortRequests──► each other gateway
                   ▲                                │
                   └────────RequestsAborted─────────┘     which of the ids were open there

A client aborts requests of its own scope only, that is, those opened with the same API key. Ids of other clients'
requests are reported as unknown.

The kernel distributes connections over the gateways, so the one that gets this request often does not hold the stream.
A gateway that does not reply in time aborts its requests all the same, but they are not counted.
"""

import msgspec

from pipeline.http_server.bodies.abort_body import ControlBody
from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import PendingReplies
from pipeline.stages.gateway.admin.reasoning_end import end_reasoning
from pipeline.stages.gateway.errors import invalid, overloaded
from pipeline.stages.gateway.open_requests.table import RequestTable

TIMEOUT_S = 2.0
"""How long to wait for the other gateways."""


class Aborted(msgspec.Struct):
    """The reply. Each id is counted once."""

    num_aborted: int
    num_unknown: int
    """Not open, or finished already."""


class Controlled(msgspec.Struct, omit_defaults=True):
    """The reply to a control, as llama.cpp's."""

    success: bool
    message: str = ""
    """Why not."""


NOT_CONTROLLED = (
    "no reply with this id is being generated that was requested with reasoning_control = true, or it is not a chat of "
    "this API key"
)


def id_of(body: ControlBody, in_path: str | None) -> str:
    """The id that a control names. Raises ApiError."""
    if (found := in_path or body.id) is None:
        raise invalid("id", "'id' is required: that of the running reply", "missing_required_parameter")
    return found


def controlled(num_found: int) -> Controlled:
    """The reply if so many requests were found."""
    return Controlled(True) if num_found else Controlled(False, NOT_CONTROLLED)


class AbortEvent(msgspec.Struct):
    """The event in a recording."""

    names: list[str]
    scope: str
    ends_reasoning: bool = False


class RequestAborter:
    """Aborts requests in all gateways."""

    def __init__(self, stage: "Stage[m.GatewayInbox]", requests: RequestTable) -> None:
        self._stage = stage
        self._requests = requests
        self._others = [
            int(replica)
            for name, _, replica in (peer.name.partition(".") for peer in stage.launch.peers)
            if name == "gateway" and int(replica) != stage.replica
        ]
        self._pending: PendingReplies[list[int]] = PendingReplies(TIMEOUT_S)

    async def abort(self, ids: list[str], scope: str, *, ends_reasoning: bool = False) -> Aborted:
        """Abort the requests with these ids in a scope, or only end their reasoning. Raises ApiError, 503, if the queue
        to another gateway is full."""
        ids = list(dict.fromkeys(ids))
        if self._stage.replay_context.is_recording:
            event = AbortEvent(ids, scope, ends_reasoning)
            self._stage.replay_context.event("abort", 0, msgspec.msgpack.encode(event))
        found, nonce = self.begin(ids, scope, ends_reasoning=ends_reasoning)
        if nonce is not None:
            replies, missing = await self._pending.collect(nonce)
            if missing:
                fields = {"gateways": sorted(missing)}
                self._stage.log.warning("Timed out waiting for abort acknowledgements", extra={"fields": fields})
            found.update(*replies.values())
        return Aborted(len(found), len(ids) - len(found))

    def begin(self, ids: list[str], scope: str, *, ends_reasoning: bool = False) -> tuple[set[int], int | None]:
        """Abort here, and ask the other gateways to. Returns the positions of the ids found here, and the nonce of the
        question if there are other gateways. Raises ApiError as `abort`."""
        found = set(self._do(ids, scope, ends_reasoning=ends_reasoning))
        if not ids or not self._others:
            return found, None

        def send(nonce: int, replica: int) -> bool:
            message = m.AbortRequests(self._stage.replica, nonce, ids, scope, ends_reasoning)
            return self._stage.outbox("gateway", replica).send(message)

        if (nonce := self._pending.send(send, self._others)) is None:
            raise overloaded("the queue to another gateway is full")
        return found, nonce

    def handle(self, message: m.AbortRequests | m.RequestsAborted) -> None:
        """A message of another gateway."""
        if isinstance(message, m.RequestsAborted):
            self._pending.handle(message.nonce, message.indices, message.gateway)
        else:
            self._abort_for(message)

    def _abort_for(self, message: m.AbortRequests) -> None:
        """Abort for another gateway. If the acknowledgement can't be sent, that gateway counts the ids as unknown."""
        found = self._do(message.names, message.scope, ends_reasoning=message.ends_reasoning)
        self._stage.outbox("gateway", message.gateway).send(
            m.RequestsAborted(self._stage.replica, message.nonce, found)
        )

    def _do(self, ids: list[str], scope: str, *, ends_reasoning: bool) -> list[int]:
        return end_reasoning(self._requests, ids, scope) if ends_reasoning else self._requests.abort(ids, scope)

    def lost(self, replica: int, *, is_removed: bool = False) -> None:
        """Another gateway has died, and its requests with it, or it is new."""
        self._pending.lost([], replica)
        self._others = [one for one in self._others if one != replica] + ([] if is_removed else [replica])
