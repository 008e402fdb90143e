"""PyTorch is an extra: the CPU library does without it. What needs it says so, and how to get it, in one line.

Imports no torch: whether it is there is asked of the import system, which takes no second of a start.
"""

import importlib.util
import sys

from pipeline.config.settings import Settings
from pipeline.errors import UserError

REQUIREMENT = "torch>=2.11"
"""As the extra `torch` of pyproject.toml."""
SMALLER = "for a build without CUDA, 0.2 instead of 2.7 GB, add the --index-url of pytorch.org/get-started"
"""pip finds builds for CUDA by default."""


def is_installed() -> bool:
    """Whether torch can be imported, as far as the import system knows without loading it."""
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def how_to_get(device: str = "cpu") -> str:
    """The command that installs it for a device."""
    smaller = "" if device == "cuda" else f" ({SMALLER})"
    return f"{sys.executable} -m pip install '{REQUIREMENT}'{smaller}"


def require(what: str, device: str = "cpu") -> None:
    """Raises UserError if `what`, the subject of the message, needs torch, and there is none."""
    if not is_installed():
        raise UserError(f"{what} needs PyTorch, which is not installed: {how_to_get(device)}")


def why_missing(settings: Settings) -> str | None:
    """Which setting needs torch where there is none, for the user, before a model is downloaded; None if none does."""
    execute = settings.execute
    needs = (
        ("execute.device='cuda'", execute.device == "cuda"),
        ("execute.kernels='torch'", execute.kernels == "torch"),
        (f"execute.dtype={execute.dtype!r}", execute.dtype != "bfloat16" and execute.kernels == "auto"),
    )
    what = next((what for what, is_needed in needs if is_needed), None)
    if what is None:
        return None
    try:
        require(what, execute.device)
    except UserError as error:
        return str(error)
    return None
