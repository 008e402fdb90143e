"""The start of a ZeroMQ client's connection: hello, and what the server answers."""

from pipeline.client import protocol as p
from pipeline.http_server.access.guard import unauthorized
from pipeline.runtime import messages as m
from pipeline.runtime.security.api_keys import NO_SCOPE, Keys
from pipeline.stages.gateway.admin.server_info import recommended
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.parsing.pooling import POOLINGS
from pipeline.stages.gateway.zmq import errors, sweeper
from pipeline.version import VERSION

MAX_HELLO_BYTES = 16384
HEARTBEAT_S = 5.0


def scope_of(hello: p.Hello, keys: Keys | None, *, needs_key: bool) -> str:
    """The scope of the client's API key. Raises ApiError if the client may not connect."""
    if not hello.min_version <= p.PROTOCOL_VERSION <= hello.max_version:
        raise errors.of_version(hello)
    if keys is None:
        return NO_SCOPE
    scope = keys.scope_of(hello.api_key)
    if scope is None and needs_key:
        raise unauthorized(bool(hello.api_key), "`api_key` in hello")
    return scope or NO_SCOPE


def welcome_of(
    facts: m.ExecuteFacts, limits: RequestLimits, *, max_message_bytes: int, addresses: list[str], gateway: int
) -> p.Welcome:
    """What a client learns of the server."""
    return p.Welcome(
        version=p.PROTOCOL_VERSION,
        server=f"pipeline/{VERSION}",
        model=limits.model,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        max_open_requests=limits.max_sequences,
        max_message_bytes=max_message_bytes,
        max_credits=p.MAX_CREDITS,
        heartbeat_s=HEARTBEAT_S,
        silence_s=sweeper.SILENCE_S,
        defaults=recommended(limits.defaults),
        addresses=addresses,
        gateway=gateway,
        poolings=list(POOLINGS) if "embed" in limits.tasks else [],
        tasks=list(limits.tasks),
        takes_sleep=True,
    )
