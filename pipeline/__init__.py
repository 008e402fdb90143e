"""The public names, loaded when they are first used: the stages' processes import this package without them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.client import AsyncClient, Client, ConnectionLost, RequestError
    from pipeline.sampling_params import SamplingParams

_HOMES = {
    "AsyncClient": "pipeline.client",
    "Client": "pipeline.client",
    "ConnectionLost": "pipeline.client",
    "RequestError": "pipeline.client",
    "SamplingParams": "pipeline.sampling_params",
}

__all__ = ["AsyncClient", "Client", "ConnectionLost", "RequestError", "SamplingParams"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(home), name)
