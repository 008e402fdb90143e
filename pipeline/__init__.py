"""The public names, loaded when they are first used: the stages' processes import this package without them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.client.async_llm import AsyncLLM
    from pipeline.client.beam_search import BeamSearchOutput, BeamSearchSequence
    from pipeline.client.blocking_client import Client
    from pipeline.client.client import AsyncClient
    from pipeline.client.errors import ConnectionLost, ForeignServer, RequestError
    from pipeline.client.inputs.beam_search_params import BeamSearchParams
    from pipeline.client.inputs.pooling_params import PoolingParams
    from pipeline.client.inputs.sampling_params import SamplingParams
    from pipeline.client.inputs.structured_params import StructuredOutputsParams
    from pipeline.client.llm import LLM
    from pipeline.client.logprobs import Logprob
    from pipeline.client.outputs import CompletionOutput, RequestOutput, RequestStateStats
    from pipeline.client.pooling_outputs import (
        ClassificationRequestOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )

_HOMES = {
    "AsyncClient": "pipeline.client.client",
    "AsyncLLM": "pipeline.client.async_llm",
    "BeamSearchOutput": "pipeline.client.beam_search",
    "BeamSearchParams": "pipeline.client.inputs.beam_search_params",
    "BeamSearchSequence": "pipeline.client.beam_search",
    "Client": "pipeline.client.blocking_client",
    "CompletionOutput": "pipeline.client.outputs",
    "ConnectionLost": "pipeline.client.errors",
    "ClassificationRequestOutput": "pipeline.client.pooling_outputs",
    "EmbeddingRequestOutput": "pipeline.client.pooling_outputs",
    "ForeignServer": "pipeline.client.errors",
    "LLM": "pipeline.client.llm",
    "Logprob": "pipeline.client.logprobs",
    "PoolingParams": "pipeline.client.inputs.pooling_params",
    "PoolingRequestOutput": "pipeline.client.pooling_outputs",
    "RequestError": "pipeline.client.errors",
    "RequestOutput": "pipeline.client.outputs",
    "RequestStateStats": "pipeline.client.outputs",
    "SamplingParams": "pipeline.client.inputs.sampling_params",
    "ScoringRequestOutput": "pipeline.client.pooling_outputs",
    "StructuredOutputsParams": "pipeline.client.inputs.structured_params",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "Client",
    "CompletionOutput",
    "ConnectionLost",
    "EmbeddingRequestOutput",
    "ForeignServer",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "RequestStateStats",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
