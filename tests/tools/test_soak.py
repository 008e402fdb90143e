"""The pure parts of tools/soak, its clients with faulty servers, and a short run of it."""

import asyncio
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from pipeline.cli.bench.client import ServerError
from pipeline.client.client import AsyncClient
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.metrics.stats import ScheduleCounts, ServerStats, StageCounts, StageStats
from tools.soak import clients, probes
from tools.soak import patience as patience_module
from tools.soak.__main__ import complaints_of
from tools.soak.after import leftovers
from tools.soak.clients import Outcome, known_extras, of_status, over_http
from tools.soak.endings import ReplyState
from tools.soak.requests import EXTRAS, RandomRequest, draw

ROOT = Path(__file__).resolve().parent.parent.parent
ALL = frozenset(EXTRAS)
PATIENCE_S = 20.0
SMOKE_MINUTES = "0.06"


def random_request(**given: Any) -> RandomRequest:
    fields: dict[str, Any] = {
        "protocol": "http",
        "streams": True,
        "prompt": "Once",
        "params": {"n": 1, "max_tokens": 4},
        "extras": {},
        "leave_after_s": None,
        "says_so": False,
    }
    return RandomRequest(**(fields | given))


# -------------------------------------------------------------------------------------------------------- requests


def test_requests_are_determined_by_the_seed() -> None:
    one, other = random.Random(5), random.Random(5)
    assert [draw(one, ALL) for _ in range(50)] == [draw(other, ALL) for _ in range(50)]
    assert draw(random.Random(6), ALL) != draw(random.Random(5), ALL)


def test_every_feature_is_requested_sometimes() -> None:
    rng = random.Random(1)
    requests = [draw(rng, ALL) for _ in range(500)]
    assert {one.n for one in requests} == {1, 2, 3, 4}
    assert {(one.protocol, one.streams) for one in requests} == {("http", True), ("http", False), ("zmq", True)}
    assert {name for one in requests for name in one.extras} == ALL
    for has in (
        lambda one: "stop" in one.params,
        lambda one: one.leave_after_s is not None and one.protocol == "zmq" and one.says_so,
        lambda one: one.leave_after_s is not None and one.protocol == "http",
        lambda one: one.params["temperature"] == 0,
        lambda one: len(one.prompt.split()) >= 500,
        lambda one: len(one.prompt.split()) <= 30,
    ):
        assert 10 < sum(map(has, requests)) < 450
    beginnings = [tuple(one.prompt.split()[:100]) for one in requests if len(one.prompt.split()) >= 100]
    assert len(set(beginnings)) < 0.8 * len(beginnings)


def test_every_request_is_valid() -> None:
    rng = random.Random(2)
    for _ in range(200):
        SamplingParams(**draw(rng, ALL).params)  # raises if it is invalid


def test_only_known_extras_are_requested() -> None:
    rng = random.Random(1)
    assert all(set(draw(rng, frozenset({"priority"})).extras) == {"priority"} for _ in range(20))
    assert all(not draw(rng, frozenset()).extras for _ in range(20))


# --------------------------------------------------------------------------------------------------------- endings


def fed(n: int, *events: tuple[int, bool, str | None]) -> list[str]:
    endings = ReplyState(n)
    for event in events:
        endings.feed(*event)
    return endings.end()


def test_each_sequence_ends_once() -> None:
    assert fed(2, (0, True, None), (1, True, "stop"), (0, False, "length")) == []
    assert fed(1, (0, False, "stop"), (0, False, None)) == []  # an empty event


@pytest.mark.parametrize(
    ("n", "events", "complaint"),
    [
        (1, [(0, True, None)], "1 of 1 sequences never ended"),
        (2, [(0, True, "stop")], "1 of 2 sequences never ended"),
        (1, [(0, True, "stop"), (0, False, "stop")], "ended again with stop"),
        (1, [(0, True, "stop"), (0, True, None)], "went on"),
        (1, [(1, True, None), (0, True, "stop")], "sequence 1 of an answer with 1"),
    ],
)
def test_wrong_endings_are_reported(n: int, events: list[tuple[int, bool, str | None]], complaint: str) -> None:
    (found,) = fed(n, *events)
    assert complaint in found


# ---------------------------------------------------------------------------------------------------------- probes


def test_the_first_difference_between_two_answers_is_found() -> None:
    expected = ((1, 2, 3), "abc")
    assert probes.difference(expected, ((1, 2, 3), "abc")) == ""
    assert "first other one at 2" in probes.difference(expected, ((1, 2, 4), "abd"))
    assert "2 ids instead of 3, the first other one at 2" in probes.difference(expected, ((1, 2), "ab"))
    assert "the same ids, but the text" in probes.difference(expected, ((1, 2, 3), "abd"))


# --------------------------------------------------------------------------------------------------------- clients


def chunk(**choice: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": "", "finish_reason": None} | choice]}).encode()


GOOD = [chunk(text="a"), chunk(finish_reason="length"), b"data: [DONE]"]


async def outcome_of(answer: list[bytes] | web.Response | Callable[[], Any], one: RandomRequest) -> Outcome:
    """The client's outcome for an answer."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if isinstance(answer, web.Response):
            return answer
        if not isinstance(answer, list):
            await answer()
            return web.Response()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"\n\n".join(answer) + b"\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with TestServer(app) as server, ClientSession() as session, asyncio.timeout(PATIENCE_S):
        return await over_http(session, str(server.make_url("")).rstrip("/"), "model", one)


async def test_a_good_stream_ends() -> None:
    assert await outcome_of(GOOD, random_request()) == Outcome("ended")


@pytest.mark.parametrize(
    ("events", "words"),
    [
        (GOOD[:2], "without [DONE]"),
        ([GOOD[0], GOOD[2]], "never ended"),
        ([*GOOD[:2], GOOD[1], GOOD[2]], "ended again"),
        ([*GOOD, GOOD[0]], "after [DONE]"),
        ([chunk(finish_reason="abort"), GOOD[2]], "finish_reason abort"),
        ([GOOD[0], b'data: {"error": {"message": "lost"}}'], "error in the stream: lost"),
        ([b"data: {"], "can't be read"),
    ],
)
async def test_wrong_streams_are_reported(events: list[bytes], words: str) -> None:
    outcome = await outcome_of(events, random_request())
    assert outcome.kind == "wrong" and words in outcome.words


async def test_whole_answers_are_checked() -> None:
    both = [{"index": index, "finish_reason": "stop"} for index in range(2)]
    two = random_request(streams=False, params={"n": 2})
    assert await outcome_of(web.json_response({"choices": both}), two) == Outcome("ended")
    assert (await outcome_of(web.json_response({"choices": both[:1]}), two)).kind == "wrong"
    assert (await outcome_of(web.json_response({}), two)).kind == "wrong"


async def test_statuses_are_classified() -> None:
    assert await outcome_of(web.json_response({"error": {"message": "full"}}, status=503), random_request()) == Outcome(
        "refused"
    )
    outcome = await outcome_of(web.json_response({"error": {"message": "oh"}}, status=500), random_request())
    assert outcome == Outcome("wrong", "500: oh")
    assert of_status(504, "late", random_request(extras={"timeout_s": 1.0})).kind == "timed out"
    assert of_status(504, "late", random_request()).kind == "wrong"
    assert of_status(400, "no", random_request(extras={"timeout_s": 1.0})).kind == "wrong"


async def test_clients_that_leave_and_answers_that_take_too_long_are_distinguished(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forever = asyncio.Event().wait
    assert await outcome_of(forever, random_request(leave_after_s=0.05)) == Outcome("left")
    monkeypatch.setattr(clients, "PATIENCE_S", 0.05)
    outcome = await outcome_of(forever, random_request())
    assert outcome.kind == "wrong" and "no end within" in outcome.words


async def test_a_suspension_counts_as_a_short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    begun_s, ticks = time.monotonic(), itertools.count()
    clock = SimpleNamespace(monotonic=lambda: begun_s + 100.0 * next(ticks))
    monkeypatch.setattr(patience_module, "time", clock)
    monkeypatch.setattr(patience_module, "TICK_S", 0.01)
    with pytest.raises(TimeoutError):
        async with patience_module.patience(10.0):
            await asyncio.Event().wait()
    assert next(ticks) == 2 * 4, "each tick of 100 s counts as 3 s"


async def test_supported_fields_are_detected_by_trying_them() -> None:
    def answer(status: int, message: str = "") -> web.Response:
        return web.json_response({"error": {"message": message}}, status=status)

    async def found(handle: Callable[[dict[str, Any]], web.Response]) -> frozenset[str]:
        async def serve(request: web.Request) -> web.StreamResponse:
            return handle(await request.json())

        app = web.Application()
        app.router.add_post("/v1/completions", serve)
        async with TestServer(app) as server, ClientSession() as session:
            return await known_extras(session, str(server.make_url("")).rstrip("/"), "model")

    assert await found(lambda body: answer(200)) == ALL
    assert await found(
        lambda body: answer(200) if "cache_salt" in body else answer(400, "priority, timeout_s: not supported")
    ) == {"cache_salt"}
    with pytest.raises(ServerError):
        await found(lambda body: answer(500))
    with pytest.raises(ServerError):
        await found(lambda body: answer(400, "'model' is required"))


def test_an_extra_goes_where_the_zmq_client_accepts_it() -> None:
    import inspect

    params, beside = clients._for_zmq(
        random_request(protocol="zmq", extras={"priority": 2, "cache_salt": "red", "timeout_s": 1.0})
    )
    indices = {*SamplingParams.__struct_fields__, *inspect.signature(AsyncClient.generate).parameters}
    taken = {*beside, *(name for name in EXTRAS if getattr(params, name, None) is not None)}
    assert taken == ALL & indices


# ----------------------------------------------------------------------------------------------------------- after


def stats_of(**schedule: int) -> ServerStats:
    """The stats of a server with ten blocks; unmentioned blocks are free."""
    counts: dict[str, Any] = dict.fromkeys(("num_running", "num_waiting", "num_blocks_cached", "num_blocks_held"), 0)
    counts |= {"num_blocks_total": 10, "num_blocks_free": 10} | schedule
    own = ScheduleCounts(**counts)
    stage = StageStats("schedule.0", 1, "ready", 0, 1.0, 1, 1.0, 1, StageCounts(0, 0, [], own, 0, 0.0, 0, 0, 0))
    return ServerStats("1-a", 1, "0", "m", "http://x", "serving", 1.0, 1.0, [stage])


def test_an_idle_server_has_no_leftovers() -> None:
    assert leftovers(stats_of()) == []
    assert leftovers(stats_of(num_blocks_cached=4, num_blocks_free=6)) == []
    assert leftovers(stats_of(num_swap_blocks_total=5, num_swap_blocks_free=5)) == []


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ({"num_running": 1}, "1 running"),
        ({"num_waiting": 2}, "2 waiting"),
        ({"num_swapped": 3}, "3 swapped"),
        ({"num_blocks_held": 4, "num_blocks_free": 6}, "4 KV blocks held"),
        ({"num_blocks_free": 9}, "1 KV blocks lost"),
        ({"num_swap_blocks_total": 5, "num_swap_blocks_free": 3}, "2 swap blocks not free"),
    ],
)
def test_leftovers_are_reported(counts: dict[str, int], words: str) -> None:
    assert leftovers(stats_of(**counts)) == [words]


def test_errors_in_the_log_are_found() -> None:
    log = "10:31:07.120 I gateway.0 ready\n10:31:07.121 E schedule.0 oh no=1\nTraceback (most recent call last):\n  x"
    assert len(complaints_of(log)) == 2
    assert complaints_of("10:31:07.120 W gateway.0 E is a letter\n") == []


# ------------------------------------------------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def short_run(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The findings of a run of some seconds, in a process of its own."""
    path = tmp_path_factory.mktemp("soak") / "soak.json"
    command = [sys.executable, "-m", "tools.soak", "--minutes", SMOKE_MINUTES, "--seed", "3", "--json", str(path)]
    command += ["--most", "16", "--set", "execute.kv_cache_bytes=40MiB"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert path.exists(), done.stdout + done.stderr
    yield msgspec.json.decode(path.read_bytes()) | {"code": done.returncode, "stdout": done.stdout}


def test_a_short_soak_finds_no_fault(short_run: dict[str, Any]) -> None:
    assert short_run["faults"] == {}
    assert (short_run["code"], short_run["outcomes"].get("wrong")) == (0, None)
    assert "no faults" in short_run["stdout"]


def test_a_short_soak_sends_requests_and_probes(short_run: dict[str, Any]) -> None:
    assert short_run["outcomes"]["ended"] >= 5
    assert short_run["counts"]["probes"] > len(probes.PROMPTS)  # the last ones run alone again
    assert short_run["counts"]["preemptions"] > 0
    assert len(short_run["samples"]) >= 4
