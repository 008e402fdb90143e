"""Messages from a client to the server."""

from typing import Annotated

from msgspec import Meta

from pipeline.client.protocol.parts import PackedIds, RequestId, WireMessage
from pipeline.client.protocol.request import Request


class Hello(WireMessage, frozen=True, tag="hello"):
    """The first message of a connection: the protocol versions that the client supports. The server answers with
    `welcome`, or with `error` if it supports none of them."""

    min_version: Annotated[int, Meta(description="The oldest protocol version that the client supports.")]
    max_version: Annotated[int, Meta(description="The newest one.")]
    client: Annotated[str, Meta(description="The client's name and version, for logs. Cut to 200 characters.")] = ""
    api_key: Annotated[
        str | None,
        Meta(
            description="One of the server's API keys. Required at tcp:// addresses of servers that have keys. "
            "Requests are scoped to their key: other keys can't abort them and don't share their prefix "
            "cache."
        ),
    ] = None
    model: Annotated[
        str | None,
        Meta(description="Of a server of several models, the one that this connection is for; by default the first."),
    ] = None

    def __repr__(self) -> str:
        return f"Hello({self.min_version}, {self.max_version}, {self.client!r})"  # no key in a traceback


class Generate(WireMessage, frozen=True, tag="generate"):
    """Generate from a prompt. The server answers with `accepted`, `delta` … and one closing message: `finished` or
    `failed`.

    With `received`, generation continues after the ids that the client already has; see Resuming.
    """

    request_id: Annotated[
        int,
        Meta(
            ge=0,
            description="Chosen by the client (u64). Use each id only once per connection.",
            extra_json_schema={"maximum": 2**64 - 1},
        ),
    ]
    request: Request
    credits: Annotated[
        int, Meta(ge=0, description="Number of deltas that the server may send before you grant more; see Credits.")
    ]
    received: Annotated[
        list[PackedIds],
        Meta(description="Output ids that the client already has, one entry per sequence. Empty for a new request."),
    ] = []
    name: Annotated[
        str | None,
        Meta(
            description="The client's name for the request, for the server's log and `POST /abort_requests`: 1 to 256 "
            "printable ASCII characters without spaces."
        ),
    ] = None


class Abort(WireMessage, frozen=True, tag="abort"):
    """End a request now. The server answers with a last delta and a closing message. If the request is closed or
    unknown, it doesn't answer."""

    request_id: RequestId


class Credit(WireMessage, frozen=True, tag="credit"):
    """Grant a request more deltas. No effect on a closed or unknown request."""

    request_id: RequestId
    num_deltas: Annotated[int, Meta(ge=0, description="Number of additional deltas.")]


class Ping(WireMessage, frozen=True, tag="ping"):
    """A heartbeat. The server answers with `pong`. It disconnects a client that sends nothing for `silence_s`."""

    nonce: Annotated[
        int, Meta(ge=0, description="Returned in `pong` (u64).", extra_json_schema={"maximum": 2**64 - 1})
    ] = 0


class SetSleep(WireMessage, frozen=True, tag="set_sleep"):
    """Put the connection's model to sleep, or wake it. The server answers with `sleep_state` when that is done, or why
    it is not. Only for a server whose `welcome` has `takes_sleep`."""

    nonce: Annotated[
        int, Meta(ge=0, description="Returned in `sleep_state` (u64).", extra_json_schema={"maximum": 2**64 - 1})
    ]
    sleeps: Annotated[bool, Meta(description="Whether it is to sleep, or to wake.")]
    wakes_on_request: Annotated[bool, Meta(description="A new request wakes a server that sleeps.")] = False


class AskSleep(WireMessage, frozen=True, tag="ask_sleep"):
    """Whether the connection's model sleeps. The server answers with `sleep_state`. Only for a server whose `welcome`
    has `takes_sleep`."""

    nonce: Annotated[
        int, Meta(ge=0, description="Returned in `sleep_state` (u64).", extra_json_schema={"maximum": 2**64 - 1})
    ]


class Bye(WireMessage, frozen=True, tag="bye"):
    """The client disconnects. The server aborts its open requests without an answer."""


ClientMessage = Hello | Generate | Abort | Credit | Ping | SetSleep | AskSleep | Bye
