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
from tests.e2e.recovery_streams import STORY, Ledger, requests, run
from tests.e2e.server import Server
from tests.e2e.test_observability import Metrics, pipeline
from tests.e2e.test_recovery import MAX_TOKENS, MOMENTS, assert_same, kill, pids, run_and

pytestmark = pytest.mark.usefixtures("smollm2_dir")

RULES = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
KILLS = [("execute.0", "in the middle"), ("execute.1", "while prompts are read")]
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
