"""What the executor needs of a host, and whether one has it. Pure: resources go in, an error comes out."""

import importlib.util
from collections.abc import Mapping, Sequence

from pipeline.config.settings import Settings

ACTOR_ENVIRONMENT = {"env_vars": {"RAY_worker_niceness": "0"}}
"""Ray's `runtime_env` of our actors. By default Ray runs actors at nice 15, for the sake of its daemons; what an actor
starts inherits that, and an executor would wait whenever any other process of its host wants a core."""

NOT_INSTALLED = (
    "execute.launcher is 'ray', but ray is not installed: run `.venv/bin/pip install -e '.[ray]'` in the clone"
)


def bundle_of(settings: Settings) -> dict[str, float]:
    """The resources that Ray reserves on each host: as many GPUs as it has ranks, or CPUs."""
    num = settings.execute.tensor_parallel
    if settings.execute.device == "cuda":
        return {"GPU": float(num), "CPU": float(settings.ray.bundle_cpus or num)}
    return {"CPU": float(settings.ray.bundle_cpus or num)}


def problem_of(bundle: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> str:
    """Why no node has room for a bundle, for the user; empty if one has. `nodes` are their free resources."""
    if any(all(node.get(kind, 0.0) >= num for kind, num in bundle.items()) for node in nodes):
        return ""
    for kind, num in bundle.items():  # the first one that no node has
        if not any(node.get(kind, 0.0) >= num for node in nodes):
            have = ", ".join(f"{node.get(kind, 0.0):g}" for node in nodes) or "none"
            return f"ray: no node has {_free(kind, num)}; nodes have {have}"
    needs = " and ".join(_free(kind, num) for kind, num in bundle.items())
    return f"ray: no node has {needs} at once"


def _free(kind: str, num: float) -> str:
    return f"{num:g} free {kind}{'s' if num != 1 else ''}"


def why_not_installed() -> str | None:
    """The error if Ray is not installed; else None. Does not import it."""
    return None if importlib.util.find_spec("ray") is not None else NOT_INSTALLED
