"""Replies of POST /classify and /pooling."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime.model.pooler import LogitActivation
from pipeline.stages.gateway.apis.pooling.bodies import (
    ClassifyData,
    ClassifyReply,
    PoolingData,
    PoolingReply,
    Usage,
)
from pipeline.stages.gateway.dialect import Dialect
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.replies.large_json import PackedBase64, PackedList, encode_large
from pipeline.stages.gateway.replies.pooled import Floats, activated, numbers_of, vector_of, vectors_of

_encoder = msgspec.json.Encoder()


def _usage_of(request: Request) -> Usage:
    num = request.num_prompt_tokens
    return Usage(num, num)


@dataclass(frozen=True)
class ClassifyDialect(Dialect):
    """/classify"""

    labels: list[str]
    activation: LogitActivation

    id_prefix = "classify-"
    prompt_field = "input"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        data: Any = PackedList(_encoder.encode(self._data(i, one)) for i, one in enumerate(request.sequences))
        return encode_large(
            ClassifyReply(
                id=request.id, created=request.created, model=request.parsed.model, data=data, usage=_usage_of(request)
            )
        )

    def _data(self, index: int, sequence: SequenceOutput) -> ClassifyData:
        numbers = activated(numbers_of(sequence), self.activation)
        label = self.labels[int(np.argmax(numbers))]
        return ClassifyData(index=index, label=label, probs=numbers.tolist(), num_classes=len(numbers))


@dataclass(frozen=True)
class PoolingDialect(Dialect):
    """/pooling"""

    width: int | None
    """Numbers of each token; None if results are of whole inputs."""
    activation: LogitActivation
    is_base64: bool

    id_prefix = "pool-"
    prompt_field = "input"
    has_tools = False

    def whole(self, request: Request) -> bytes:
        data: Any = PackedList(
            encode_large(PoolingData(index=i, data=self._data(request, one))) for i, one in enumerate(request.sequences)
        )
        return encode_large(
            PoolingReply(
                id=request.id, created=request.created, model=request.parsed.model, data=data, usage=_usage_of(request)
            )
        )

    def result(self, request: Request) -> bytes:
        return self.numbers(request, request.sequences[0]).tobytes()

    def _data(self, request: Request, sequence: SequenceOutput) -> Any:
        """The numbers for `encode_large`: those of a long text's tokens are millions."""
        numbers = self.numbers(request, sequence)
        if self.is_base64:
            return PackedBase64(numbers)
        return numbers.tolist() if numbers.ndim == 1 else PackedList(_encoder.encode(row.tolist()) for row in numbers)

    def numbers(self, request: Request, sequence: SequenceOutput) -> Floats:
        """float32: a vector or logits, or a matrix with those of each token. Raises ApiError."""
        if (options := request.parsed.embedding) is not None:
            return vector_of(sequence, options) if self.width is None else vectors_of(sequence, options, self.width)
        logits = numbers_of(sequence)
        if self.width is not None:
            logits = logits.reshape(-1, self.width)
        numbers: Floats = activated(logits, self.activation).astype("<f4")
        return numbers
