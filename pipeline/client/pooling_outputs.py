"""The outputs of embeddings and scores, with vLLM's names."""

from typing import Any

import msgspec
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]


class PoolingOutput(msgspec.Struct):
    data: Floats
    """float32 [dimensions], of length 1 (L2) if it is normalized; [labels]; or of tasks for tokens [tokens, …]."""

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


class ClassificationOutput(msgspec.Struct):
    probs: list[float]
    """The probability of each label; logits with `use_activation` = False."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ClassificationRequestOutput(msgspec.Struct):
    """The labels of one prompt."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> "ClassificationRequestOutput":
        return cls(
            output.request_id,
            ClassificationOutput(output.outputs.data.tolist()),
            output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )


class ScoringOutput(msgspec.Struct):
    score: float
    """Of a cross-encoder, mostly from 0 to 1; else the cosine similarity, from -1 to 1."""


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
        one, other = first.outputs.data.astype(np.float64), second.outputs.data.astype(np.float64)
        length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
        return cls(
            f"{first.request_id}_{second.request_id}",
            ScoringOutput(float(np.dot(one, other)) / length if length else 0.0),
            first.prompt_token_ids + second.prompt_token_ids,
            num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        )

    @classmethod
    def of_all(
        cls, first: list[PoolingRequestOutput], second: list[PoolingRequestOutput]
    ) -> "list[ScoringRequestOutput]":
        """From the embeddings of one text and of several, or of two lists in pairs."""
        firsts = first * len(second) if len(first) == 1 else first
        return [cls.of(one, other) for one, other in zip(firsts, second, strict=True)]

    @classmethod
    def of_pair(cls, output: PoolingRequestOutput) -> "ScoringRequestOutput":
        """From what a cross-encoder makes of both texts at once."""
        return cls(
            output.request_id,
            ScoringOutput(float(output.outputs.data[0])),
            output.prompt_token_ids,
            num_cached_tokens=output.num_cached_tokens,
        )
