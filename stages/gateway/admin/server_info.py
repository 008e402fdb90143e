"""Replies about the server and its model."""

from typing import Annotated

import msgspec
from msgspec import Meta


class ModelCard(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The name that requests use.")]
    object: str = "model"
    created: Annotated[int, Meta(description="When the server started: Unix time, in seconds.")]
    owned_by: str = "pipeline"
    max_model_len: Annotated[int, Meta(description="Longest prompt and output together, in tokens.")]


class ModelList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class ServerLoad(msgspec.Struct):
    """Load of the gateway process that replies."""

    server_load: Annotated[int, Meta(description="Requests for output whose responses are not complete.")]
    open_sequences: int
    max_open_sequences: int
    open_tokens: Annotated[int, Meta(description="Of their prompts.")]
    max_open_tokens: int


class Version(msgspec.Struct):
    version: str
