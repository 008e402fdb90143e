"""A server sleeps and wakes under requests with LoRA adapters, beams and draft models: their texts stay the same."""

import asyncio
import json
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare
from tests.e2e.recovery.test_recovery import assert_same
from tests.e2e.recovery.test_sleep import recomputed, run_and, sleep, wake_up
from tests.e2e.recovery.test_swap import NUM_TRIES, sets
from tests.e2e.recovery_streams import Ledger, run
from tests.e2e.server import Server
from tests.lora.random_adapters import write_adapter
from tests.stages.execute.drafts.test_eagle import write_head

RULES = ("execute.kv_cache_bytes=4MiB", "gateway.enable_sleep_mode=true")
PROMPT = "one two three one two three one two"
NUM_NAPS, NUM_TOKENS = 3, 20
"""Sleeps, and output tokens of all requests between two of them."""
WIDTH = 3

Kinds = dict[str, tuple[str, dict[str, Any]]]


def kind(**fields: Any) -> tuple[str, dict[str, Any]]:
    """Path and body."""
    body = {"prompt": PROMPT, "max_tokens": 120, "temperature": 0, "ignore_eos": True, "logprobs": 1, "stream": True}
    return "/v1/completions", body | {"return_token_ids": True} | fields


def beams(**fields: Any) -> tuple[str, dict[str, Any]]:
    return kind(n=WIDTH, use_beam_search=True, stream=False, **fields)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of different ranks, which change texts."""
    settings = Settings(model=str(tiny_model), cache_dir=str(tiny_model.parent / "cache"))
    config, root = ModelConfig.load(prepare(settings)), tmp_path_factory.mktemp("adapters")
    ranks = {"one": 4, "two": 8, "late": 2}
    return {name: write_adapter(root / name, config, rank=rank, seed=rank) for name, rank in ranks.items()}


@pytest.fixture(scope="module")
def server(tiny_model: Path, folders: dict[str, Path]) -> Iterator[Server]:
    table = ", ".join(f'{name} = "{folders[name]}"' for name in ("one", "two"))
    lora = (f"lora.adapters={{{table}}}", "lora.runtime_loading=true", "lora.max_loras=3", "lora.max_lora_rank=8")
    with Server(*sets(tiny_model, "0"), *RULES, *lora) as server:
        yield server


def undisturbed(server: Server, kinds: Kinds) -> dict[str, Any]:
    return asyncio.run(run(server.url, kinds, Ledger()))


def until_tokens(server: Server, num_tokens: int) -> None:
    """Wait until so many have come since the server's start, or nothing runs."""
    server.until(lambda health: not health["running"] or health["counters"]["output_tokens"] >= num_tokens)


def napping(server: Server, num_running: list[int]) -> Callable[[], None]:
    """Several sleeps. Each adds the number of sequences that run meanwhile."""

    def naps() -> None:
        for _ in range(NUM_NAPS):
            sleep(server)
            health = server.health()
            num_running.append(health["running"])
            wake_up(server)
            until_tokens(server, health["counters"]["output_tokens"] + NUM_TOKENS)

    return naps


def assert_same_after_sleeps(server: Server, kinds: Kinds, expected: dict[str, Any], num_sequences: int) -> None:
    """Sleep under these requests, until all of their sequences were open at one of the sleeps: under load, some may
    have ended before others begin."""
    num_recomputed, num_running = recomputed(server), [0]
    for _ in range(NUM_TRIES):
        assert_same(run_and(server, {1: napping(server, num_running)}, kinds), expected)
        assert recomputed(server) == num_recomputed
        if max(num_running) == num_sequences:
            return
    raise AssertionError(f"at most {max(num_running)} of {num_sequences} sequences were open at a sleep")


def test_adapters_and_beams_sleep(server: Server) -> None:
    kinds = {
        "plain": kind(),
        "one": kind(model="one"),
        "two, sampled": kind(model="two", temperature=1.0, seed=5, n=2),
        "beams": beams(),
        "beams of one": beams(model="one"),
        "beams of two": beams(model="two"),
    }
    expected = undisturbed(server, kinds)
    assert len({json.dumps(expected[name]) for name in kinds}) == len(kinds), "each has another text"
    assert_same_after_sleeps(server, kinds, expected, 4 + 3 * WIDTH)


def test_adapters_come_and_go_while_the_server_sleeps(server: Server, folders: dict[str, Path]) -> None:
    """A request keeps its adapter, though it is unloaded before the wake."""

    def call(path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{server.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=60).close()

    def load() -> None:
        call("/v1/load_lora_adapter", lora_name="late", lora_path=str(folders["late"]))

    def unload() -> None:
        call("/v1/unload_lora_adapter", lora_name="late")

    def nap(change: Callable[[], None]) -> Callable[[], None]:
        def act() -> None:
            sleep(server)
            change()
            wake_up(server)

        return act

    kinds = {"late": kind(model="late"), "beams of late": beams(model="late")}
    nap(load)()
    expected = undisturbed(server, kinds)
    assert expected["late"] != undisturbed(server, {"late": kind()})["late"]
    assert_same(run_and(server, {1: nap(unload)}, kinds), expected)


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_draft_models_sleep(tiny_model: Path, tmp_path: Path, method: str) -> None:
    kinds = {
        "greedy": kind(),
        "sampled": kind(temperature=0.8, seed=5, n=3),
        "long": kind(prompt=PROMPT * 3),
    }
    with Server(*sets(tiny_model, "0"), *RULES) as server:
        expected = undisturbed(server, kinds)
    draft = tiny_model
    if method == "eagle":
        config = json.loads((tiny_model / "config.json").read_text())
        draft = write_head(tmp_path / "head", **{name: config[name] for name in ("hidden_size", "vocab_size")})
    speculative = (f"speculative.method={method}", f"speculative.draft={draft}", "speculative.adaptive=false")
    with Server(*sets(tiny_model, "0"), *RULES, *speculative) as server:
        assert_same_after_sleeps(server, kinds, expected, 5)
