"""The command line: what it prints, where, and with which exit code."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.cli.trace.command import MARGIN_S
from pipeline.config.settings import Settings
from pipeline.runtime.tracing import MAX_WINDOW_S
from pipeline.supervisor.run_mode import RunMode
from pipeline.version import VERSION
from tests.cli.command_line.commands import ROOT, run


def test_an_interrupt_ends_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(settings: Settings, run_mode: RunMode, **others: object) -> int:
        raise KeyboardInterrupt

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    assert run("serve", capsys=capsys) == (130, "", "")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["sreve"], "invalid choice: 'sreve'; did you mean serve? (choose from serve, deploy, chat,"),
        (["xyzzy"], "invalid choice: 'xyzzy' (choose from serve, deploy, chat,"),
        (
            ["run", "llama3"],
            "invalid choice: 'run'; use `pipeline chat MODEL`, or `pipeline serve MODEL` for a server",
        ),
        (["download", "llama3"], "'download'; use `pipeline pull MODEL` (see"),
        (["rm", "llama3"], "'rm'; use `pipeline cache rm NAME` (see"),
        (["serve", "--ctx-size", "4096"], "unrecognized arguments: --ctx-size; use --max-model-len N (see pipeline"),
        (["serve", "-m", "a", "-c", "9"], "arguments: -m -c 9; -m: use --model MODEL; -c: use --max-model-len N (see"),
        (["serve", "--cache-dir", "/x"], "arguments: --cache-dir; use --set cache_dir=VALUE (see pipeline serve"),
        (["serve", "--num_threads=2"], "use --set execute.num_threads=VALUE (see pipeline serve"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot; did you mean --port? (see pipeline serve"),
        (
            ["serve", "--modle=x"],
            "unrecognized arguments: --modle=x; did you mean --model? (see pipeline serve --help)",
        ),
        (["serve", "a", "b"], "unrecognized arguments: b (see pipeline serve --help)"),
        (["serve", "m", "--served-model-name", "a", "b"], "arguments: b; --served-model-name takes one name (see"),
        (["serve", "m", "--served-model-name=a", "b"], "arguments: b; --served-model-name takes one name (see"),
        (["config", "show", "--x"], "unrecognized arguments: --x (see pipeline config show --help)"),
        (["--x", "serve"], "unrecognized arguments: --x (see pipeline --help)"),
        (["profile", "execute", "--max-model-len", "9"], "did you mean --set max_model_len=N?"),
        (["serve", "--seed", "1"], "--seed of vLLM is not supported: set `seed` in each request"),
        (
            ["serve", "--data_parallel_size=2"],
            "--data-parallel-size of vLLM is not supported: leave it out, and start several servers",
        ),
        (["serve", "--trust-remote-code"], "leave it out: no code of a checkpoint is ever run (see pipeline serve"),
        (["serve", "--dtype", "half"], "argument --dtype: half is not supported: use bfloat16 or float32"),
        (["serve", "--kv-cache-dtype", "fp8"], "argument --kv-cache-dtype: fp8 is not supported: use int8"),
        (["serve", "--max-num-seqs", "many"], "argument --max-num-seqs: needs a number such as 4096 or 4K, got 'many'"),
        (["serve", "--port"], "argument --port: expected one argument"),
        (["config"], "the following arguments are required: ACTION"),
        (["config", "check"], "the following arguments are required: FILE"),
    ],
)
def test_mistyped_commands_are_errors_of_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*argv, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("pipeline: error: ")
    assert words in err
    assert "--help" in err


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("usage: pipeline") and "serve a model over HTTP" in err


def test_the_help_of_trace_has_the_longest_time(capsys: pytest.CaptureFixture[str]) -> None:
    longest_s = MAX_WINDOW_S - MARGIN_S
    _, out, _ = run("trace", "--help", capsys=capsys)
    assert f"at most {longest_s:g}" in " ".join(out.split())
    code, _, err = run("trace", f"--seconds={longest_s + 1}", capsys=capsys)
    assert code == 1 and f"at most {longest_s:g}" in err


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version", capsys=capsys) == (0, f"pipeline {VERSION}\n", "")


@pytest.mark.parametrize("command", [[], ["serve"], ["bench"], ["config"], ["config", "show"], ["config", "check"]])
def test_every_command_has_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*command, "--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith(" ".join(["usage: pipeline", *command]))


def module(*argv: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *argv], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_it_runs_as_a_module_with_clean_errors() -> None:
    done = module("config", "check", "no-such.toml")
    assert done.returncode == 2
    assert done.stderr.startswith("pipeline: error: no-such.toml: no such file")
    assert "Traceback" not in done.stderr


def test_help_is_fast() -> None:
    """Measured as CPU time, relative to a start that imports one library: other load affects both."""

    def cpu_s(*words: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *words], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=60, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = [(cpu_s("-m", "pipeline", "--help"), cpu_s("-c", "import msgspec, argparse")) for _ in range(5)]
    help_s, least_s = map(min, zip(*pairs, strict=True))
    assert help_s < 3 * least_s, "numpy alone would double it"


@pytest.mark.parametrize("words", [("config", "show"), ("models", "--supported")])
def test_a_full_disk_behind_the_output_is_one_line(words: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", *words], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, timeout=60
        )
    assert (done.returncode, done.stderr) == (1, b"pipeline: error: no space is left for the output\n")


def test_a_closed_pipe_ends_it_quietly() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "config", "show"],
            cwd=ROOT,
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (1, b"")
