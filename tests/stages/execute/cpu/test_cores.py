"""The cores and threads of ranks."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.config.values import core_list
from pipeline.errors import UserError
from pipeline.stages.execute.cores import threads_of, use_cores

CORES = sorted(os.sched_getaffinity(0))


def settings(**execute: object) -> Settings:
    return Settings(execute=ExecuteSettings(**execute))  # type: ignore[arg-type]


def cores_of(given: Settings, rank: int) -> list[int]:
    """The cores of a thread that has called `use_cores`."""

    def work() -> list[int]:
        use_cores(given, rank)
        return sorted(os.sched_getaffinity(0))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_each_rank_runs_on_its_cores() -> None:
    first, last = str(CORES[0]), str(CORES[-1])
    given = settings(tensor_parallel=2, cores=(first, last))
    assert [cores_of(given, rank) for rank in range(2)] == [[CORES[0]], [CORES[-1]]]
    assert threads_of(given) == 1
    assert cores_of(settings(), 0) == CORES, "by default, all cores"


def test_cores_that_a_process_may_not_use_are_refused() -> None:
    with pytest.raises(UserError, match=r"^execute\.cores: '4095' has cores that this process may not use: 4095$"):
        cores_of(settings(cores=("4095",)), 0)


def test_ranks_share_the_cores() -> None:
    assert threads_of(settings()) == len(CORES)
    assert threads_of(settings(tensor_parallel=2)) == max(1, len(CORES) // 2)
    assert threads_of(settings(tensor_parallel=64)) == max(1, len(CORES) // 64)
    assert threads_of(settings(pipeline_parallel=2)) == len(CORES), "stages share the cores"
    assert threads_of(settings(pipeline_parallel=2, tensor_parallel=2)) == max(1, len(CORES) // 2)
    assert threads_of(settings(pipeline_parallel=2, cores=("0-2", "3-5"))) == 3
    assert threads_of(settings(tensor_parallel=2, num_threads=3)) == 3
    assert threads_of(settings(tensor_parallel=2, cores=("0-7", "8-11"))) == 4, "all ranks have as many"


def test_lists_of_cores() -> None:
    assert core_list.parse("0-3,8, 10-11") == [0, 1, 2, 3, 8, 10, 11]
    for text in ("", "a", "1-", "-1", "3-2", "1,,2", "70000"):
        with pytest.raises(ValueError, match="is no list of cores"):
            core_list.parse(text)
