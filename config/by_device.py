"""Settings whose default depends on the device and where it is. Only this module looks at that."""

from typing import Literal

from pipeline.config.settings import Settings

CPU_KV_BYTES = 512 * 1024**2
"""KV memory on a CPU. Touching every page takes 0.13 s of CPU time for this size, beside the first steps."""


def max_steps_in_flight(settings: Settings) -> int | Literal["auto"]:
    """How many steps to keep in flight. On a CPU, planning beside a step takes cores away from it; a GPU would idle
    during each plan, and so would stages of a pipeline that have no step. An executor on another host would idle while
    its result and its next step travel."""
    chosen = settings.schedule.max_steps_in_flight
    num_stages = settings.execute.pipeline_parallel
    if num_stages > 1:
        return num_stages if chosen in (0, "auto") else chosen
    if chosen == 0:
        is_near = settings.execute.launcher == "process"
        return 1 if settings.execute.device == "cpu" and is_near else 2
    return chosen


def kv_bytes_in_ram(settings: Settings) -> int:
    """Host memory for KV blocks: 0 if they are on a GPU."""
    if settings.execute.device != "cpu":
        return 0
    return settings.execute.kv_cache_bytes or CPU_KV_BYTES
