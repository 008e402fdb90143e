"""python -m tools.simulator."""

from pathlib import Path

import msgspec
import pytest

from pipeline.replay.traffic import read_trace
from tools.simulator.__main__ import main, parser
from tools.simulator.options import profile_from, trace_from
from tools.simulator.synthetic import Shape, synthetic

SMALL = ["--synthetic", "shared", "--requests", "120", "--rate", "12", "--prompt-tokens", "600", "--groups", "5"]


def test_it_finds_the_number_of_replicas_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, result = tmp_path / "r.svg", tmp_path / "r.json"
    assert main(["run", *SMALL, "--p99-ttft", "100ms", "--plot", str(plot), "--json", str(result)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-1].endswith("replicas for a p99 TTFT of 100ms")
    assert plot.read_text().startswith("<svg") and "Time to first token" in plot.read_text()
    assert {one["policy"] for one in msgspec.json.decode(result.read_bytes())} == {"predicted-ttft"}


def test_it_compares_policies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "p.svg"
    assert main(["run", *SMALL, "--replicas", "3", "--policy", "all", "--plot", str(plot)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[3:]] == [
        "predicted-ttft", "consistent-hash", "bounded-hash", "power-of-two", "least-open", "round-robin"
    ]  # fmt: skip
    assert "round-robin" in plot.read_text()


def test_a_bar_that_can_not_be_met_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tools.simulator.options.MAX_REPLICAS", 2)
    assert main(["run", *SMALL, "--p99-ttft", "1ms"]) == 1
    assert "even 2 replicas are too few for a p99 TTFT of 1ms" in capsys.readouterr().out


def test_check_compares_with_the_real_scheduler(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *SMALL, "--replicas", "1"]) == 0
    assert "points, TTFT p50" in capsys.readouterr().out


def test_a_synthetic_trace_is_written_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.jsonl"
    assert main(["make", "--synthetic", "chat", "--requests", "50", "--rate", "5", "--out", str(path)]) == 0
    assert len(read_trace(path)) == 50
    args = parser().parse_args(["run", "--trace", str(path), "--replicas", "1", "--speed", "2", "--limit", "20"])
    read, made = trace_from(args), synthetic("chat", Shape(50, 5.0))
    assert len(read.requests) == 20
    for one, other in zip(read.requests, made.requests, strict=False):
        assert (one.num_prompt, one.outputs, one.keys, one.output_keys, one.session) == (
            other.num_prompt, other.outputs, other.keys, other.output_keys, other.session
        )  # fmt: skip
        assert one.arrival_s == pytest.approx((other.arrival_s - made.requests[0].arrival_s) / 2, abs=1e-5)


def test_options_change_the_replica(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text('{"kv_tokens": 5000, "max_num_seqs": 16, "max_num_batched_tokens": 512}')
    words = ["run", *SMALL, "--replicas", "1", "--replica", str(path), "--max-num-seqs", "8"]
    words += ["--decode-ms", "1=10,8=24", "--prefill-tokens-per-s", "4000"]
    profile = profile_from(parser().parse_args(words))
    assert (profile.kv_tokens, profile.max_num_seqs) == (5000, 8)
    assert profile.row_s == pytest.approx(0.002) and profile.base_s == pytest.approx(0.008)
    step_s = profile.base_s + profile.token_s * 512 + profile.pair_s * 512 * 256
    assert 512 / step_s == pytest.approx(4000)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--trace", "missing.jsonl", "--replicas", "1"], "missing.jsonl: can't be read: No such file"),
        (["--trace", "missing.jsonl", "--rate", "3", "--replicas", "1"], "--rate is for --synthetic"),
        ([*SMALL, "--speed", "2", "--replicas", "1"], "use --requests and --rate"),
        ([*SMALL, "--replicas", "1", "--kv-tokens", "100"], "leave such requests out with --max-request-tokens 96"),
        ([*SMALL, "--replicas", "1", "--max-request-tokens", "1"], "shared has no such requests"),
        ([*SMALL, "--replicas", "1", "--decode-ms", "1=10,8=200"], "--decode-ms: a step with more rows"),
        ([*SMALL, "--replicas", "1", "--prefill-tokens-per-s", "1e9"], "lower it, or change --decode-ms"),
        ([*SMALL, "--replicas", "1", "--replica", "missing.json"], "missing.json: can't be read"),
    ],
)
def test_wrong_options_have_clear_errors(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--replicas", "50000"], "at most 16384"),
        (["--replicas", "0"], "at least 1"),
        (["--replicas", "1", "--decode-ms", "5"], "as 1=12,64=20"),
        (["--p99-ttft", "soon"], "a time such as 20s"),
        ([], "one of the arguments --replicas --p99-ttft is required"),
    ],
)
def test_usage_errors(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", *SMALL, *words])
    assert error in capsys.readouterr().err


def test_the_cost_of_routers_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *SMALL, "--requests", "400", "--replicas", "2,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["replicas", "2", "8"]
    assert max(map(len, lines)) <= 80
