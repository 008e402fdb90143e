"""A server whose executor has two ranks: the same replies as of one process, also if a rank dies or stands still."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from pipeline import LLM, SamplingParams
from tests.e2e.observed import Metrics, pipeline
from tests.e2e.recovery.test_recovery import MAX_TOKENS, MOMENTS, assert_same, kill, pids, run_and
from tests.e2e.recovery_streams import STORY, Ledger, requests, run
from tests.e2e.server import Server

pytestmark = pytest.mark.usefixtures("smollm2_dir")

RULES = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
ALL = bool(os.environ.get("PIPELINE_ALL_RANKS"))
KILLS = [("execute.0", "in the middle"), ("execute.1", "while prompts are read")]
STAGE_KILLS = [("execute.0", "in the middle")]
if ALL:
    STAGE_KILLS = [(f"execute.{rank}", moment) for rank in range(4) for moment in MOMENTS]
if os.environ.get("PIPELINE_ALL_KILLS"):
    KILLS = [(rank, moment) for rank in ("execute.0", "execute.1") for moment in MOMENTS]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Server]:
    with Server(*RULES, "execute.barrier_timeout_s=2", options=("--tp", "2")) as server:
        yield server


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """The replies of a server without ranks."""
    with Server(*RULES) as server:
        return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


@pytest.fixture(scope="module")
def stages() -> Iterator[Server]:
    """A pipeline of two stages; with PIPELINE_ALL_RANKS, each has two ranks."""
    options = ("--pp", "2", "--tp", "2" if ALL else "1")
    with Server(*RULES, "execute.barrier_timeout_s=2", "execute.num_threads=1", options=options) as server:
        yield server


def test_two_ranks_return_what_one_process_returns(ranks: Server, expected: dict[str, Any]) -> None:
    assert_same(asyncio.run(run(ranks.url, requests(MAX_TOKENS), Ledger())), expected)
    ranks.until_idle()


def test_ranks_are_listed_and_report_how_long_they_wait_for_each_other(ranks: Server) -> None:
    metrics = Metrics(ranks)
    steps = [metrics.get("pipeline_execute_steps_total", stage=f"execute.{rank}") for rank in range(2)]
    assert steps[0] == steps[1] > 0
    waits = [metrics.get("pipeline_execute_barrier_seconds_total", stage=f"execute.{rank}") for rank in range(2)]
    assert min(waits) > 0
    listed = pipeline("ps", "--port", ranks.url.rpartition(":")[2])
    assert re.findall(r"execute\.\d", listed.stdout) == ["execute.0", "execute.1"], listed.stderr
    uneven = ranks.wait_for_line("2 ranks have 2, 1 KV heads", 0.0)
    assert "execute.tensor_parallel" in uneven


@pytest.mark.parametrize(("rank", "moment"), KILLS)
def test_no_client_notices_the_death_of_a_rank(ranks: Server, expected: dict[str, Any], rank: str, moment: str) -> None:
    before = pids(ranks)
    assert_same(run_and(ranks, MOMENTS[moment], lambda: kill(before[rank])), expected)
    after = pids(ranks)
    assert {name for name in before if before[name] != after[name]} == {"execute.0", "execute.1"}


def test_a_rank_that_stands_still_is_named_and_all_ranks_are_replaced(ranks: Server, expected: dict[str, Any]) -> None:
    before = pids(ranks)
    stopped = psutil.Process(before["execute.1"])
    assert_same(run_and(ranks, MOMENTS["in the middle"], lambda: stopped.send_signal(signal.SIGSTOP)), expected)
    line = ranks.wait_for_line("execute.0 died: execute.1 stood at ", 0.0)
    assert re.search(r"execute\.1 stood at [^,]+(, layer \d+)?, step \d+, for 2 s \(execute\.barrier_timeout_s\)", line)
    assert not stopped.is_running()


def test_a_rank_is_restarted_on_purpose_with_the_others(ranks: Server) -> None:
    before = pids(ranks)
    done = pipeline("restart", "execute.1", "--port", ranks.url.rpartition(":")[2])
    assert done.returncode == 0, done.stderr
    ranks.until(lambda health: health["status"] == "ok")
    after = pids(ranks)
    assert {name for name in before if before[name] != after[name]} == {"execute.0", "execute.1"}
    ranks.look()


def test_two_stages_return_what_one_process_returns(stages: Server, expected: dict[str, Any]) -> None:
    assert_same(asyncio.run(run(stages.url, requests(MAX_TOKENS), Ledger())), expected)
    stages.until_idle()


def test_stages_are_listed_with_their_places_and_report_how_long_they_wait(stages: Server) -> None:
    metrics, names = Metrics(stages), [f"execute.{rank}" for rank in range(4 if ALL else 2)]
    steps = [metrics.get("pipeline_execute_steps_total", stage=name) for name in names]
    assert len(set(steps)) == 1 and steps[0] > 0
    waits = [metrics.get("pipeline_execute_pipeline_wait_seconds_total", stage=name) for name in names]
    assert waits[-1] > 0  # for the first stage, in the first step if not in others
    listed = pipeline("ps", "--port", stages.url.rpartition(":")[2])
    rank_names = ["pp0/tp0", "pp0/tp1", "pp1/tp0", "pp1/tp1"] if ALL else ["pp0/tp0", "pp1/tp0"]
    assert re.findall(r"pp\d/tp\d", listed.stdout) == rank_names, listed.stdout + listed.stderr
    assert "layers=0-" in stages.wait_for_line("execute.0 loaded", 0.0)


@pytest.mark.parametrize(("rank", "moment"), STAGE_KILLS)
def test_no_client_notices_the_death_of_a_stage(
    stages: Server, expected: dict[str, Any], rank: str, moment: str
) -> None:
    before = pids(stages)
    assert_same(run_and(stages, MOMENTS[moment], lambda: kill(before[rank])), expected)
    after = pids(stages)
    assert {name for name in before if before[name] != after[name]} == {
        name for name in before if name.startswith("execute.")
    }


if ALL:

    def test_no_client_notices_the_death_of_schedule_with_stages(stages: Server, expected: dict[str, Any]) -> None:
        before = pids(stages)
        assert_same(run_and(stages, MOMENTS["in the middle"], lambda: kill(before["schedule.0"])), expected)
        after = pids(stages)
        assert {name for name in before if before[name] != after[name]} == {"schedule.0"}

    def test_a_stage_that_stands_still_is_named(stages: Server, expected: dict[str, Any]) -> None:
        before = pids(stages)
        stopped = psutil.Process(before["execute.0"])
        assert_same(run_and(stages, MOMENTS["in the middle"], lambda: stopped.send_signal(signal.SIGSTOP)), expected)
        line = stages.wait_for_line("died: execute.0 stood at ", 0.0)
        assert re.search(
            r"execute\.0 stood at [^,]+(, layer \d+)?, step \d+, for 2 s \(execute\.barrier_timeout_s\)", line
        )
        assert not stopped.is_running()


def test_an_embedded_server_has_ranks(expected: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    with LLM(tensor_parallel=2, progress=False, execute={"kv_cache_bytes": 64 * 1024**2}) as llm:
        (output,) = llm.generate([STORY], params)
    assert list(output.outputs[0].token_ids) == expected["greedy"][0]["ids"]


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    with Server(options=("--tp", "4"), until_ready=False) as server:
        line = server.wait_for_line("cannot start", 60.0)
        assert "execute.tensor_parallel: 4 ranks, but the model has 3 KV heads: choose 1, 2, 3, 6 or 9" in line
        assert server.process.wait(30) == 1
