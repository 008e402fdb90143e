"""The methods of `LLM` that return embeddings and scores, with vLLM's names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

from pipeline.client.client import ServerInfo
from pipeline.client.inputs.batch import BatchItem
from pipeline.client.inputs.pooling_params import EMBED, PoolingParams, pooling_params_for, with_task
from pipeline.client.inputs.prompts import Prompt, info_for, is_one_prompt, prompt_of
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from pipeline.errors import PromptError, UserError

T = TypeVar("T")

Pooling = PoolingParams | Sequence[PoolingParams] | None
"""One for all prompts, or one for each. None is PoolingParams()."""


RequestOptionValues = tuple[int | Sequence[int] | None, str | None, float | None, str | None]
"""priority, cache_salt, timeout_s, adapter"""


class TextPair(NamedTuple):
    """Two texts for a cross-encoder."""

    first: str
    second: str


@dataclass(frozen=True, slots=True)
class PromptNames:
    """The names of prompts in error messages."""

    word: str
    is_one: bool

    def of(self, index: int) -> str:
        return self.word if self.is_one else f"{self.word}[{index}]"


@dataclass(frozen=True, slots=True)
class PairNames(PromptNames):
    """The names of the texts of `score`."""

    num_first: int

    def of(self, index: int) -> str:
        return f"data_1[{index}]" if index < self.num_first else f"data_2[{index - self.num_first}]"


class PoolingMethods(ABC):
    """Needs the members of `LLM`."""

    @property
    @abstractmethod
    def info(self) -> ServerInfo: ...

    @abstractmethod
    def _options(
        self,
        given: Any,
        priority: int | Sequence[int] | None,
        cache_salt: str | None,
        timeout_s: float | None,
        adapter: str | None,
    ) -> Iterator[RequestOptions]: ...

    @abstractmethod
    def _run(
        self,
        given: Any,
        names: PromptNames,
        item: Callable[[Any, str], BatchItem[T]],
        progress: bool,
        use_tqdm: bool | None,
    ) -> list[T]: ...

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: Pooling = None,
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Compute the embeddings of one prompt or many, in their order. See `generate` for the options and errors.

        A vector has the model's own length, or `PoolingParams.dimensions` numbers, and is normalized (L2) unless the
        parameters or the model's files say otherwise.
        `truncate_prompt_tokens` is for prompts whose parameters don't set it.
        """
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task=EMBED,
            truncate_prompt_tokens=truncate_prompt_tokens,
            progress=progress,
            use_tqdm=use_tqdm,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            adapter=adapter,
        )
        return [EmbeddingRequestOutput.of(output) for output in outputs]

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: Pooling = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """As `embed`, with numpy arrays, float32, of any task: `embed`, `token_embed`, `classify`, `token_classify` or
        `score`. The default is the first that the model has."""
        return self._pool(
            prompts,
            PromptNames("prompt" if is_one_prompt(prompts) else "prompts", is_one_prompt(prompts)),
            pooling_params,
            truncate_prompt_tokens,
            (priority, cache_salt, timeout_s, adapter),
            (progress, use_tqdm),
            pooling_task,
        )

    def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores of pairs of texts: a cross-encoder's, or else the cosine similarity of their embeddings, as in vLLM.

        Scores one text against each of `data_2`, or the texts of two lists of the same length in pairs. Errors are
        those of `embed`.
        """
        options, drawing = (priority, cache_salt, timeout_s, adapter), (progress, use_tqdm)
        first, second = _several(data_1), _several(data_2)
        if len(first) != 1 and len(first) != len(second):
            raise PromptError(
                f"data_1 has {len(first)} texts and data_2 has {len(second)}: give one text as data_1, or as many"
            )
        if not first or not second:
            raise PromptError("data_1 and data_2 must have at least one text each")
        if "score" in self.info.tasks:
            return self._score_pairs(first, second, pooling_params, truncate_prompt_tokens, options, drawing)
        outputs = self._pool(
            [*first, *second],
            PairNames("data", is_one=False, num_first=len(first)),
            pooling_params,
            truncate_prompt_tokens,
            options,
            drawing,
            EMBED,
        )
        left, right = outputs[: len(first)], outputs[len(first) :]
        pairs = zip(left * len(right) if len(left) == 1 else left, right, strict=True)
        return [ScoringRequestOutput.of(one, other) for one, other in pairs]

    def _score_pairs(
        self,
        first: list[Any],
        second: list[Any],
        pooling_params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        options: RequestOptionValues,
        drawing: tuple[bool, bool | None],
    ) -> list[ScoringRequestOutput]:
        firsts = first if len(first) > 1 else first * len(second)
        pairs = [TextPair(*texts) for texts in zip(firsts, second, strict=True)]
        for name, texts in (("data_1", first), ("data_2", second)):
            if (wrong := next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)) is not None:
                raise PromptError(f"{name}[{wrong}] must be a text, not {type(texts[wrong]).__name__}")
        names = PairNames("data", is_one=False, num_first=0)
        outputs = self._pool(pairs, names, pooling_params, truncate_prompt_tokens, options, drawing, "score")
        return [ScoringRequestOutput.of_pair(output) for output in outputs]

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: Pooling = None,
        *,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Sequence[int] | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the labels of one prompt or many. Options and errors are those of `embed`."""
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
            progress=progress,
            use_tqdm=use_tqdm,
            priority=priority,
            cache_salt=cache_salt,
            timeout_s=timeout_s,
            adapter=adapter,
        )
        return [ClassificationRequestOutput.of(output) for output in outputs]

    def reward(self, *args: Any, **options: Any) -> NoReturn:
        """Not supported: no served model has a reward head. Raises UserError."""
        raise UserError(
            "LLM.reward needs a reward model, and the served models generate text: use generate with "
            "SamplingParams(prompt_logprobs=0) for the log probability of a text"
        )

    def _pool(
        self,
        prompts: Any,
        names: PromptNames,
        pooling_params: Pooling,
        truncate_prompt_tokens: int | None,
        request_options: RequestOptionValues,
        drawing: tuple[bool, bool | None],
        task: str | None,
    ) -> list[PoolingRequestOutput]:
        given = [prompts] if names.is_one else prompts
        params = pooling_params_for(
            pooling_params, len(given) if isinstance(given, Sized) else None, truncate_prompt_tokens
        )
        options = self._options(given, *request_options)

        def item(one: Any, name: str) -> BatchItem[PoolingRequestOutput]:
            pooling, own = with_task(next(params), task, self.info.tasks, "pooling_params"), next(options)
            text = one.first if isinstance(one, TextPair) else one
            prompt = prompt_of(text, name, info_for(pooling, self.info))
            if isinstance(one, TextPair):
                prompt = prompt._replace(prompt={**prompt.prompt, "pair": one.second})
            return BatchItem(name, lambda llm, progress: llm.pool(prompt, pooling, progress, own))

        return self._run(given, names, item, *drawing)


def _several(data: Any) -> list[Any]:
    """The texts of one argument of `score`. Raises PromptError."""
    if is_one_prompt(data):
        return [data]
    if not isinstance(data, Sequence):
        raise PromptError(f"data_1 and data_2 must be a text or a list of texts, not {type(data).__name__}")
    return list(data)
