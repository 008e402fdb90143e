"""A successor of the executor computes with the same back end, whatever has happened to the compiled kernels and to the
compiler meanwhile. If it can't, streams end with an error instead of other ids."""

import json
import os
import shutil
import signal
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.kernels.cpu.build import build
from pipeline.kernels.cpu.isa import available
from tests.e2e.server import Server

NUM_TOKENS = 160
NUM_TRIES = 20
"""A stream of the tiny model may be over before its executor is stopped."""


@contextmanager
def serving(tiny_model: Path, folder: Path) -> Iterator[tuple[Server, Path]]:
    """A server with a cache of its own, in which the library for this machine is, and the cache's folder of
    libraries."""
    compiled, kernels = build(available()[0], print), folder / "kernels"
    kernels.mkdir(mode=0o700)
    shutil.copy2(compiled, kernels)
    sets = [f"model={tiny_model}", f"cache_dir={folder}", "execute.num_threads=1", "execute.kernels=auto"]
    try:
        with Server(*sets, "execute.kv_cache_bytes=16MiB") as server:
            assert server.health()["backend"].startswith(f"kernels={available()[0]} code=")
            yield server, kernels
    finally:
        remove(kernels)


def remove(kernels: Path) -> None:
    """Remove the libraries. None can be compiled, as on a full disk: their folder is a file."""
    if kernels.is_dir():
        shutil.rmtree(kernels)
    kernels.touch()


@contextmanager
def stream(server: Server) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a sampled stream."""
    body = {"model": "tiny", "prompt": [3, 14, 15, 92, 65], "max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 7}
    body |= {"temperature": 0.8, "stream": True, "logprobs": 1, "return_tokens_as_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        lines = (line.removeprefix(b"data: ") for line in response if line.startswith(b"data: "))
        yield (json.loads(line) for line in lines if not line.startswith(b"[DONE]"))


def killed_stream(server: Server) -> tuple[list[dict[str, Any]], int]:
    """The events of a stream whose executor was killed when some output had arrived and some had not, and the pid."""
    for _ in range(NUM_TRIES):
        pid = pid_of_execute(server)
        with stream(server) as events:
            begun = [next(events)]
            os.kill(pid, signal.SIGSTOP)
            is_open = server.health()["open_requests"] > 0
            os.kill(pid, signal.SIGKILL if is_open else signal.SIGCONT)
            received = [*begun, *events]
        if is_open:
            return received, pid
    raise AssertionError("each stream was over before its executor was stopped")


def pid_of_execute(server: Server) -> int:
    return next(int(one["pid"]) for one in server.health()["stages"] if one["name"] == "execute.0")


def choices_of(events: Iterable[dict[str, Any]]) -> list[Any]:
    """Ids and logprobs."""
    return [
        pair
        for event in events
        for one in event["choices"]
        if one["logprobs"]
        for pair in zip(one["logprobs"]["tokens"], one["logprobs"]["token_logprobs"], strict=True)
    ]


def test_a_stream_goes_on_exactly_if_the_kernels_can_not_be_compiled_again(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as (server, kernels):
        with stream(server) as events:
            expected = choices_of(events)
        assert len(expected) == NUM_TOKENS
        backend = server.health()["backend"]
        remove(kernels)
        received, pid = killed_stream(server)
        assert choices_of(received) == expected
        health = server.until(lambda health: health["status"] == "ok")
        assert pid_of_execute(server) != pid
        assert (health["batch_invariant"], health["backend"]) == (True, backend)
        loaded = [line for line in server.lines if "execute.0 loaded" in line]
        assert len(loaded) == 2 and all(f"cpu, {available()[0]}" in line for line in loaded)
        assert server.stop() == 0


def test_a_stream_ends_with_an_error_if_the_same_back_end_can_not_be_had(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path) as (server, kernels):
        with stream(server) as events:
            expected = choices_of(events)
        fds = Path(f"/proc/{server.process.pid}/fd")
        (kept,) = [fd for fd in fds.iterdir() if "memfd:pipeline-library" in str(fd.readlink())]
        remove(kernels)
        os.truncate(kept, 0)
        (*begun, last), _ = killed_stream(server)
        assert last["error"]["code"] == "stage_died" and "execute" in last["error"]["message"]
        received = choices_of(begun)
        assert received == expected[: len(received)] and 0 < len(received) < NUM_TOKENS
        line = server.wait_for_line(f"the executor before computed with '{available()[0]}'", 30)
        assert "cannot keep compiled kernels" in line
        assert server.process.wait(60) == 3, "a service manager starts a new server"


def test_a_reload_does_not_change_the_back_end(tiny_model: Path, tmp_path: Path) -> None:
    from tests.e2e.recovery.test_recovery import reload

    with serving(tiny_model, tmp_path) as (server, _):
        for setting in ("execute.kernels=torch", "execute.activations=int8"):
            result = reload(server, "--set", setting)
            assert result.returncode != 0
            assert "open streams would continue with other numbers" in result.stdout + result.stderr
        assert server.stop() == 0
