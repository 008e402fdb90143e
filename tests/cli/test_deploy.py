"""The options of `pipeline deploy`."""

import argparse
from typing import Any

import pytest

from pipeline.__main__ import _parser, main
from pipeline.cli.commands.deploy import deploy_settings
from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.deploy.ray.serve import DOWNSCALE_DELAY_S


def given(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["deploy", *words])


def test_a_fixed_number_of_replicas():
    what = deploy_settings(given("--replicas", "3"), Settings())
    assert (what.min_replicas, what.max_replicas, what.replica_cpus, what.name) == (3, 3, 1.0, "pipeline")


def test_autoscaling():
    words = ["--max-replicas", "4", "--target-open-requests", "8", "--replica-cpus", "0.5", "--name", "other"]
    words += ["--upscale-delay", "5s", "--downscale-delay", "2m"]
    what = deploy_settings(given(*words), Settings(execute=ExecuteSettings(num_threads=2)))
    assert (what.min_replicas, what.max_replicas, what.target_open_requests) == (1, 4, 8.0)
    assert (what.replica_cpus, what.name) == (0.5, "other")
    assert (what.upscale_delay_s, what.downscale_delay_s) == (5.0, 120.0)
    assert deploy_settings(given("--max-replicas", "2"), Settings()).downscale_delay_s == DOWNSCALE_DELAY_S


def test_cpus_are_the_threads_of_the_executor():
    assert deploy_settings(given(), Settings(execute=ExecuteSettings(num_threads=2))).replica_cpus == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replicas", "0"], "--replicas: must be at least 1, not 0"),
        (["--replicas", "2", "--max-replicas", "3"], "--replicas is a fixed number"),
        (["--min-replicas", "2"], "--min-replicas needs --max-replicas"),
        (["--min-replicas", "3", "--max-replicas", "2"], "--max-replicas: 2 is less than --min-replicas, 3"),
        (["--min-replicas", "0", "--max-replicas", "2"], "--min-replicas: must be at least 1, not 0"),
        (["--target-open-requests", "2"], "--target-open-requests needs --max-replicas"),
        (["--downscale-delay", "2s"], "--downscale-delay needs --max-replicas"),
        (["--replica-cpus", "-1"], "--replica-cpus: must be 0 or more, not -1"),
        (["--servers", " , "], "--servers: name at least one server"),
        (["--servers", "http://a:1,http://a:1"], "--servers: a server is named twice"),
        (["--servers", "http://a:1", "--replicas", "2"], "--replicas is about replicas that are started"),
        (["--servers", "ftp://a:1"], "must be http://HOST:PORT"),
        (["--servers", "http://a:x"], "is not a URL"),
    ],
)
def test_wrong_options_are_named(words: list[str], message: str, capsys: Any):
    assert main(["deploy", *words]) in (1, 2)
    assert message in capsys.readouterr().err
