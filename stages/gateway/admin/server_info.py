"""Replies about the server and its model."""

from typing import Annotated

import msgspec
from msgspec import Meta

from pipeline.runtime.messages import ExecuteFacts


class ModelCard(msgspec.Struct, kw_only=True):
    id: Annotated[str, Meta(description="The name that requests use.")]
    object: str = "model"
    created: Annotated[int, Meta(description="When the server started: Unix time, in seconds.")]
    owned_by: str = "pipeline"
    max_model_len: Annotated[int, Meta(description="Longest prompt and output together, in tokens.")]
    quantization: Annotated[
        str, Meta(description="Formats of the quantized weights, such as q4_1+q8_0; none if they are floats.")
    ]

    @classmethod
    def of(cls, name: str, created: int, facts: ExecuteFacts) -> "ModelCard":
        return cls(id=name, created=created, max_model_len=facts.max_model_len, quantization=facts.quantization)


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
