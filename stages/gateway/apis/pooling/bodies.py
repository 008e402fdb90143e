"""Bodies of POST /classify and /pooling, with vLLM's names."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from pipeline.client.protocol.request import Dimensions, PoolingTask, UseActivation
from pipeline.stages.gateway.parsing.pooling import InputBody


class ClassifyBody(InputBody, kw_only=True):
    """POST /classify"""

    use_activation: UseActivation | None = None


class PoolingTaskBody(InputBody, kw_only=True):
    """POST /pooling"""

    task: Annotated[PoolingTask, Meta(description="Default the first of the model's.")] | None = None
    encoding_format: (
        Annotated[Literal["float", "base64"], Meta(description="base64 is of float32, little-endian.")] | None
    ) = None
    dimensions: Dimensions | None = None
    use_activation: UseActivation | None = None


POOLING_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "messages": (),
    "data": (),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}
"""vLLM's fields that are not supported, and the values, besides null, at which they change nothing."""


class Usage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class ClassifyData(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Of the input.")]
    label: Annotated[str, Meta(description="The label of the largest number.")]
    probs: Annotated[list[float], Meta(description="A number for each label: probabilities, or logits.")]
    num_classes: int


class ClassifyReply(msgspec.Struct, kw_only=True):
    """POST /classify"""

    id: str
    object: Annotated[str, Meta(description="list")] = "list"
    created: int
    model: str
    data: list[ClassifyData]
    usage: Usage


class PoolingData(msgspec.Struct, kw_only=True):
    index: Annotated[int, Meta(description="Of the input.")]
    object: str = "pooling"
    data: Annotated[
        list[float | list[float]] | str,
        Meta(description="Numbers of the input, or lists with those of each of its tokens; or their base64."),
    ]


class PoolingReply(msgspec.Struct, kw_only=True):
    """POST /pooling"""

    id: str
    object: Annotated[str, Meta(description="list")] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: Usage
