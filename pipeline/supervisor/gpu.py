"""Whether there can be a GPU at all: asked before a model is fetched for one. It takes no torch, and no GPU is touched;
what there is to say of one that is there, the executor says."""

import ctypes
import os
from collections.abc import Callable, Mapping

from pipeline.config.settings import Settings

DRIVER = "libcuda.so.1"


def is_interpreted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a GPU's kernels are run on the CPU, for tests: by Triton's own switch, read as Triton reads it."""
    return environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "on", "yes", "true")


def why_none(
    settings: Settings, load: Callable[[str], object] = ctypes.CDLL, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Why these settings can't have the device that they ask for, in the user's words; None where nothing speaks
    against it yet."""
    if settings.execute.device != "cuda" or is_interpreted(environ):
        return None
    try:
        load(DRIVER)
    except OSError:
        return (
            f"execute.device is 'cuda', but this machine has no NVIDIA driver ({DRIVER} is not found): install one, or "
            "in a container let it see the GPU (docker run --gpus all), or set execute.device to 'cpu'"
        )
    return None
