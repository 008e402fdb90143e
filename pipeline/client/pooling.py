"""The methods of `LLM` that return embeddings and scores, with vLLM's names."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, NoReturn, TypeVar

import msgspec

from pipeline.client.client import ServerInfo
from pipeline.client.inputs.batch import BatchItem
from pipeline.client.inputs.pairs import PairNames, PromptNames, TextPair, texts_of_score
from pipeline.client.inputs.pooling_params import EMBED, PoolingParams, pooling_params_for, with_task
from pipeline.client.inputs.prompts import Prompt, info_for, is_one_prompt, prompt_of
from pipeline.client.inputs.request_options import RequestOptions
from pipeline.client.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from pipeline.errors import UserError

T = TypeVar("T")

Pooling = PoolingParams | Sequence[PoolingParams] | None
"""One for all prompts, or one for each. None is PoolingParams()."""


RequestOptionValues = tuple[int | Sequence[int] | None, str | None, float | None, str | None]
"""priority, cache_salt, timeout_s, adapter"""


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
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | None = None,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Scores of pairs of texts: a cross-encoder's, or else the cosine similarity of their embeddings, as in vLLM.

        Scores one text against each of `data_2`, or the texts of two lists of the same length in pairs. `instruction`
        is that of `PoolingParams`. Errors are those of `embed`.
        """
        if instruction is not None:
            pooling_params = msgspec.structs.replace(pooling_params or PoolingParams(), instruction=instruction)
        options, drawing = (priority, cache_salt, timeout_s, adapter), (progress, use_tqdm)
        first, second = texts_of_score(data_1, data_2)
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
        return ScoringRequestOutput.of_all(outputs[: len(first)], outputs[len(first) :])

    def _score_pairs(
        self,
        first: list[Any],
        second: list[Any],
        pooling_params: PoolingParams | None,
        truncate_prompt_tokens: int | None,
        options: RequestOptionValues,
        drawing: tuple[bool, bool | None],
    ) -> list[ScoringRequestOutput]:
        pairs = TextPair.all_of(first, second)
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
            info = info_for(pooling, self.info)
            prompt = one.checked(name, info) if isinstance(one, TextPair) else prompt_of(one, name, info)
            return BatchItem(name, lambda llm, progress: llm.pool(prompt, pooling, progress, own))

        return self._run(given, names, item, *drawing)
