"""A real server with swap space: whose it is, what it says of it, and how it ends without enough."""

import json
import re
import urllib.request
from pathlib import Path

import psutil

from tests.e2e.server import STAGES, Server


def sets(tiny_model: Path, swap_bytes: str, kernels: str = "torch") -> list[str]:
    model = [f"model={tiny_model}", f"cache_dir={tiny_model.parent / 'cache'}"]
    return [*model, f"execute.kernels={kernels}", "execute.threads=1", f"execute.swap_bytes={swap_bytes}"]


def has_swap(process: psutil.Process) -> bool:
    return any("memfd:pipeline-swap" in str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir())


def test_a_server_says_how_many_blocks_it_can_swap_and_gives_the_memory_back(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "70MiB"), "execute.kv_cache_bytes=1MiB") as server:
        loaded = server.wait_for_line(r"execute\.0 loaded .*swap_blocks", 10)
        ready = server.wait_for_line("ready on", 10)
        num_swap_blocks = int(re.findall(r"swap_blocks=(\d+)", ready)[0])
        num_blocks = int(re.findall(r"kv_blocks=(\d+)", ready)[0])
        assert num_swap_blocks == num_blocks * 70, "as many in each MiB, and none that is not whole"
        assert f"swap_blocks={num_swap_blocks}" in loaded
        owners = {name for name in STAGES if has_swap(server.stage(name))}
        assert owners == {"execute"}
        assert has_swap(psutil.Process(server.process.pid)), "the supervisor keeps it for the next executor"
        maps = Path(f"/proc/{server.stage('execute').pid}/maps").read_text()
        assert re.search(r"rw-s .*memfd:pipeline-swap", maps)
        body = {"model": "tiny", "prompt": "a b c", "max_tokens": 8}
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.loads(response.read())["usage"]["completion_tokens"] <= 8
        assert server.stop() == 0
        assert "Traceback" not in server.log()
        assert not server.leftovers()


def test_a_server_without_swap_space_says_nothing_of_it(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "0")) as server:
        assert not has_swap(server.stage("execute")) and not has_swap(psutil.Process(server.process.pid))
        assert server.stop() == 0
        assert "swap" not in server.log()


def test_swap_space_that_is_not_there_is_said_before_anything_is_started(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "9000000000000"), until_ready=False) as server:
        line = server.wait_for_line("cannot reserve", 60)
        assert "lower execute.swap_bytes" in line
        assert server.process.wait(20) == 1
        assert "Traceback" not in server.log() and "prepared" not in server.log()


def test_swap_space_for_no_whole_block_is_said_in_the_users_words(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "100"), until_ready=False) as server:
        line = server.wait_for_line("cannot start: execute", 60)
        assert "execute.swap_bytes is 100, but one block of 16 tokens of this model takes" in line
        assert server.process.wait(20) == 1
        assert "Traceback" not in server.log()


def test_an_executor_without_a_model_takes_swap_space_as_it_is(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "100"), options=("--instant",)) as server:
        assert re.search(r"swap_blocks=\d+", server.wait_for_line("ready on", 10))
        assert server.stop() == 0
