"""`pipeline config show` and `config check`."""

import tomllib
from pathlib import Path

import pytest

from pipeline.config.load import load
from tests.cli.command_line.commands import run


def test_config_show_prints_the_effective_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("config", "show", "--config", "exact", "--set", "gateway.port=7", capsys=capsys)
    assert (code, err) == (0, "")
    assert tomllib.loads(out)["gateway"]["port"] == 7
    path = tmp_path / "shown.toml"
    path.write_text(out)
    assert load(path) == load(Path("exact"), ["gateway.port=7"])


def test_config_check_prints_ok(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 1\n")
    assert run("config", "check", str(path), capsys=capsys) == (0, f"{path}: ok\n", "")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model = " + "[" * 100_000, "nested too deeply"),
        ("[schedule]\nmax_num_batched_tokens = 99999999999999999999", "needs a whole number from 16 to 1048576"),
        ('"gateway.port" = 9', "in quotes this is one name"),
    ],
)
def test_config_check_reports_every_unreadable_file(
    tmp_path: Path, text: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    code, out, err = run("config", "check", str(path), capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_config_check_reports_an_invalid_file_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("config", "check", "x" * 300, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "File name too long" in err


def test_config_check_reports_every_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[gateway]\nport = 'x'\nhosst = ''\n")
    code, out, err = run("config", "check", str(path), capsys=capsys)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f'pipeline: error: {path}: gateway.port: needs a whole number from 0 to 65535, got the text "x"',
        f"pipeline: error: {path}: gateway.hosst: there is no such key; did you mean gateway.host?",
    ]
