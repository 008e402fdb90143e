"""What the executor needs of a host, and whether one has it. Pure: resources go in, an error comes out."""

from collections.abc import Mapping, Sequence

from pipeline.config.settings import Settings


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
            return f"ray: no node has {num:g} free {kind}{'s' if num != 1 else ''}; nodes have {have}"
    needs = " and ".join(f"{num:g} free {kind}s" for kind, num in bundle.items())
    return f"ray: no node has {needs} at once"


def installed_problem(is_installed: bool) -> str:
    """The error if Ray is needed and not installed; else empty."""
    if is_installed:
        return ""
    return "execute.launcher is 'ray', but ray is not installed: pip install 'pipeline-serve[ray]'"
