"""A server with a KV cache in 8 bits: a stage dies and no client notices; a replay has the same bits.

By default execute is killed. PIPELINE_ALL_KV=1 also kills schedule, and replays both.
"""

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.replay.compare import compare
from tests.e2e.recovery.test_recovery import (
    MAX_TOKENS,
    MOMENTS,
    assert_restarted,
    assert_same,
    kill,
    pids,
    post,
    run_and,
)
from tests.e2e.recovery_streams import STORY, Ledger, requests, run
from tests.e2e.server import Server

INT8 = "execute.kv_dtype=int8"
IS_WHOLE = bool(os.environ.get("PIPELINE_ALL_KV"))
KILLED = ("execute", "schedule") if IS_WHOLE else ("execute",)
REPLAYED = ("execute", "schedule")
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    rules = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
    with Server(*rules, INT8, "log_level=debug") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


@pytest.mark.parametrize("stage", KILLED)
def test_no_client_notices_the_death_of_a_stage(server: Server, undisturbed: dict[str, Any], stage: str) -> None:
    assert any("kv_dtype=int8" in line for line in server.lines)
    before = pids(server)
    received = run_and(server, MOMENTS["in the middle"], lambda: kill(before[f"{stage}.0"]))
    assert_same(received, undisturbed)
    assert_restarted(before, pids(server), stage)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a server from start to end, with samples that fork."""
    folder = tmp_path_factory.mktemp("recordings")
    files = {stage: folder / f"{stage}.rec" for stage in REPLAYED}
    options = [part for stage, path in files.items() for part in ("--record", f"{stage}={path}")]
    with Server(INT8, options=tuple(options)) as server:
        bodies: list[dict[str, Any]] = [
            {"n": 3, "temperature": 1.0, "seed": 5},
            {"temperature": 0},
            {"prompt": [9] * 300},
        ]
        threads = [
            threading.Thread(target=post, args=(server, "/v1/completions"), kwargs={"prompt": STORY, **body})
            for body in bodies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        server.until_idle()
    return files


if IS_WHOLE:

    @pytest.mark.parametrize("stage", REPLAYED)
    def test_the_replay_of_a_stage_is_bit_identical(stage: str, recordings: dict[str, Path], tmp_path: Path) -> None:
        replay(stage, recordings[stage], tmp_path / "out", paced=False, inline=False)
        comparison = compare(tmp_path / "out", recordings[stage])
        assert comparison.are_same, comparison.difference
        assert comparison.num_same == sum(comparison.sent.values()) > 3
