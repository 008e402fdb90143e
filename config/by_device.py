"""What settings mean that leave a choice to us and depend on where the model runs. Nobody else asks which it is."""

from typing import Literal

from pipeline.config.settings import Settings

CPU_KV_BYTES = 512 * 1024**2
"""Of KV memory on a CPU. Reserving touches it, which takes 0.13 s for this much."""


def depth_of(settings: Settings) -> Literal[1, 2, 3, 4, "auto"]:
    """Steps in flight. On a CPU the step itself takes the cores that a plan would need beside it; a GPU would wait for
    each plan."""
    depth = settings.schedule.depth
    if depth == 0:
        return 1 if settings.execute.device == "cpu" else 2
    return depth


def kv_bytes_in_ram(settings: Settings) -> int:
    """The part of this machine's own memory that KV blocks take: none of it where they are a GPU's."""
    if settings.execute.device != "cpu":
        return 0
    return settings.execute.kv_cache_bytes or CPU_KV_BYTES
