"""A server sleeps and wakes under requests of every kind: each client receives exactly what it would have received, and
no prompt is computed twice."""

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.recovery.test_recovery import RESTARTED, assert_same, kill, pids
from tests.e2e.recovery.test_swap import NUM_TRIES, complete, counted, sets
from tests.e2e.recovery_streams import Ledger, requests, run
from tests.e2e.server import Server
from tests.slices import ALL_CASES

MAX_TOKENS = 24
MOMENTS = (1, 40, 120)
"""Events of all streams before a sleep."""
PHASES = ("falling asleep", "asleep", "waking")
KILLS = [
    [("execute", "falling asleep"), ("execute", "waking"), ("schedule", "falling asleep")],
    [("schedule", "asleep"), ("detokenize", "asleep")],
]
"""In one run of the requests, one after the other at `MOMENTS`."""
if os.environ.get("PIPELINE_ALL_KILLS"):
    KILLS = [[(stage, phase)] for stage in RESTARTED for phase in PHASES if (stage, phase) != ("execute", "asleep")]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    rules = ("supervisor.max_restarts=1000", "schedule.policy=priority", "chat.reasoning_parser=qwen3")
    with Server(*rules, "gateway.enable_sleep_mode=true") as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, Any]:
    return asyncio.run(run(server.url, requests(MAX_TOKENS), Ledger()))


def call(server: Server, method: str, path: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, method=method), timeout=60) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def is_sleeping(server: Server) -> bool:
    status, body = call(server, "GET", "/is_sleeping")
    assert status == 200
    return bool(json.loads(body)["is_sleeping"])


def sleep(server: Server, query: str = "?level=1") -> None:
    assert call(server, "POST", f"/sleep{query}") == (200, b"")


def wake_up(server: Server) -> None:
    assert call(server, "POST", "/wake_up") == (200, b"")


def run_and(
    server: Server,
    acts: dict[int, Callable[[], None]],
    kinds: dict[str, tuple[str, dict[str, Any]]] | None = None,
) -> dict[str, Any]:
    """Run all requests, or those `kinds`, and call each of `acts` in a thread after so many events of all streams, one
    after the other. Waits until the server is idle."""
    ledger, threads, turn = Ledger(), list[threading.Thread](), threading.Lock()
    errors: list[BaseException] = []

    def do(act: Callable[[], None]) -> None:
        try:
            with turn:
                act()
        except BaseException as error:
            errors.append(error)
            raise

    def on_event(number: int) -> None:
        if number in acts:
            threads.append(threading.Thread(target=do, args=(acts[number],)))
            threads[-1].start()

    ledger.on_event(on_event)
    received = asyncio.run(run(server.url, kinds or requests(MAX_TOKENS), ledger))
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(threads) == len(acts), f"only {ledger.num_events} events came"
    server.until(lambda health: health["status"] == "ok")
    server.until_idle()
    server.look()
    return received


def recomputed(server: Server) -> int:
    return counted(server, "pipeline_schedule_recomputed_prompt_tokens_total")


def test_no_client_notices_a_sleep_and_no_prompt_is_computed_twice(server: Server, undisturbed: dict[str, Any]) -> None:
    num_sleeps, before = counted(server, "pipeline_sleeps_total"), pids(server)
    num_recomputed = recomputed(server)

    def nap() -> None:
        sleep(server)
        assert is_sleeping(server)
        health = server.health()
        states = {one["name"]: one["state"] for one in health["stages"]}
        assert (health["status"], states["execute.0"]) == ("sleeping", "sleeping")
        assert not psutil.pid_exists(before["execute.0"])
        wake_up(server)
        assert not is_sleeping(server)
        before.update(pids(server))

    received = run_and(server, dict.fromkeys(MOMENTS, nap))
    assert_same(received, undisturbed)
    assert counted(server, "pipeline_sleeps_total") == num_sleeps + len(MOMENTS)
    assert counted(server, "pipeline_sleep_saved_bytes_total") > 0
    assert recomputed(server) == num_recomputed


@pytest.mark.parametrize("kills", KILLS, ids=lambda kills: ", ".join(" ".join(one) for one in kills))
def test_no_client_notices_a_death_while_the_server_falls_asleep_sleeps_or_wakes(
    server: Server, undisturbed: dict[str, Any], kills: list[tuple[str, str]]
) -> None:
    def nap(stage: str, phase: str) -> None:
        assert any(has_killed(stage, phase) for _ in range(NUM_TRIES)), "it fell asleep before it could be killed"

    def has_killed(stage: str, phase: str) -> bool:
        """Sleep and wake, and kill a stage in this phase. False if it had left before."""
        name, is_killed = f"{stage}.0", True
        falling = threading.Thread(target=sleep, args=(server,))
        falling.start()
        if phase == "falling asleep":
            try:
                kill(pids(server)[name])
            except psutil.NoSuchProcess:
                is_killed = False  # who does not wake the server would wait for its streams
        falling.join()
        if phase == "asleep":
            kill(pids(server)[name])
        waking = threading.Thread(target=wake_up, args=(server,))
        waking.start()
        if phase == "waking":
            states = {one["name"]: one for one in server.until(lambda health: health["status"] != "sleeping")["stages"]}
            with suppress(psutil.NoSuchProcess):
                kill(states[name]["pid"])
        waking.join()
        return is_killed

    moments = MOMENTS if len(kills) > 1 else (60,)
    received = run_and(server, {moment: partial(nap, *one) for moment, one in zip(moments, kills, strict=False)})
    assert_same(received, undisturbed)


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Server]:
    rules = ("execute.kv_cache_bytes=1MiB", "gateway.enable_sleep_mode=true", "gateway.sse_keep_alive_s=0.1")
    with Server(*sets(tiny_model, "0"), *rules) as server:
        yield server


def streamed(server: Server, **changes: Any) -> HTTPResponse:
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 200, "temperature": 0, "ignore_eos": True} | changes
    data = json.dumps(body | {"stream": True}).encode()
    request = urllib.request.Request(f"{server.url}/v1/completions", data, {"Content-Type": "application/json"})
    response = urllib.request.urlopen(request, timeout=60)
    assert isinstance(response, HTTPResponse)
    return response


def test_requests_queue_while_the_server_sleeps_and_their_streams_are_kept_alive(small: Server) -> None:
    expected = complete(small, [5, 6, 7], 200)["choices"][0]["text"]
    sleep(small)
    sleep(small)  # it does already
    with streamed(small) as response:
        assert [response.readline() for _ in range(4)].count(b": keep-alive\n") == 2
        assert small.health()["waiting"] == 1
        wake_up(small)
        wake_up(small)
        events = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == expected
    assert small.health()["status"] == "ok"


def test_clients_that_leave_and_deadlines_end_requests_of_a_sleeping_server(small: Server) -> None:
    response = streamed(small, max_tokens=230)
    assert response.readline().startswith(b"data: ")
    sleep(small)
    held = small.health()
    assert (held["running"], held["kv_blocks"]["held"] > 0) == (1, True)
    response.close()
    small.until(lambda health: (health["running"], health["kv_blocks"]["held"]) == (0, 0))
    assert small.health()["status"] == "sleeping"
    status = 0
    try:
        streamed(small, stream=False, timeout_s=0.3).close()
    except urllib.error.HTTPError as error:
        status = error.code
    assert status == 504
    wake_up(small)
    small.until_idle()


def test_a_request_wakes_a_server_that_was_asked_for_it(small: Server) -> None:
    expected = complete(small, [8, 9], 20)["choices"]
    sleep(small, "?wake_on_request=true")
    assert complete(small, [8, 9], 20)["choices"] == expected
    assert not is_sleeping(small)


@pytest.mark.parametrize(("rules", "num_kept"), [((), 48), (("execute.sleep_cache_bytes=0",), 0)])
def test_the_prefix_cache_of_a_sleeping_server_stays(tiny_model: Path, rules: tuple[str, ...], num_kept: int) -> None:
    prompt = [3 + number % 90 for number in range(64)]
    with Server(*sets(tiny_model, "0"), "gateway.enable_sleep_mode=true", *rules) as server:
        complete(server, prompt, 2)
        sleep(server)
        wake_up(server)
        complete(server, prompt, 2)
        assert server.health()["counters"]["cached_tokens"] == num_kept


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/sleep?level=2", "'level' must be 1"),
        ("/sleep?mode=abort", "'mode' must be 'keep'"),
        ("/sleep?wake_on_request=yes", "'wake_on_request' must be true or false"),
        ("/wake_up?tags=weights", "'tags' must be left out"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(small: Server, path: str, word: str) -> None:
    status, body = call(small, "POST", path)
    assert status == 400
    assert word in json.loads(body)["error"]["message"]
    assert not is_sleeping(small)


def test_a_server_must_be_allowed_to_sleep(tiny_model: Path) -> None:
    with Server(*sets(tiny_model, "0"), "execute.kv_cache_bytes=1MiB") as server:
        assert not is_sleeping(server)
        for path in ("/sleep", "/wake_up"):
            status, body = call(server, "POST", path)
            assert status == 403
            assert "gateway.enable_sleep_mode" in json.loads(body)["error"]["message"]


def test_a_file_in_a_folder_holds_what_was_saved(tiny_model: Path, tmp_path: Path) -> None:
    rules = ("execute.kv_cache_bytes=1MiB", f"execute.swap_dir={tmp_path}", "gateway.enable_sleep_mode=true")
    with Server(*sets(tiny_model, "0"), *rules) as server:
        expected = complete(server, [5, 6, 7], 230)["choices"][0]["text"]
        with streamed(server, max_tokens=230) as response:
            text = [response.readline()]
            sleep(server)
            files = [
                fd for fd in Path(f"/proc/{server.process.pid}/fd").iterdir() if str(tmp_path) in str(fd.readlink())
            ]
            assert [fd.stat().st_size > 0 for fd in files] == [True]
            wake_up(server)
            assert files[0].stat().st_size == 0
            text += list(response)
        events = [json.loads(line[6:]) for line in text if line.startswith(b"data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == expected
        assert not any(tmp_path.iterdir())
        sleep(server)
        assert server.stop() == 0
        assert not server.leftovers()


OF_ONE = ("execute.kv_dtype=int8", "speculative.method=ngram", "execute.swap_bytes=2MiB")
"""What an executor of one rank has together, and with all cases alone, too."""
EXECUTORS = [
    ("execute.tensor_parallel=2",),
    ("execute.pipeline_parallel=2",),
    ("execute.kernels=torch",),
    OF_ONE,
    *([(rule,) for rule in OF_ONE] if ALL_CASES else []),
]


@pytest.mark.parametrize("rules", EXECUTORS, ids=", ".join)
def test_any_executor_on_a_cpu_may_leave(tiny_model: Path, rules: tuple[str, ...]) -> None:
    """All of its ranks, if there are several."""
    prompts = [[5, 6, 7], [9] * 40, [3 + number % 50 for number in range(70)]]
    with Server(
        *sets(tiny_model, "0"), "execute.kv_cache_bytes=1MiB", "gateway.enable_sleep_mode=true", *rules
    ) as server:
        alone = [complete(server, prompt, 150)["choices"] for prompt in prompts]
        num_recomputed = recomputed(server)
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = [clients.submit(complete, server, prompt, 150) for prompt in prompts]
            for _ in range(1 if "execute.kernels=torch" in rules else 3):  # importing torch takes seconds
                sleep(server)
                wake_up(server)
            assert [answer.result()["choices"] for answer in answers] == alone
        assert recomputed(server) == num_recomputed


def test_commands_put_a_server_to_sleep_and_wake_it(small: Server) -> None:
    def run(*args: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "pipeline", *args, "--pid", str(small.process.pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert re.fullmatch(r"asleep after \d+\.\d\d s\n", run("sleep", "--wake-on-request").stdout)
    assert is_sleeping(small)
    failed = run("restart", "execute")
    assert (failed.returncode, "no stage 'execute.0' is ready" in failed.stderr) == (1, True)
    assert re.fullmatch(r"awake after \d+\.\d\d s\n", run("wake").stdout)
    assert not is_sleeping(small)
