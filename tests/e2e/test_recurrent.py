"""A server of a tiny Qwen3.5, whose layers have recurrent states: clients get what they would have got alone, whatever
stage dies."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import link_kernels
from tests.e2e.recovery.test_recovery import RESTARTED, assert_restarted, assert_same, kill, pids, post
from tests.e2e.recovery.test_sleep import recomputed, run_and, sleep, wake_up
from tests.e2e.recovery.test_swap import counted
from tests.e2e.recovery_streams import STORY, Ledger, requests, run
from tests.e2e.server import Server
from tests.stages.execute.recurrent_models import VARIANTS, make
from tests.stages.prepare.checkpoints import save_folder

MAX_TOKENS = 40
EVENTS = 60
"""Of all streams before the kill."""
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant:{% endif %}"


def streams() -> dict[str, tuple[str, dict[str, Any]]]:
    """20 requests of 16 kinds."""
    found = requests(MAX_TOKENS)
    path, body = found["seeded"]
    return found | {f"seeded {i}": (path, body | {"seed": i, "prompt": STORY * (i + 1)}) for i in range(4)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    variant = VARIANTS["qwen3_5"]
    folder = tmp_path_factory.mktemp("models") / "recurrent"
    made = make(replace(variant, changes=variant.changes | {"max_position_embeddings": 4096}))
    return save_folder(folder, made, tokenizer_config={"chat_template": TEMPLATE})


def rules(model: Path, *more: str) -> tuple[str, ...]:
    return (
        f"model={model}",
        f"cache_dir={link_kernels(model.parent / 'cache')}",
        "chat.reasoning_parser=qwen3",
        "schedule.policy=priority",
        *more,
    )


@pytest.fixture(scope="module", params=["", "execute.swap_bytes=16MiB"], ids=["no swap space", "offload"])
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    swap = [request.param] if request.param else []
    how = rules(model, "execute.kv_cache_bytes=8MiB", "schedule.max_num_seqs=32", "supervisor.max_restarts=100", *swap)
    how += ("gateway.enable_sleep_mode=true",)
    with Server(*how) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    found = asyncio.run(run(server.url, streams(), Ledger()))
    assert len({str(found[f"seeded {i}"]) for i in range(4)}) == 4
    return found


def test_texts_of_the_second_time_equal_those_of_the_first(server: Server, undisturbed: dict[str, Any]) -> None:
    before = counted(server, "pipeline_state_hits_total")
    assert_same(asyncio.run(run(server.url, streams(), Ledger())), undisturbed)
    assert counted(server, "pipeline_state_hits_total") > before, "prompts are found behind snapshots"


@pytest.mark.parametrize("stage", RESTARTED)
def test_no_client_notices_the_death_of_a_stage(server: Server, undisturbed: dict[str, Any], stage: str) -> None:
    before = pids(server)
    ledger, killed = Ledger(), []

    def on_event(number: int) -> None:
        if number >= EVENTS and not killed:
            killed.append(stage)
            kill(before[f"{stage}.0"])

    ledger.on_event(on_event)
    received = asyncio.run(run(server.url, streams(), ledger))
    assert killed, f"only {ledger.num_events} events came"
    assert_same(received, undisturbed)
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    assert_restarted(before, pids(server), stage)
    server.look()


@pytest.mark.parametrize("stage", ["schedule", "execute"])
def test_snapshots_outlive_schedule_and_in_swap_space_the_executor(server: Server, stage: str) -> None:
    prompt = [3 + (7 * i + len(stage)) % 500 for i in range(300)]

    def num_cached() -> int:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        return int(post(server, "/v1/completions", **body)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [num_cached() for _ in range(2)] == [0, 288]
    has_swap = server.health()["swap_blocks"]["total"] > 0
    before = pids(server)
    kill(before[f"{stage}.0"])
    server.until(lambda health: health["status"] == "ok" and pids(server) != before)
    assert num_cached() == (288 if stage == "schedule" or has_swap else 0)
    server.look()


@pytest.mark.parametrize("setting", ["speculative.method=ngram", "lora.runtime_loading=true"])
def test_what_is_not_supported_is_refused_by_name(model: Path, setting: str) -> None:
    with Server(*rules(model, setting), until_ready=False) as server:
        line = server.wait_for_line(r"is not supported for recurrent .*it has recurrent layers", 60)
        key, value = setting.split("=")
        assert re.search(rf"{key} is '?{value}'?, ", line, re.IGNORECASE)
        assert server.process.wait(60) == 1


def test_states_are_kept_while_the_server_sleeps(server: Server, undisturbed: dict[str, Any]) -> None:
    num_recomputed = recomputed(server)

    def nap() -> None:
        sleep(server)
        wake_up(server)

    assert_same(run_and(server, {1: nap, EVENTS: nap}, streams()), undisturbed)
    assert recomputed(server) == num_recomputed
