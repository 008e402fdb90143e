"""A real server with swap space: ownership, log and metrics, and too little memory."""

import json
import os
import re
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from tests.compiled import link_kernels
from tests.e2e.server import STAGES, Server

KILLED = ("execute", "schedule", "detokenize", "ingest")[: None if os.environ.get("PIPELINE_ALL_KILLS") else 2]

NUM_TRIES = 10


def sets(tiny_model: Path, swap_bytes: str) -> list[str]:
    """Models are prepared beside their folder."""
    model = [f"model={tiny_model}", f"cache_dir={link_kernels(tiny_model.parent / 'cache')}"]
    return [*model, "execute.num_threads=1", f"execute.swap_bytes={swap_bytes}"]


def has_swap(process: psutil.Process) -> bool:
    return any("memfd:pipeline-swap" in str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir())


def complete(server: Server, prompt: list[int] | list[list[int]], max_tokens: int, n: int = 1) -> dict[str, Any]:
    """Greedy, whatever the ids are. Several prompts come at once, even on a busy machine."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "n": n, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer


def counted(server: Server, name: str) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", response.read().decode(), re.MULTILINE)
    assert len(found) == 1, f"{name}: {found}"
    return int(float(found[0]))


def counters(health: dict[str, Any]) -> dict[str, int]:
    found: dict[str, int] = health["counters"]
    return found


def reset_prefix_cache(server: Server) -> None:
    request = urllib.request.Request(f"{server.url}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def kill_while_swapped(server: Server, stage: str, prompts: list[list[int]], expected: list[str]) -> bool:
    """Complete all prompts, and kill a stage when sequences are in swap space. Returns False if all were completed
    before any was seen there: on a busy machine, that time may be short between two looks."""
    with ThreadPoolExecutor(1) as client:
        answer = client.submit(complete, server, prompts, 190)
        health = server.until(lambda health: health["swapped"] or answer.done())
        if is_swapped := bool(health["swapped"]):
            pids = {one["name"]: one["pid"] for one in health["stages"]}
            os.kill(pids[f"{stage}.0"], signal.SIGKILL)
        assert texts_of(answer.result()) == expected
    return is_swapped


def test_a_server_that_swaps_returns_the_texts_of_each_request_alone(tiny_model: Path) -> None:
    """256 blocks, for requests that need 16 blocks each at their end. And so it does if a stage dies while sequences
    are in swap space. By default these are two stages; PIPELINE_ALL_KILLS=1 kills the others too."""
    rules = ["execute.kv_cache_bytes=1MiB", "schedule.prefix_caching=false", "schedule.preemption=swap"]
    prompts = [[3 + (7 * i + 11 * position) % 500 for position in range(60)] for i in range(28)]
    rules += ["schedule.max_steps_in_flight=2", "supervisor.max_restarts=100"]
    with Server(*sets(tiny_model, "4MiB"), *rules) as server:
        together = texts_of(complete(server, prompts, 190))
        num_out, num_in = (
            counted(server, f"pipeline_schedule_blocks_swapped_{direction}_total") for direction in ("out", "in")
        )
        assert num_in == num_out > 0, "all blocks that were swapped out were swapped in"
        for i in range(0, len(prompts), 4):
            assert texts_of(complete(server, prompts[i], 190)) == [together[i]]
        assert len({*together}) > len(prompts) // 2
        for stage in KILLED:
            assert any(kill_while_swapped(server, stage, prompts, together) for _ in range(NUM_TRIES)), (
                "no sequence was seen in swap space"
            )
            server.until(lambda health: health["status"] == "ok")
            found = counters(server.until_idle())
            if stage == "execute":  # schedule's own counters begin anew
                assert found["blocks_swapped_in"] > num_in, "swapped sequences come back from swap space"
            num_in = found["blocks_swapped_in"]
        assert server.stop() == 0


def test_a_server_reports_its_swap_blocks_and_frees_the_memory(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "70MiB"), "execute.kv_cache_bytes=1MiB") as server:
        loaded = server.wait_for_line(r"execute\.0 loaded .*swap_blocks", 10)
        ready = server.wait_for_line("ready on", 10)
        num_swap_blocks = int(re.findall(r"swap_blocks=(\d+)", ready)[0])
        num_blocks = int(re.findall(r"kv_blocks=(\d+)", ready)[0])
        assert num_swap_blocks == num_blocks * 70, "the swap space is 70 times the KV memory, in whole blocks"
        assert f"swap_blocks={num_swap_blocks}" in loaded
        owners = {name for name in STAGES if has_swap(server.stage(name))}
        assert owners == {"execute"}
        assert has_swap(psutil.Process(server.process.pid)), "the supervisor keeps it for the next executor"
        maps = Path(f"/proc/{server.stage('execute').pid}/maps").read_text()
        assert re.search(r"rw-s .*memfd:pipeline-swap", maps)
        assert complete(server, [5, 9, 31], 8)["usage"]["completion_tokens"] == 8
        assert server.stop() == 0
        assert "Traceback" not in server.log()
        assert not server.leftovers()


def test_a_server_without_swap_space_has_no_segment_and_no_log_line(server: Server) -> None:
    assert not has_swap(server.stage("execute")) and not has_swap(psutil.Process(server.process.pid))
    assert "swap" not in server.log()


def test_too_little_memory_for_swap_space_is_reported_before_anything_starts(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "9000000000000"), until_ready=False) as server:
        line = server.wait_for_line("cannot reserve", 60)
        assert "lower execute.swap_bytes" in line
        assert server.process.wait(20) == 1
        assert "Traceback" not in server.log() and "prepared" not in server.log()


def test_swap_space_below_one_block_is_a_clear_error(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "100"), until_ready=False) as server:
        line = server.wait_for_line("cannot start: execute", 60)
        assert "execute.swap_bytes is 100B, but one block of 16 tokens of this model takes" in line
        assert server.process.wait(20) == 1
        assert "Traceback" not in server.log()


def test_after_a_death_the_blocks_of_running_sequences_are_copied_back_or_still_there(tiny_model: Path) -> None:
    """Those of swap space after a death of execute; after one of schedule, execute still has them."""
    prompts = [[3 + (7 * i + 11 * position) % 500 for position in range(60)] for i in range(8)]
    with Server(*sets(tiny_model, "8MiB"), "schedule.kv_offload=true", "execute.kv_cache_bytes=8MiB") as server:
        alone = [complete(server, prompt, 190)["choices"] for prompt in prompts]
        for stage in ("execute", "schedule", "execute"):
            reset_prefix_cache(server)
            num_offloaded = counters(server.health())["blocks_offloaded"] + 5 * len(prompts)
            with ThreadPoolExecutor(len(prompts)) as clients:
                together = [clients.submit(complete, server, prompt, 190) for prompt in prompts]
                server.until(lambda health: counters(health)["blocks_offloaded"] > num_offloaded)  # noqa: B023
                num_restored = counters(server.health())["blocks_restored"] if stage == "execute" else 0
                pids = {one["name"]: one["pid"] for one in server.health()["stages"]}
                os.kill(pids[f"{stage}.0"], signal.SIGKILL)
                assert [one.result()["choices"] for one in together] == alone
            counted = counters(server.until_idle())
            if stage == "execute":
                assert counted["blocks_restored"] > num_restored + 3 * len(prompts)
            else:
                assert counted["cached_tokens"] >= 3 * 16 * len(prompts) and not counted["blocks_restored"]
        assert server.stop() == 0
