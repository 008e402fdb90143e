"""The steps of a reload, in order, and what the settings are after a problem."""

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.supervisor.reconfigure.reload import Reloads
from pipeline.supervisor.restart.restart_log import RestartLog
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.server_state import ServerState

BEFORE = SettingsSource(config="before")
AFTER = SettingsSource(config="after")


class Bench:
    """Reloads whose restarts, changes of numbers and questions are the test's."""

    def __init__(self, run_mode: RunMode) -> None:
        self.settings = Settings()
        self.keys: Any = self
        self.key_change = ""
        self.keys_problem = ""
        self.spans = RestartLog()
        self.planned = SimpleNamespace(ask=lambda name, _, done: self.steps.append((name, lambda why: done(0.0, why))))
        self.steps: list[tuple[str, Callable[[str], None]]] = []
        """What was asked for, and how to end it: with a problem, or with an empty string."""
        self.asked: list[tuple[list[str], Callable[[Any], None]]] = []
        self.answers: list[tuple[list[str], str, str]] = []
        self.state = ServerState()
        self.state.is_serving = True
        fake: Any = self
        scaling: Any = SimpleNamespace(ask=self.scale)
        questions: Any = SimpleNamespace(ask=self.question)
        self.reloads = Reloads(
            run_mode, fake, self.state, fake, fake, scaling, questions, self.use, logging.getLogger("test")
        )

    def use(self, settings: Any) -> None:
        """As the loop, settings; as the server's API keys, those."""
        if isinstance(settings, Settings):
            self.settings = settings

    def scale(
        self, stage: str, now: int, num: int, start_s: float, drain_s: float, done: Callable[[str], None]
    ) -> None:
        def ended(problem: str) -> None:
            if not problem:
                self.settings = topology.with_replicas(self.settings, stage, num)
            done(problem)

        self.steps.append((f"{stage} {now} to {num}", ended))

    def question(self, names: list[str], request: m.ControlRequest, timeout_s: float, then: Any) -> None:
        assert isinstance(request, m.RereadKeys) and timeout_s > 0
        self.asked.append((names, then))

    def names_of_ready(self) -> list[str]:
        return ["gateway.0", "gateway.1", "schedule.0"]

    # As the server's API keys.
    def read_again(self, settings: Settings) -> tuple[str, list[str]]:
        if self.keys_problem:
            raise ConfigError([self.keys_problem])
        return "keys", []

    def change_to(self, keys: str) -> str:
        return self.key_change

    def ask(self, settings: Settings, *, is_dry_run: bool = False) -> None:
        self.reloads.ask(
            settings,
            AFTER,
            is_dry_run,
            lambda changed, problem, keys: self.answers.append(([one.key for one in changed], problem, keys)),
        )

    def end_step(self, problem: str = "") -> str:
        """End the only step that is under way. Returns what it was."""
        ((name, end),) = self.steps
        self.steps.clear()
        end(problem)
        return name


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Bench:
    return Bench(getattr(request, "param", RunMode(source=BEFORE)))


def with_policy(settings: Settings) -> Settings:
    return msgspec.structs.replace(settings, schedule=msgspec.structs.replace(settings.schedule, policy="priority"))


def with_ingests(settings: Settings, num: int) -> Settings:
    return topology.with_replicas(settings, "ingest", num)


def test_numbers_change_first_and_then_one_process_after_the_other_is_restarted(bench: Bench) -> None:
    bench.ask(with_ingests(with_policy(Settings()), 2))
    assert bench.settings.schedule.policy == "priority" and bench.settings.ingest.replicas == 1
    assert [bench.end_step(), bench.end_step()] == ["ingest 1 to 2", "schedule.0"] and not bench.answers
    assert bench.reloads.source == BEFORE
    assert bench.end_step() == "gateway.0" and not bench.steps
    assert bench.answers == [(["ingest.replicas", "schedule.policy"], "", "")]
    assert bench.reloads.source == AFTER and bench.settings == with_ingests(with_policy(Settings()), 2)


def test_after_a_problem_the_settings_are_those_before_with_the_numbers_that_changed(bench: Bench) -> None:
    bench.ask(with_ingests(with_policy(Settings()), 2))
    bench.end_step()
    bench.end_step("it died")
    assert not bench.steps, "nothing else is restarted"
    ((_, problem, _),) = bench.answers
    assert problem == "schedule.0 was not restarted: it died; ingest.replicas is 2 now"
    assert bench.settings == with_ingests(Settings(), 2) and bench.reloads.source == BEFORE
    bench.ask(with_ingests(with_policy(Settings()), 2))
    assert bench.steps[0][0] == "schedule.0", "another reload may begin"


def test_a_number_that_cannot_change_is_named(bench: Bench) -> None:
    bench.ask(with_ingests(Settings(), 3))
    bench.end_step("no memory")
    assert bench.answers == [(["ingest.replicas"], "ingest.replicas stays 1: no memory", "")]
    assert bench.settings == Settings()


def test_only_one_reload_runs_at_a_time(bench: Bench) -> None:
    bench.ask(with_policy(Settings()))
    bench.ask(with_ingests(Settings(), 2))
    ((_, problem, _),) = bench.answers
    assert problem == "the server is starting, reloading or shutting down"
    assert [name for name, _ in bench.steps] == ["schedule.0"] and bench.settings == with_policy(Settings())


@pytest.mark.parametrize("field", ["is_serving", "is_ending"])
def test_a_server_that_starts_or_ends_changes_nothing(bench: Bench, field: str) -> None:
    setattr(bench.state, field, not getattr(bench.state, field))
    bench.ask(with_policy(Settings()))
    ((_, problem, _),) = bench.answers
    assert problem == "the server is starting, reloading or shutting down" and bench.settings == Settings()
    bench.ask(with_policy(Settings()), is_dry_run=True)
    assert bench.answers[1] == (["schedule.policy"], "", ""), "a dry run only says what would change"
    assert bench.settings == Settings() and not bench.steps


@pytest.mark.parametrize("bench", [RunMode(model=SimpleNamespace())], indirect=True)  # type: ignore[arg-type]
def test_one_of_several_models_says_what_to_do_instead(bench: Bench) -> None:
    bench.ask(with_policy(Settings()))
    assert "pipeline restart --set models.NAME.KEY=VALUE" in bench.answers[0][1]
    assert bench.settings == Settings() and not bench.steps


@pytest.mark.parametrize("bench", [RunMode(inline=True)], indirect=True)
def test_the_number_of_processes_is_fixed_while_stages_are_debugged(bench: Bench) -> None:
    bench.ask(with_ingests(Settings(), 2))
    ((_, problem, _),) = bench.answers
    assert problem.startswith("the number of processes is fixed") and not bench.steps and bench.settings == Settings()


def test_changed_keys_are_used_last_and_gateways_that_do_not_answer_are_named(bench: Bench) -> None:
    bench.key_change = "added alice"
    bench.ask(with_policy(Settings()))
    bench.end_step()
    assert not bench.asked
    bench.end_step()
    ((names, then),) = bench.asked
    assert names == ["gateway.0", "gateway.1"] and not bench.answers
    then({"gateway.0": m.Answer(1)})
    assert bench.answers == [(["schedule.policy"], "gateway.1 did not answer: restart it", "added alice")]


def test_keys_that_cannot_be_read_change_nothing(bench: Bench) -> None:
    bench.keys_problem = "keys: no such file"
    bench.ask(with_policy(Settings()))
    ((_, problem, _),) = bench.answers
    assert "no such file" in problem and bench.settings == Settings() and not bench.steps
