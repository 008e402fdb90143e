"""Checks for an NVIDIA driver before a model is downloaded for a GPU. Imports no torch and does not touch the GPU; the
executor reports everything else."""

import ctypes
import os
from collections.abc import Callable, Mapping

from pipeline.config.settings import Settings

DRIVER = "libcuda.so.1"


def is_interpreted(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether GPU kernels run on the CPU, for tests: reads Triton's own variable."""
    return environ.get("TRITON_INTERPRET", "").lower() in ("1", "y", "on", "yes", "true")


def why_none(
    settings: Settings, load: Callable[[str], object] = ctypes.CDLL, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Why the settings' device is not available, for the user; None if it may be available."""
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
