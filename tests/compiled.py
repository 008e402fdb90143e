"""The compiled CPU kernels of the user's cache in other caches: compiling them takes half a minute of CPU time."""

from pathlib import Path

from pipeline.kernels.cpu.build import default_cache_root


def link_kernels(cache: Path) -> Path:
    """Give a folder for `cache_dir` the kernels that are compiled already, and those that will be. Returns it."""
    compiled = default_cache_root() / "kernels"
    compiled.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    link = cache / compiled.name
    if not link.is_symlink():
        link.symlink_to(compiled)
    return cache
