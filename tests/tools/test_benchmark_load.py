"""The loads of tools/benchmarks with a fake server, servers that can't start, and the command."""

import argparse
import asyncio
import json
import random
from pathlib import Path

import pytest

from pipeline.errors import UserError
from tests.cli.fake_server import FakeServer
from tools.benchmarks import long_prompt, no_hits, overload
from tools.benchmarks.loads import BenchmarkLoad, Span, closed_loop
from tools.benchmarks.served import Served
from tools.serving_bench import scheduling as scheduling_benchmarks
from tools.soak.__main__ import main as soak_main

NO_SUCH = "no.such=1"


def test_a_closed_loop_sends_the_requests_of_the_load() -> None:
    with FakeServer() as server:
        load = BenchmarkLoad(4, Span(60, 80), Span(5, 9), 0.3, "seed")
        summary = asyncio.run(closed_loop(server.url, load))
        streamed = [body for body in server.bodies if body.get("stream")]
    assert summary.num_errors == 0 and summary.num_requests > 4
    assert server.max_open == 4
    # 20 tokens of each prompt are the fake server's overhead, which calibration has to find.
    assert all(58 <= 20 + len(body["prompt"].split()) <= 82 for body in streamed)
    assert len({body["prompt"].split()[0] for body in streamed}) > 2
    assert {body["max_tokens"] for body in streamed[4:]} <= set(range(1, 10))
    assert all(body["ignore_eos"] and body["temperature"] == 0 for body in streamed)


def test_errors_of_a_closed_loop_are_counted() -> None:
    with FakeServer(lambda body, number: "cut" if body.get("stream") and number % 3 == 0 else None) as server:
        summary = asyncio.run(closed_loop(server.url, BenchmarkLoad(2, Span(60, 60), Span(5, 5), 0.3, "seed")))
    assert summary.errors["the stream ended early"] == summary.num_errors > 0


def test_long_prompts_are_sent_one_at_a_time_while_the_streams_run() -> None:
    args = argparse.Namespace(streams=3, output_tokens=400, long_tokens=500, longs=2, seconds=0.05)
    with FakeServer() as server:
        seen = asyncio.run(long_prompt._drive(server.url, args, "seed"))
        streamed = [body for body in server.bodies if body.get("stream")]
    assert [len(seen.streams), len(seen.longs)] == [3, 2]
    assert server.max_open == 4
    assert [body["max_tokens"] for body in streamed] == [400] * 3 + [1] * 2
    assert all(abs(record.prompt_tokens - 500) <= 2 for record in seen.longs)
    assert seen.longs[0].ended_s < seen.longs[1].sent_s
    assert seen.begun_s < seen.longs[0].sent_s and seen.longs[1].ended_s < min(one.ended_s for one in seen.streams)
    assert long_prompt.reading_of(seen)["tokens"] == sum(
        record.prompt_tokens + record.completion_tokens for record in (*seen.streams, *seen.longs)
    )


def test_streams_that_end_too_soon_are_an_error() -> None:
    args = argparse.Namespace(streams=2, output_tokens=3, long_tokens=60, longs=1, seconds=0.5)
    with FakeServer() as server, pytest.raises(UserError, match=r"output-tokens|before the others"):
        asyncio.run(long_prompt._drive(server.url, args, "seed"))


def test_an_open_loop_sends_without_waiting_for_replies() -> None:
    rng = random.Random(1)
    with FakeServer(lambda body, number: "refuse" if body.get("stream") and rng.random() < 0.8 else None) as server:
        load = BenchmarkLoad(1, Span(60, 60), Span(300, 300), 0.5, "seed")  # each takes 0.3 s at least
        records, lates = asyncio.run(overload._flood(server.url, load, 100.0))
    refused, admitted, failed = overload.divide(records)
    assert len(records) == len(lates) == len(overload.arrivals_of("seed", 100.0, 0.5)) > 30
    assert len(refused) > len(admitted) > 0 and not failed
    assert server.max_open > 3


def test_a_server_that_does_not_start_raises_its_error() -> None:
    with pytest.raises(UserError, match=r"no\.such"):
        Served(NO_SUCH)


@pytest.mark.parametrize("subject", ["memory", "overload", "shared"])
def test_an_unknown_setting_ends_the_command(subject: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert scheduling_benchmarks.main([subject, "--set", NO_SUCH]) == 2
    assert "no.such" in capsys.readouterr().err


def test_an_unknown_setting_ends_a_soak(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak_main(["--set", NO_SUCH, "--minutes", "0.01"]) == 2
    assert "no.such" in capsys.readouterr().err


def test_an_unwritable_file_is_an_error_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (scheduling_benchmarks.main, soak_main):
        arguments = ["shared"] if main is scheduling_benchmarks.main else []
        assert main([*arguments, "--json", "/no/such/folder/x.json"]) == 2
        assert "--json /no/such/folder/x.json" in capsys.readouterr().err


def test_scheduler_only_is_judged_by_its_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_hits, "request_cost", lambda caching, *rest: 250e-6 if caching else 100e-6)
    path = tmp_path / "no_hits.json"
    arguments = ["no-hits", "--json", str(path), "--check", "--scheduler-only"]
    assert scheduling_benchmarks.main([*arguments, "60"]) == 0
    loss = json.loads(path.read_bytes())["loss"]
    assert (loss["added_us"], loss["percent"]) == (pytest.approx(150), pytest.approx(0.9))
    assert "met: loss in the scheduler" in capsys.readouterr().out
    assert scheduling_benchmarks.main([*arguments, "70"]) == 1
    assert "MISSED: loss in the scheduler" in capsys.readouterr().out
