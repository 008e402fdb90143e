"""`pipeline bench` with a server that counts words."""

import argparse
import json
import re
from collections import Counter
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipeline.__main__ import main
from pipeline.cli.bench.command import _Bar, left_words
from pipeline.cli.bench.measure import Distribution, Summary
from pipeline.cli.bench.options import add_options, workload_of
from pipeline.cli.bench.report import TABLE_WIDTH, BenchReport, as_text, console
from pipeline.cli.bench.tasks import TASKS
from tests.cli.bench.runs import bench
from tests.cli.fake_server import TEMPLATE_TOKENS, FakeServer


def _parse(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return parser.parse_args(options)


def test_a_number_of_requests_is_sent_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        code, report, err = bench(
            server,
            capsys,
            *("--concurrency", "1,4", "--num-requests", "9", "--prompt-tokens", "64", "--output-tokens", "8"),
        )
    assert (code, err) == (0, "")
    assert report["model"] == "fake"
    assert [level["concurrency"] for level in report["levels"]] == [1, 4]
    for level in report["levels"]:
        assert (level["num_requests"], level["num_errors"]) == (9, 0)
        assert (level["prompt_tokens"], level["completion_tokens"]) == (64, 8)
        assert level["output_tokens_per_s"] == pytest.approx(9 * 8 / level["window_s"])
        assert level["total_tokens_per_s"] == pytest.approx(9 * 72 / level["window_s"])
        assert (level["ttft_ms"]["count"], level["itl_ms"]["count"], level["tpot_ms"]["count"]) == (9, 63, 9)
    assert server.max_open == 4
    streamed = [body for body in server.bodies if body.get("stream")]
    assert len(streamed) == (9 + 1) + (9 + 4)
    assert all(body["ignore_eos"] and body["stream_options"] == {"include_usage": True} for body in streamed)
    # Tokens that end a reply have no text, so a chunk less would be counted for each of them.
    assert all(body["min_tokens"] == body["max_tokens"] for body in streamed)
    assert len({body["messages"][0]["content"] for body in streamed}) == len(streamed)


def test_all_streams_fill_the_time_window(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        code, report, _ = bench(
            server,
            capsys,
            *("--concurrency", "4", "--duration", "500ms", "--prompt-words", "10", "--output-tokens", "20"),
        )
    (level,) = report["levels"]
    assert code == 0
    assert level["window_s"] == pytest.approx(0.5)
    assert 0 < level["num_requests"] < len(server.bodies)
    assert server.max_open == 4
    assert level["output_tokens_per_s"] > 0
    lengths = Counter(body["max_tokens"] for body in server.bodies)
    assert {5, 10, 15} < set(lengths), "the streams' first requests differ in length"
    assert lengths[5] == lengths[10] == lengths[15] == 1


def test_each_concurrency_is_measured_greedily_and_at_the_api_s_default_temperature(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with FakeServer() as server:
        options = ["--concurrency=1,2", "--num-requests=2", "--prompt-words=5", "--output-tokens=2"]
        assert main(["bench", "--url", server.url, "--json", "-", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    levels = [(level["concurrency"], level["temperature"]) for level in report["levels"]]
    assert levels == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert report["workload"]["temperatures"] == [0.0, 1.0]
    sent = [(body["temperature"], body["messages"][0]["content"]) for body in server.bodies]
    assert Counter(temperature for temperature, _ in sent) == {0.0: 3 + 4, 1.0: 3 + 4}
    assert len({prompt for _, prompt in sent}) == len(sent), "a prefix cache would help the second temperature"


def test_other_temperatures_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        _, report, _ = bench(
            server, capsys, "--concurrency=1", "--num-requests=1", "--prompt-words=5", "--temperature=0.7,1.5"
        )
    assert [level["temperature"] for level in report["levels"]] == [0.7, 1.5]
    assert {body["temperature"] for body in server.bodies} == {0.7, 1.5}


def test_prefill_is_measured_at_one_temperature(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        assert main(["bench", "--url", server.url, "--json", "-", "--prefill", "--num-requests=1"]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert level["temperature"] == 0.0


@pytest.mark.parametrize("concurrency", ["1,8,32", "1,2,4,8,16,32", "1000"])
def test_the_table_fits_into_80_columns(concurrency: str) -> None:
    args = _parse(f"--concurrency={concurrency}")
    spread = Distribution(1000, 12345.6, 12345.6, 12345.6, 123456.7, 123456.7)
    levels = [
        Summary(n, t, 20.0, 123456, 0, {}, 4096.0, 1024.0, False, 123456.7, 1234567.8, 99.9, 12345.6, *[spread] * 4)
        for n in args.concurrency
        for t in (0.0, 1.0)
    ]
    report = BenchReport("http://127.0.0.1:8000", "m" * 30, "1", workload_of(args), levels)
    screen = console(TABLE_WIDTH)
    with screen.capture() as captured:
        screen.print(as_text(report))
    lines = captured.get().splitlines()
    assert TABLE_WIDTH == 80 and max(map(len, lines)) <= 80, captured.get()
    assert "123,457" in captured.get() and "…" not in captured.get()
    assert sum("output tok/s" in line for line in lines) == (2 if concurrency.count(",") == 5 else 1)


def test_the_temperatures_of_a_concurrency_are_adjacent_columns(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--concurrency=1,2", "--num-requests=2", "--prompt-words=5", "--output-tokens=2"]
    with FakeServer() as server:
        assert main(["bench", "--url", server.url, *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0].strip("│ "): re.findall(r"[\d./]*\d", line) for line in lines}
    assert rows["streams"] == ["1", "1", "2", "2"]
    assert rows["temperature"] == ["0", "1", "0", "1"]
    assert rows["requests"] == ["2"] * 4
    assert rows["tokens in/out"] == ["25/2"] * 4


def test_the_seed_determines_the_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    def prompts(*seed: str) -> list[str]:
        with FakeServer() as server:
            code, _, _ = bench(server, capsys, "--concurrency=2", "--num-requests=4", "--output-tokens=1", *seed)
        assert code == 0
        return sorted(body["messages"][0]["content"] for body in server.bodies)

    assert prompts("--seed=7") == prompts("--seed=7")
    assert not set(prompts("--seed=7")) & set(prompts("--seed=8"))
    assert not set(prompts()) & set(prompts())


def test_requests_can_be_beam_searches(capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--concurrency=1", "--num-requests=1", "--prompt-words=5", "--temperature=0"]
    with FakeServer() as server:
        code, report, _ = bench(server, capsys, "--beam-width=4", *load)
        assert (code, report["workload"]["beam_width"]) == (0, 4)
        assert all((body["use_beam_search"], body["n"]) == (True, 4) for body in server.bodies if body.get("stream"))
    with FakeServer() as server:
        bench(server, capsys, *load)
        assert not any("use_beam_search" in body or "n" in body for body in server.bodies)


@pytest.mark.parametrize("task", list(TASKS))
def test_tasks_have_prompts_of_their_own(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = []
    for _ in range(2):
        with FakeServer() as server:
            load = "--concurrency=2", "--num-requests=3", "--output-tokens=2", "--seed=7"
            code, report, _ = bench(server, capsys, f"--task={task}", *load)
        assert (code, report["workload"]["task"]) == (0, task)
        prompts.append([body["messages"][0]["content"] for body in server.bodies])
    assert sorted(prompts[0]) == sorted(prompts[1])
    assert len(set(prompts[0])) == len(prompts[0])
    assert main(["bench", f"--task={task}", "--shared"]) != 0
    assert f"--task {task}: its prompts share no prefix" in capsys.readouterr().err


def test_prefill_sends_long_prompts_for_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        _, report, _ = bench(server, capsys, "--prefill", "--num-requests=3")
    (level,) = report["levels"]
    assert (level["prompt_tokens"], level["completion_tokens"]) == (800 + TEMPLATE_TOKENS, 1)
    assert level["prefill_tokens_per_s"] == pytest.approx(820 / level["ttft_ms"]["p50"] * 1000, rel=0.01)


def test_shared_prompts_have_a_common_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        _, report, _ = bench(server, capsys, "--shared", "--num-requests=16", "--warmup=0", "--endpoint=completions")
    (level,) = report["levels"]
    assert (level["concurrency"], level["completion_tokens"]) == (16, 64)
    prompts = [body["prompt"].split() for body in server.bodies]
    assert {len(words) for words in prompts} == {650}
    assert len({tuple(words[:600]) for words in prompts}) == 1
    assert len({tuple(words[600:]) for words in prompts}) == 16


def test_chunks_are_counted_if_the_server_reports_no_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        server.has_usage = False
        _, report, _ = bench(
            server, capsys, "--concurrency=1", "--num-requests=1", "--output-tokens=5", "--prompt-words=5"
        )
    (level,) = report["levels"]
    assert (level["tokens_are_chunks"], level["completion_tokens"]) == (True, 5)


def test_the_table_and_the_file_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    with FakeServer() as server:
        code = main(["bench", "--url", server.url + "/v1/", "--num-requests=2", "--concurrency=2", "--json", str(path)])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for word in ("streams", "output", "total", "TTFT", "ITL", "TPOT", "p99", "128/128", "Times in milliseconds."):
        assert word in out
    assert json.loads(path.read_bytes())["workload"]["output_tokens"] == 128


def test_the_api_key_and_the_model_are_sent(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeServer() as server:
        code, report, _ = bench(
            server,
            capsys,
            *("--model=mine", "--no-ignore-eos", "--concurrency=1", "--num-requests=1", "--prompt-words=5"),
        )
    assert (code, report["model"]) == (0, "mine")
    assert {body["model"] for body in server.bodies} == {"mine"}
    assert not any("ignore_eos" in body or "min_tokens" in body for body in server.bodies)


def test_requests_take_adapters_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    """`--model adapters` are all that the server lists after the model."""
    one = ("--model=adapters", "--concurrency=1", "--num-requests=4", "--prompt-words=5")
    with FakeServer() as server:
        server.models = {"data": [{"id": "fake"}, {"id": "sql", "parent": "fake"}, {"id": "poet", "parent": "fake"}]}
        code, report, _ = bench(server, capsys, *one)
        assert (code, report["model"]) == (0, "sql,poet")
        names = [body["model"] for body in server.bodies]
        assert set(names) == {"sql", "poet"} and abs(names.count("sql") - names.count("poet")) <= 1
        server.models = {"data": [{"id": "fake"}]}
        assert main(["bench", "--url", server.url, *one]) == 1
    assert "lists no LoRA adapters, which --model adapters needs" in capsys.readouterr().err


def test_the_bar_shows_share_and_time_left_in_80_columns() -> None:
    assert left_words(0.0, 5.0) == ""
    assert left_words(0.25, 10.0) == "25%, about 30 s left"
    assert left_words(0.1, 600.0) == "10%, about 90 min left"
    screen = StringIO()
    with _Bar(12, Console(file=screen, force_terminal=True, width=80)) as bar:
        for _ in range(12):
            bar.next("128 streams, temperature 0.8")
        bar._begun_s -= 5000
        bar._draw(None, 0.5)
    lines = [re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]", screen.getvalue())]
    assert max(map(len, lines)) <= 80
    assert any(
        line.startswith("12/12: 128 streams, temperature 0.8") and line.rstrip().endswith(" s left") for line in lines
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--concurrency", "1,x"], "--concurrency: needs a whole number of at least 0, got 'x'"),
        (["--duration", "soon"], "--duration: needs a time such as 20s or 2m, got 'soon'"),
        (["--temperature", "0,nan"], "--temperature: needs a number from 0 to 2, got 'nan'"),
        (["--url", "foo"], "--url: needs http:// or https:// in front, got 'foo'"),
        (["--url", "127.0.0.1:8000"], "--url: needs http:// or https:// in front"),
        (["--url", "http://"], "--url: needs an address such as http://127.0.0.1:8000, got 'http://'"),
        (["--url", "http://[::1"], "--url: needs an address such as"),
        (["--url", "http://localhost:99999"], "--url: needs an address such as"),
        (["--api-key", "a\nb: c"], "--api-key: has a line break or another character"),
        (["--prefill", "--shared"], "not allowed with argument"),
        (["--prompt-tokens=64", "--shared-prefix-tokens=64"], "--shared-prefix-tokens 64: needs less than"),
    ],
)
def test_invalid_options_are_errors_of_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = main(["bench", *options])
    except SystemExit as stopped:
        code = stopped.code
    err = capsys.readouterr().err
    assert (code, err.count("\n")) == (2, 1)
    assert words in err
