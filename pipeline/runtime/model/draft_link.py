"""Where the executor finds the prepared draft model: a link in the cache, which prepare sets.

The link's name depends on what the settings say, not on the content: the executor can't see the model's source.
"""

import hashlib
from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.runtime.files.cache_path import cache_path

DRAFTS = "drafts"
"""The folder of links in the cache."""


def draft_link(settings: Settings) -> Path:
    """The link to the prepared folder of `speculative.draft` for `model`."""
    names = f"{settings.model}|{settings.quantization}|{settings.speculative.draft}|{Path.cwd()}"
    digest = hashlib.sha256(names.encode()).hexdigest()
    return cache_path(settings).expanduser().absolute() / DRAFTS / digest[:16]
