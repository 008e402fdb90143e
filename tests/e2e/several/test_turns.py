"""Models that don't fit together take turns under open streams: each client receives what it would have received, and
no prompt is computed twice."""

import re
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server import Server
from tests.e2e.several.asking import completion, events_of, statuses, until
from tests.stages.prepare.checkpoints import save_folder, tiny_llama

NAMES = ("one", "two", "three")
NUM_TOKENS = 500
"""They take several times `QUANTUM_S`."""
PROMPTS = [f"Hello number {index} of many" for index in range(4)]
QUANTUM_S = 0.15
RECOMPUTED = "pipeline_schedule_recomputed_prompt_tokens_total"


@pytest.fixture(scope="module")
def server(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of three models with room for one that is awake and two that sleep: 578 MiB and 2 * 130 MiB."""
    tables = f'[execute]\nswap_dir = "{tmp_path_factory.mktemp("swap")}"\nkv_cache_bytes = "384MiB"\nnum_threads = 1\n'
    for index, name in enumerate(NAMES):
        save_folder(folders / name, tiny_llama(num_hidden_layers=2 + index, max_position_embeddings=1024))
        tables += f'[models.{name}]\nmodel = "{folders}/{name}"\nload_at_start = false\n'
    path = folders / "turns.toml"
    top = f'cache_dir = "{folders}/cache"\nmemory_bytes = "1100MiB"\nswap_quantum_s = {QUANTUM_S}\n'
    path.write_text(f"{top}[gateway]\nsse_keep_alive_s = 0.1\n[supervisor]\nmax_restarts = 1000\n{tables}")
    with Server(config=path) as server:
        server.wait_for_line("ready on http", 60)
        yield server


def text_of(server: Server, name: str, seed: int) -> str:
    fields = {"prompt": PROMPTS[seed], "seed": seed, "temperature": 1.0}
    found = completion(server, name, NUM_TOKENS, **fields)["choices"][0]
    assert found["finish_reason"] == "length"
    return str(found["text"])


@pytest.fixture(scope="module")
def alone(server: Server) -> dict[str, list[str]]:
    """The texts of each model, served alone."""
    with ThreadPoolExecutor(4) as pool:
        return {name: list(pool.map(lambda seed, name=name: text_of(server, name, seed), range(4))) for name in NAMES}


def metrics(server: Server, name: str) -> dict[str, float]:
    """The values of a metric, by model."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        found = re.findall(rf'^{name}{{model_name="(.*)"}} (\S+)$', response.read().decode(), re.MULTILINE)
    return {model: float(value) for model, value in found}


def run(server: Server) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """The texts of four requests of each model, all at once; and the states of the models meanwhile."""
    seen: list[dict[str, Any]] = []
    with ThreadPoolExecutor(12) as pool:
        found = {name: [pool.submit(text_of, server, name, seed) for seed in range(4)] for name in NAMES}
        while not all(one.done() for texts in found.values() for one in texts):
            status = statuses(server)
            recomputed = metrics(server, RECOMPUTED)
            seen.append({name: one | {"recomputed": recomputed.get(name, 0.0)} for name, one in status.items()})
            time.sleep(0.05)
        return {name: [one.result() for one in texts] for name, texts in found.items()}, seen


def test_models_that_do_not_fit_together_take_turns_and_no_stream_notices(
    server: Server, alone: dict[str, list[str]]
) -> None:
    before = metrics(server, "pipeline_model_turns_total")
    found, seen = run(server)
    assert found == alone
    turns = {name: number - before[name] for name, number in metrics(server, "pipeline_model_turns_total").items()}
    assert sum(turns.values()) >= 2, turns
    assert not any(one["recomputed"] for states in seen for one in states.values())
    for states in seen:
        awake = [one for one in states.values() if one["value"] in ("loaded", "loading")]
        assert len(awake) <= 1, states
    waiting = [one for states in seen for one in states.values() if one["value"] == "sleeping" and "position" in one]
    assert waiting and all(one["waits_since"] > 0 and one["position"] in (1, 2) for one in waiting)


@pytest.mark.parametrize("stage", ["execute", "schedule"])
def test_a_stage_that_is_killed_during_a_swap_changes_no_text(
    server: Server, alone: dict[str, list[str]], stage: str
) -> None:
    killed: list[bool] = []

    def kill() -> None:
        """Kill a stage of a model that sleeps, once it is there: it leaves or comes back."""
        name = until(lambda: next((name for name, one in statuses(server).items() if one["value"] == "sleeping"), ""))
        killed.append(until(lambda: kill_process(server, f"pipeline: {stage}.0 {name}")))

    thread = threading.Thread(target=kill)
    thread.start()
    found, _ = run(server)
    thread.join()
    assert found == alone and killed


def test_the_keep_alives_of_a_stream_whose_model_sleeps_show_its_position(server: Server) -> None:
    body = {"prompt": PROMPTS[0], "max_tokens": NUM_TOKENS, "stream": True, "ignore_eos": True}
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda name: events_of(server, "/v1/completions", body | {"model": name}), NAMES[:2])
        comments = {line for lines in found for line in lines if line.startswith(": the model sleeps")}
    assert comments & {f": the model sleeps: position 1, after {name}" for name in NAMES[:2]}, comments


def kill_process(server: Server, title: str) -> bool:
    """Kill the process with this title. Returns whether there is one."""
    server.look()
    for one in list(server.seen.values()):
        with suppress(psutil.NoSuchProcess):
            if one.cmdline()[:1] == [title]:
                one.kill()
                return True
    return False
