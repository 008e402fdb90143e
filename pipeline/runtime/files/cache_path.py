"""Where servers keep on disk what outlives them: prepared models, compiled kernels and crash reports."""

import os
from pathlib import Path

from pipeline.config.settings import Settings

CRASHES = "crashes"
"""The folder of crash reports in the cache."""


def cache_path(settings: Settings) -> Path:
    """The cache's folder, whose `~` is not expanded."""
    if settings.cache_dir:
        return Path(settings.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "pipeline"
