"""The outputs of embeddings and scores, with vLLM's names."""

from typing import Any

import msgspec
import numpy as np

FloatVector = np.ndarray[tuple[int], np.dtype[np.float32]]


class PoolingOutput(msgspec.Struct):
    data: FloatVector
    """float32 [dimensions]; of length 1 (L2)."""

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


class PoolingRequestOutput(msgspec.Struct):
    """The output of one prompt."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    """The prompt's ids, after truncation."""
    finished: bool = True
    num_cached_tokens: int = 0
    """Number of prompt ids found in the prefix cache."""


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]
    """The vector, of length 1 (L2)."""

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class EmbeddingRequestOutput(msgspec.Struct):
    """The embedding of one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> "EmbeddingRequestOutput":
        return cls(
            output.request_id,
            EmbeddingOutput(output.outputs.data.tolist()),
            output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )


class ScoringOutput(msgspec.Struct):
    score: float
    """Cosine similarity, from -1 to 1."""


class ScoringRequestOutput(msgspec.Struct):
    """The similarity of two texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Those of the first text, then those of the second."""
    finished: bool = True
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, first: PoolingRequestOutput, second: PoolingRequestOutput) -> "ScoringRequestOutput":
        """From the embeddings of both texts."""
        return cls(
            f"{first.request_id}_{second.request_id}",
            ScoringOutput(float(np.dot(first.outputs.data, second.outputs.data))),
            first.prompt_token_ids + second.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        )
