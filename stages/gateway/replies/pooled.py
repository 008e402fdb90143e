"""What replies show of the results of a model's pooler: vectors, probabilities, scores. Pure.

An input's token output has the numbers that the executor computed: an embedding that is neither cut nor normalized, or
logits. With `Pooling.ALL` there are as many for each token.
"""

import math
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import numpy as np

from pipeline.runtime.model.pooler import LogitActivation
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions

Doubles = np.ndarray[Any, np.dtype[np.float64]]
Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
_FLOAT = np.dtype("<f4")


def numbers_of(sequence: SequenceOutput) -> Doubles:
    """The numbers of an input. Raises ApiError if there are none, or if one is not finite."""
    if not sequence.token_outputs:
        message = "the request was aborted before all of its inputs were computed"
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="ended")
    numbers = np.frombuffer(sequence.token_outputs, _FLOAT).astype(np.float64)
    if not math.isfinite(np.add.reduce(numbers)):  # the sum of float32 does not overflow
        raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the model produced a result with NaN or infinity")
    return numbers


def vector_of(sequence: SequenceOutput, options: EmbeddingOptions) -> Vector:
    """float32 [dimensions]: the embedding of an input; of length 1, or all zeros, if it is normalized. Raises
    ApiError."""
    numbers = numbers_of(sequence)[: options.dimensions]
    if options.normalize:
        numbers = numbers / (_length(numbers) or 1.0)
    return numbers.astype(_FLOAT)


def vectors_of(sequence: SequenceOutput, options: EmbeddingOptions, width: int) -> Floats:
    """float32 [tokens, dimensions]: the embeddings of an input's tokens, of `width` numbers each. Raises ApiError."""
    vectors = numbers_of(sequence).reshape(-1, width)[:, : options.dimensions]
    if options.normalize:
        lengths = np.sqrt(np.add.reduce(vectors * vectors, axis=-1, keepdims=True))
        lengths[lengths == 0] = 1
        vectors = vectors / lengths
    return vectors.astype(_FLOAT)


def _length(vector: Doubles) -> float:
    # np.linalg.norm gives the same bits, and takes three times as long.
    return math.sqrt(np.add.reduce(vector * vector))


def activated(logits: Doubles, activation: LogitActivation) -> Doubles:
    """Probabilities of logits, along the last axis."""
    return _ACTIVATIONS[activation](logits)


def _sigmoid(logits: Doubles) -> Doubles:
    return np.exp(-np.logaddexp(0, -logits))


def _softmax(logits: Doubles) -> Doubles:
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)  # type: ignore[no-any-return]


_ACTIVATIONS: dict[LogitActivation, Callable[[Doubles], Doubles]] = {
    "identity": lambda logits: logits,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def cosine(one: Doubles, other: Doubles) -> float:
    """The cosine of two embeddings; 0 if one of them is all zeros."""
    length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(np.clip(np.dot(one, other) / length, -1, 1)) if length else 0.0
