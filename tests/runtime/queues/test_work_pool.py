"""Pools of threads for blocking work: bounded, apart from each other, and dropped with their process."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from pipeline.runtime.queues.work_pool import PoolFull, WorkPool
from tests.rig import PATIENCE_S


async def until_busy(pool: WorkPool, num: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while pool.num_busy != num:
            await asyncio.sleep(0.001)


def test_a_pool_has_a_bound_of_its_own() -> None:
    async def run() -> None:
        go = threading.Event()
        pool, other = WorkPool("one", max_threads=2, max_waiting=3), WorkPool("other")
        running = [asyncio.create_task(pool.run(go.wait, PATIENCE_S)) for _ in range(2)]
        await until_busy(pool, 2)
        waiting = [asyncio.create_task(pool.run(go.wait, PATIENCE_S)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(PoolFull, match="one"):
            await pool.run(go.wait)
        assert await other.run(divmod, 7, 2) == (3, 1), "a full pool stops no other"
        waiting.pop().cancel()
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(pool.run(go.wait, PATIENCE_S)))
        await asyncio.sleep(0)
        running.pop().cancel()
        assert pool.num_busy == 2, "a caller that gives up does not free its thread"
        go.set()
        assert await asyncio.gather(*running, *waiting) == [True] * 4

    asyncio.run(run())


def test_results_errors_and_threads() -> None:
    async def run() -> None:
        pool = WorkPool("work", max_threads=3)
        names = {await pool.run(lambda: threading.current_thread().name) for _ in range(20)}
        assert len(names) == 1, "an idle thread takes the next call"
        with pytest.raises(ZeroDivisionError):
            await pool.run(divmod, 1, 0)
        barrier = threading.Barrier(3, timeout=PATIENCE_S)
        await asyncio.gather(*(pool.run(barrier.wait) for _ in range(3)))
        assert await asyncio.gather(*(pool.run(int, str(i)) for i in range(100))) == list(range(100))

    asyncio.run(run())


def test_a_thread_is_idle_before_its_caller_has_the_result() -> None:
    """Else a caller that is quick would start another thread."""
    pool = WorkPool("work", max_threads=2)
    num_busy: list[int] = []
    finished = threading.Event()

    def note(future: "Future[int]") -> None:
        num_busy.append(pool.num_busy)
        finished.set()

    pool._submit(lambda: time.sleep(0.01) or 7).add_done_callback(note)
    assert finished.wait(PATIENCE_S) and num_busy == [0]


def test_an_error_of_abandoned_work_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends an invalid body and leaves could else fill the log."""
    begun, may_end = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        may_end.wait(PATIENCE_S)
        raise ValueError("of the work")

    async def run() -> None:
        pool = WorkPool("work")
        task = asyncio.create_task(pool.run_to_end(fail))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done(), "it waits for the end"
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        with pytest.raises(ValueError, match="of the work"):
            await pool.run_to_end(fail)
        assert await pool.run_to_end(int, "7") == 7

    asyncio.run(run())
    gc.collect()
    assert not caplog.records


def test_work_that_never_ends_does_not_keep_a_process() -> None:
    program = """
import asyncio, threading
from pipeline.runtime.queues.work_pool import WorkPool

async def run():
    pool = WorkPool("stuck")
    begun = threading.Event()
    def block():
        begun.set()
        threading.Event().wait()
    task = asyncio.create_task(pool.run(block))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    task.cancel()

asyncio.run(run())
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=PATIENCE_S, check=False).returncode == 0
