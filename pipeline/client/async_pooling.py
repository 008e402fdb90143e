"""The methods of `AsyncLLM` that return embeddings, labels and scores."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from pipeline.client.client import ServerInfo
from pipeline.client.inputs.pairs import PairNames, TextPair, texts_of_score
from pipeline.client.inputs.pooling_params import EMBED, PoolingParams, checked_pooling_params, with_task
from pipeline.client.inputs.prompts import CheckedPrompt, Prompt, info_for, prompt_of
from pipeline.client.inputs.request_options import RequestOptions, options_of
from pipeline.client.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)


def no_progress(num_prompt_ids: int, num_output_ids: int) -> None:
    """Shows nothing."""


class AsyncPoolingMethods(ABC):
    """Needs the members of `AsyncLLM`."""

    @abstractmethod
    async def ready(self) -> ServerInfo: ...

    @abstractmethod
    async def pool(
        self,
        prompt: CheckedPrompt,
        params: PoolingParams,
        progress: Callable[[int, int], None],
        options: RequestOptions,
        request_id: str | None = None,
    ) -> PoolingRequestOutput: ...

    async def embed(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute the embedding of a text or token ids. Options and errors are those of `generate`."""
        options = options_of(priority, cache_salt, timeout_s, adapter)
        return EmbeddingRequestOutput.of(await self._pooled(prompt, pooling_params, EMBED, options, request_id))

    async def classify(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> ClassificationRequestOutput:
        """Compute the probabilities of labels for a text or token ids. Options and errors are those of `generate`."""
        options = options_of(priority, cache_salt, timeout_s, adapter)
        pooled = await self._pooled(prompt, pooling_params, "classify", options, request_id)
        return ClassificationRequestOutput.of(pooled)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """As `embed`, with vLLM's signature: an iterator with one output, a numpy array. The task is that of the
        parameters, or the first that the model has."""
        options = options_of(priority, cache_salt, timeout_s, adapter)
        yield await self._pooled(prompt, pooling_params, None, options, request_id)

    async def score(
        self,
        data_1: Prompt | Sequence[Prompt],
        data_2: Prompt | Sequence[Prompt],
        /,
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout_s: float | None = None,
        adapter: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """As `LLM.score`: scores of one text with each of `data_2`, or of two lists in pairs. If one fails, the others
        are aborted."""
        options = options_of(priority, cache_salt, timeout_s, adapter)
        params = checked_pooling_params(pooling_params, "pooling_params")
        if instruction is not None:
            params = msgspec.structs.replace(params, instruction=instruction)
        first, second = texts_of_score(data_1, data_2)
        info = await self.ready()
        pairs = TextPair.all_of(first, second) if "score" in info.tasks else None
        task, given = (EMBED, [*first, *second]) if pairs is None else ("score", pairs)
        names = PairNames("data", is_one=False, num_first=len(first) if pairs is None else 0)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._pooled(one, params, task, options, None, names.of(index)))
                    for index, one in enumerate(given)
                ]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        outputs = [one.result() for one in tasks]
        if pairs is not None:
            return [ScoringRequestOutput.of_pair(output) for output in outputs]
        return ScoringRequestOutput.of_all(outputs[: len(first)], outputs[len(first) :])

    async def _pooled(
        self,
        prompt: Prompt | TextPair,
        pooling_params: PoolingParams | None,
        task: str | None,
        options: RequestOptions,
        request_id: str | None,
        name: str = "prompt",
    ) -> PoolingRequestOutput:
        params = checked_pooling_params(pooling_params, "pooling_params")
        info = await self.ready()
        params = with_task(params, task, info.tasks, "pooling_params")
        if isinstance(prompt, TextPair):
            checked = prompt.checked(name, info_for(params, info))
        else:
            checked = prompt_of(prompt, name, info_for(params, info))
        return await self.pool(checked, params, no_progress, options, request_id)
