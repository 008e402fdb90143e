"""The advice for what other tools call a command or an option names what exists here."""

import re

import pytest

from pipeline.__main__ import main
from pipeline.cli.commands.other_names import COMMANDS, LLAMA_CPP
from pipeline.config.vllm_names import AS_SETTINGS


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    return capsys.readouterr().out


def test_the_advised_commands_exist_and_the_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(re.findall(r"^    ([a-z-]+)", help_of(capsys), re.MULTILINE))
    advised = {word for advice in COMMANDS.values() for word in re.findall(r"`pipeline ([a-z-]+)", advice)}
    assert advised - {"--help", "--version"} <= known
    assert not set(COMMANDS) & known


def test_the_advised_options_exist_and_the_others_do_not(capsys: pytest.CaptureFixture[str]) -> None:
    known = set(re.findall(r"(?<!\w)--?[a-z][a-z-]*", help_of(capsys, "serve"))) | set(AS_SETTINGS)
    advised = {word for advice in LLAMA_CPP.values() for word in re.findall(r"(?<!\w)--[a-z-]+", advice)}
    assert advised and advised <= known
    assert not set(LLAMA_CPP) & known
    settings = {word for advice in LLAMA_CPP.values() for word in re.findall(r"--set (\S+=\w+)", advice)}
    assert main(["config", "show", *(f"--set={one.replace('=N', '=1')}" for one in sorted(settings))]) == 0


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("serve", "--ctx-size", "9"), "; use --max-model-len N"),
        (("serve", "--cache-dir=x"), "; use --set cache_dir=VALUE"),
        (("models", "--cache-dir=x"), "; use --set cache_dir=VALUE"),
        (("models", "--port", "9"), ""),
        (("check-model", "m", "--ctx-size", "9"), ""),
        (("profile", "schedule", "--port", "9"), ""),
    ],
)
def test_only_options_that_the_command_has_are_advised(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], advice: str
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    err = capsys.readouterr().err
    assert f"{advice} (see pipeline " in err and ("; use " in err) == bool(advice)
