"""The options of `pipeline serve`, and the settings that they become."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.config.load import load, presets
from pipeline.config.settings import Settings
from pipeline.supervisor.run_mode import RunMode
from tests.cli.command_line.commands import ROOT, run


def test_serve_passes_the_settings_to_the_supervisor_and_returns_its_code(
    served: list[Settings], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 1\nhost = '::1'\n")
    code, out, err = run(
        *(
            "serve",
            "--config",
            str(path),
            "--set",
            "schedule.max_steps_in_flight=2",
            "--port",
            "99",
            "--model",
            "a b.gguf",
        ),
        capsys=capsys,
    )
    assert (code, out, err) == (3, "", "")
    (settings,) = served
    assert (settings.gateway.port, settings.gateway.host) == (99, "::1")
    assert (settings.schedule.max_steps_in_flight, settings.model) == (2, "a b.gguf")


def test_serve_accepts_a_preset_by_name(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--config", "small-memory", capsys=capsys)[0] == 3
    assert served == [load(presets()["small-memory"])]


def test_invalid_settings_start_nothing(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("serve", "--port", "http", "--set", "gateway.prot=2", capsys=capsys)
    assert (code, out, served) == (2, "", [])
    assert err.splitlines() == [
        "pipeline: error: --set gateway.prot=2: gateway.prot: there is no such key; did you mean gateway.port?",
        'pipeline: error: --port http: gateway.port: needs a whole number from 0 to 65535, got the text "http"',
    ]


def test_options_without_effect_cause_a_warning(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--set", "schedule.max_num_batched_tokens=16", capsys=capsys)
    assert code == 3
    assert err.startswith("pipeline: warning: schedule.max_num_seqs: ")


def test_an_unavailable_address_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken(settings: Settings, run_mode: RunMode, **others: object) -> int:
        raise OSError("cannot listen on 127.0.0.1:8000: Address already in use; choose another gateway.port")

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = taken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    words = "cannot listen on 127.0.0.1:8000: Address already in use; choose another gateway.port"
    assert run("serve", capsys=capsys) == (2, "", f"pipeline: error: {words}\n")


def test_serve_accepts_the_model_as_a_positional_argument(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("serve", "ORG/NAME", "--port", "1", capsys=capsys) == (3, "", "")
    assert [one.model for one in served] == ["ORG/NAME"]
    code, _, err = run("serve", "ORG/NAME", "--model", "x", capsys=capsys)
    assert (code, err) == (2, "pipeline: error: the model is given twice: ORG/NAME, and --model x\n")


def test_a_second_served_name_is_not_taken_for_the_model(
    served: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run("serve", "--model", "m", "--served-model-name", "a", "b", capsys=capsys)
    assert (code, served) == (2, [])
    assert "the model is given twice: b, and --model m; --served-model-name takes one name" in err


def test_a_wrong_value_names_the_option(served: list[Settings], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--quantization", "awq", "--max-logprobs", "9999", capsys=capsys)
    assert (code, served) == (2, [])
    assert "pipeline: error: --quantization awq: quantization: needs " in err
    assert "pipeline: error: --max-logprobs 9999: limits.max_logprobs: needs a whole number from 0 to 1024" in err


def test_api_key_is_used_like_the_variable_and_leaves_the_command_line(tmp_path: Path) -> None:
    code = (
        "import os, sys, types, pathlib; from pipeline import __main__; m = types.ModuleType('serve');\n"
        "def serve(settings, run_mode, **others):\n"
        "    print(os.environ['PIPELINE_API_KEYS'].split(), pathlib.Path('/proc/self/cmdline').read_bytes())\n"
        "m.serve = serve; sys.modules['pipeline.supervisor.serve'] = m\n"
        "__main__.main(['serve', *sys.argv[1:]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--api-key", "first-secret", "--api-key=second-secret"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PIPELINE_API_KEYS": "third-secret"},
    )
    keys, _, line = done.stdout.partition("]")
    assert keys == "['third-secret', 'first-secret', 'second-secret'", done.stderr
    assert "secret" not in line and "pipeline serve" in line
    assert "warning: --api-key: other users could see the key" in done.stderr


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([","], "--api-key: contains no key"),
        (["good-key", "secret key"], "--api-key, entry 2: a key must have 1 to 512"),
    ],
)
def test_an_error_of_api_key_names_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], keys: list[str], words: str
) -> None:
    monkeypatch.setattr("setproctitle.setproctitle", lambda title: None)
    monkeypatch.delenv("PIPELINE_API_KEYS", raising=False)
    code, _, err = run("serve", *(f"--api-key={key}" for key in keys), capsys=capsys)
    assert code == 2 and words in err and "PIPELINE_API_KEYS" not in err and "secret" not in err


@pytest.mark.parametrize("value", ["4", "[4]", '{"picture": 1}', '{"image": -1}', '{"image": {}}', "{"])
def test_a_limit_of_inputs_says_what_it_must_be(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", f"--limit-mm-per-prompt={value}", capsys=capsys)
    words = "'picture' is no kind of input" if "picture" in value else """needs an object such as {"image": 4}, got"""
    assert code == 2 and f"argument --limit-mm-per-prompt: {words}" in " ".join(err.split())


def test_no_limit_of_logprobs_is_refused_with_the_largest_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("serve", "--max-logprobs=-1", capsys=capsys)
    assert code == 2 and "argument --max-logprobs: -1, vLLM's 'no limit', is not supported: use 0 to 1024" in err
