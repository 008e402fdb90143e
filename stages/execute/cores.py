"""The cores of an executor, or of each of its ranks."""

import os

from pipeline.config.settings import Settings
from pipeline.config.values import core_list
from pipeline.errors import UserError


def threads_of(settings: Settings) -> int:
    """Threads that compute a step in this process; with ranks, those of one. All ranks have the same number. The ranks
    of a stage of the pipeline compute at once, so they divide the cores. The stages share them: with one sequence or
    prompt, only one stage has work, and would leave cores idle."""
    execute = settings.execute
    if execute.num_threads:
        return execute.num_threads
    if execute.cores:
        return min(len(core_list.parse(entry)) for entry in execute.cores)
    return max(1, len(os.sched_getaffinity(0)) // execute.tensor_parallel)


def use_cores(settings: Settings, rank: int) -> None:
    """Run on the rank's cores from now on: this thread, and those that it starts. Raises UserError if it may not."""
    if not settings.execute.cores:
        return
    entry = settings.execute.cores[rank]
    may = os.sched_getaffinity(0)
    cores = core_list.parse(entry)
    try:
        os.sched_setaffinity(0, cores)
        lacking = sorted(set(cores) - os.sched_getaffinity(0))
    except OSError:
        lacking = sorted(set(cores) - may) or cores
    if lacking:
        raise UserError(
            f"execute.cores: {entry!r} has cores that this process may not use: {', '.join(map(str, lacking))}"
        )
