"""The outputs of embeddings and scores, with vLLM's names."""

from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float32]]
OutputT = TypeVar("OutputT")


class PoolingOutput(msgspec.Struct):
    data: Floats
    """float32 [dimensions], of length 1 (L2) if it is normalized; [labels]; or of tasks for tokens [tokens, …]."""

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, PoolingOutput) and np.array_equal(self.data, other.data)

    __hash__ = None  # type: ignore[assignment]


class OutputOfPrompt(msgspec.Struct, Generic[OutputT]):
    """What a pooler makes of one prompt."""

    request_id: str
    outputs: OutputT
    prompt_token_ids: list[int]
    """The prompt's ids, after truncation; of two texts, those of the first, then those of the second."""
    finished: bool = True
    num_cached_tokens: int = 0
    """Number of prompt ids found in the prefix cache."""

    @classmethod
    def _with(cls, outputs: OutputT, *sources: "PoolingRequestOutput") -> Self:
        """With other outputs, and what the prompts of `sources` have."""
        return cls(
            "_".join(one.request_id for one in sources),
            outputs,
            [token_id for one in sources for token_id in one.prompt_token_ids],
            num_cached_tokens=sum(one.num_cached_tokens for one in sources),
        )


class PoolingRequestOutput(OutputOfPrompt[PoolingOutput]):
    """The output of one prompt."""


class EmbeddingOutput(msgspec.Struct):
    embedding: list[float]
    """The vector, of length 1 (L2)."""

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


class EmbeddingRequestOutput(OutputOfPrompt[EmbeddingOutput]):
    """The embedding of one prompt."""

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> Self:
        return cls._with(EmbeddingOutput(output.outputs.data.tolist()), output)


class ClassificationOutput(msgspec.Struct):
    probs: list[float]
    """The probability of each label; logits with `use_activation` = False."""

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ClassificationRequestOutput(OutputOfPrompt[ClassificationOutput]):
    """The labels of one prompt."""

    @classmethod
    def of(cls, output: PoolingRequestOutput) -> Self:
        return cls._with(ClassificationOutput(output.outputs.data.tolist()), output)


class ScoringOutput(msgspec.Struct):
    score: float
    """Of a cross-encoder, mostly from 0 to 1; else the cosine similarity, from -1 to 1."""


class ScoringRequestOutput(OutputOfPrompt[ScoringOutput]):
    """The similarity of two texts."""

    @classmethod
    def of(cls, first: PoolingRequestOutput, second: PoolingRequestOutput) -> Self:
        """From the embeddings of both texts."""
        one, other = first.outputs.data.astype(np.float64), second.outputs.data.astype(np.float64)
        length = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
        return cls._with(ScoringOutput(float(np.dot(one, other)) / length if length else 0.0), first, second)

    @classmethod
    def of_all(cls, first: list[PoolingRequestOutput], second: list[PoolingRequestOutput]) -> list[Self]:
        """From the embeddings of one text and of several, or of two lists in pairs."""
        firsts = first * len(second) if len(first) == 1 else first
        return [cls.of(one, other) for one, other in zip(firsts, second, strict=True)]

    @classmethod
    def of_pair(cls, output: PoolingRequestOutput) -> Self:
        """From what a cross-encoder makes of both texts at once."""
        return cls._with(ScoringOutput(float(output.outputs.data[0])), output)
