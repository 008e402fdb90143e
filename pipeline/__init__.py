"""The public names, loaded when they are first used: the stages' processes import this package without them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.async_llm import AsyncLLM
    from pipeline.client import AsyncClient, Client, ConnectionLost, ForeignServer, RequestError
    from pipeline.llm import LLM
    from pipeline.logprobs import Logprob
    from pipeline.outputs import CompletionOutput, RequestOutput
    from pipeline.sampling_params import SamplingParams
    from pipeline.structured_params import StructuredOutputsParams

_HOMES = {
    "AsyncClient": "pipeline.client",
    "AsyncLLM": "pipeline.async_llm",
    "Client": "pipeline.client",
    "CompletionOutput": "pipeline.outputs",
    "ConnectionLost": "pipeline.client",
    "ForeignServer": "pipeline.client",
    "LLM": "pipeline.llm",
    "Logprob": "pipeline.logprobs",
    "RequestError": "pipeline.client",
    "RequestOutput": "pipeline.outputs",
    "SamplingParams": "pipeline.sampling_params",
    "StructuredOutputsParams": "pipeline.structured_params",
}

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncLLM",
    "Client",
    "CompletionOutput",
    "ConnectionLost",
    "ForeignServer",
    "Logprob",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
