"""A row of the table of HTTP routes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from pipeline.http_server.apis.openai import ApiFamily
from pipeline.http_server.apis.table import family_of
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits

Parse = Callable[[bytes, RequestLimits], ParsedRequest]

CHAT = {"messages": [{"role": "user", "content": "What is the capital of Greece?"}]}
MODEL: dict[str, Any] = {"model": "{model}"}
"""Parts of examples. {model} stands for the served model."""


class Route(msgspec.Struct, frozen=True):
    method: str
    path: str
    handler: str
    """The name of its method in the object with the handlers of its API. Without one, the request is parsed, opened and
    answered as its dialect says."""
    summary: str
    body: Any = None
    """Type of the JSON body"""
    unsupported_fields: Mapping[str, tuple[Any, ...]] = {}
    """Unsupported fields, and the values besides null that are accepted for them"""
    reply: Any = None
    """Type of the JSON response, or types of which it is one; None for text"""
    event: Any = None
    """Type of the events, if the response may be a stream; a union if their `event` line names the type,
    several if it doesn't"""
    opens_request: bool = False
    """It opens a request in the table."""
    parse: Parse | None = None
    """Reads its body, if that needs nothing else. Raises ApiError."""
    whole: Callable[[Request], bytes] | None = None
    """The body of its response, if not that of the request's dialect."""
    is_admin: bool = False
    """It is for the operator's programs, which have no key."""

    # For the description of the API:
    tag: str = "Server"
    """The group of routes"""
    example: Mapping[str, Any] | None = None
    """A body; tests send it."""
    queries: Sequence[Mapping[str, Any]] = ()
    """Parameters of the query"""
    has_typed_events: bool = False
    """Their `event` line names the type."""
    ends_with_done: bool = True
    """A stream without typed events ends with [DONE]."""
    failure_events: str = ""
    """The last events of a stream that fails; by default an error."""
    names_model: bool = False
    """It may answer 404, as those that open a request."""

    @property
    def family(self) -> ApiFamily:
        """Has the shape of its errors."""
        return family_of(self.path)

    @property
    def heading(self) -> str:
        """Its section in a page of docs/http/"""
        return f"## {self.method} {self.path}".removesuffix("/{model}")

    @property
    def resource(self) -> str:
        """The path for aiohttp: a model's name may have slashes."""
        return self.path.replace("{model}", "{model:.+}")
