"""`pipeline bench --request-rate`: requests that arrive at a rate, beside running streams."""

import json
from itertools import pairwise
from math import inf
from statistics import mean, pstdev
from typing import Any

import pytest

from pipeline.__main__ import main
from pipeline.cli.bench.arrivals import Arrivals
from pipeline.cli.bench.client import RequestResult
from pipeline.cli.bench.loop import Level
from pipeline.cli.bench.measure import summarize
from tests.cli.bench.runs import bench
from tests.cli.fake_server import TEMPLATE_TOKENS, FakeServer

SMALL = ("--prompt-words=9", "--output-tokens=4", "--seed=7")


def gaps_of(arrivals: Arrivals, num_requests: int = 4000) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *arrivals.times_s("7", num_requests=num_requests)])]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5), (100.0, 0.1)])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness: float, variation: float) -> None:
    """Its coefficient of variation is 1 / sqrt(shape); 1 is a Poisson process."""
    gaps = gaps_of(Arrivals(5.0, burstiness))
    assert mean(gaps) == pytest.approx(0.2), "scaled to the rate, as vLLM does"
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.1)


def test_the_seed_determines_the_times() -> None:
    arrivals = Arrivals(100.0)
    assert arrivals.times_s("a", duration_s=1.0) == arrivals.times_s("a", duration_s=1.0)
    assert arrivals.times_s("a", duration_s=1.0) != arrivals.times_s("b", duration_s=1.0)
    long, short = arrivals.times_s("a", duration_s=2.0), arrivals.times_s("a", duration_s=1.0)
    assert long[: len(short)] == short and all(0 < time_s < 2 for time_s in long)
    assert 150 < len(long) < 250
    assert Arrivals(inf).times_s("a", num_requests=3) == [0.0, 0.0, 0.0]


def test_requests_arrive_however_long_replies_take(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        code, report, err = bench(
            server, capsys, "--request-rate=200", "--num-requests=20", "--prompt-words=9", "--output-tokens=100"
        )
    (level,) = report["levels"]
    assert (code, err) == (0, "")
    assert (level["concurrency"], level["num_requests"], level["ttft_ms"]["count"]) == (0, 20, 20)
    assert server.max_open > 8, "a closed loop would wait for replies of 100 ms"
    assert level["stream_itl_ms"]["count"] == 0
    assert report["workload"]["arrivals"] == {"request_rate": 200.0, "burstiness": 1.0, "max_concurrency": None}


def test_no_more_requests_are_open_than_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        options = ("--request-rate=inf", "--num-requests=12", "--max-concurrency=3", "--warmup=0", *SMALL)
        code, report, _ = bench(server, capsys, *options)
    assert (code, server.max_open, len(server.bodies)) == (0, 3, 12)
    assert report["levels"][0]["num_requests"] == 12


def test_streams_run_beside_the_requests_that_arrive(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        options = ("--concurrency=2,3", "--request-rate=50", "--duration=400ms", "--warmup=0", *SMALL)
        code, report, err = bench(server, capsys, *options)
    assert (code, err) == (0, "")
    assert [level["concurrency"] for level in report["levels"]] == [2, 3]
    for level in report["levels"]:
        assert level["window_s"] == pytest.approx(0.4)
        assert 5 < level["ttft_ms"]["count"] < 60 and level["num_errors"] == 0
        assert level["prompt_tokens"] == 9 + TEMPLATE_TOKENS, "of requests that arrived, not of streams"
        assert level["completion_tokens"] == 4
        assert level["stream_itl_ms"]["count"] > 50
        arrived = level["num_requests"] * 4 / level["window_s"]
        assert level["output_tokens_per_s"] > 1.2 * arrived, "tokens of the streams count too"
    streams = [body for body in server.bodies if body["max_tokens"] > 4]
    assert sorted(body["max_tokens"] for body in streams) == [683, 768, 853, 1024, 1024]
    assert len({body["messages"][0]["content"] for body in streams}) == 5


def test_a_stream_goes_on_with_its_next_request(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.cli.bench.command.STREAM_TOKENS", 8)
    with FakeServer() as server:
        options = ("--concurrency=1", "--request-rate=20", "--duration=300ms", "--warmup=0", *SMALL)
        code, report, _ = bench(server, capsys, *options)
    (level,) = report["levels"]
    assert (code, level["num_errors"]) == (0, 0)
    assert sum(body["max_tokens"] == 8 for body in server.bodies) > 3


def test_a_server_that_fails_every_stream_ends_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(body: dict[str, Any], number: int) -> str | None:
        return "refuse" if body["max_tokens"] > 4 else None

    with FakeServer(fails) as server:
        options = ("--concurrency=2", "--request-rate=20", "--duration=300ms", "--warmup=0", *SMALL)
        code, report, err = bench(server, capsys, *options)
    (level,) = report["levels"]
    assert code == 1 and "20 × 503: busy" in err
    assert (level["num_errors"], level["stream_itl_ms"]["count"]) == (20, 0)


def test_the_table_compares_the_streams_worst_gaps_with_their_median(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        options = ("--concurrency=2", "--request-rate=20", "--duration=300ms", "--temperature=0", *SMALL)
        assert main(["bench", "--url", server.url, *options]) == 0
    out = capsys.readouterr().out
    for words in ("20 requests/s", "stream ITL p50", "stream ITL p99", "p99 / p50"):
        assert words in out


def test_gaps_of_streams_that_were_cut_off_count() -> None:
    arrived = RequestResult(1.0, 2.0, [1.5, 1.6], 10, 2, has_usage=True)
    cut = RequestResult(0.0, 3.0, [0.5, 1.1, 1.2, 2.5], 0, 4, has_usage=False)
    summary = summarize(Level(1, 1.0, 2.0, [arrived], [cut]))
    assert (summary.stream_itl_ms.count, summary.stream_itl_ms.max) == (2, pytest.approx(600.0))
    assert (summary.itl_ms.count, summary.ttft_ms.count, summary.num_requests) == (1, 1, 1)
    assert summary.output_tokens_per_s == pytest.approx(4.0)
    assert not summary.tokens_are_chunks


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--request-rate=0"], "--request-rate: needs a number above 0, or inf, got '0'"),
        (["--request-rate=fast"], "--request-rate: needs a number above 0, or inf, got 'fast'"),
        (["--request-rate=inf"], "--request-rate inf: all requests arrive at once; --num-requests says how many"),
        (["--request-rate=1", "--burstiness=inf"], "--burstiness: needs a number above 0, got 'inf'"),
        (["--burstiness=2"], "--burstiness 2: needs --request-rate"),
        (["--max-concurrency=4"], "--max-concurrency 4: needs --request-rate"),
        (["--concurrency=0"], "--concurrency 0: needs --request-rate, or a whole number of at least 1"),
        (["--request-rate=1", "--plot=a.svg"], "--plot: draws closed loops; --request-rate is an open one"),
    ],
)
def test_options_that_do_not_fit_are_errors(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(["bench", *options])
    except SystemExit as stopped:
        code = stopped.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert words in err


def test_results_of_open_loops_are_not_drawn(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "open.json"
    with FakeServer() as server:
        options = ("--request-rate=50", "--num-requests=2", "--warmup=0", "--temperature=0", *SMALL)
        assert main(["bench", "--url", server.url, "--json", str(path), *options]) == 0
    assert json.loads(path.read_bytes())["workload"]["arrivals"]
    assert main(["bench", "--plot", str(tmp_path / "a.svg"), str(path)]) == 2
    assert "is of an open loop (--request-rate), and only closed ones are drawn" in capsys.readouterr().err
