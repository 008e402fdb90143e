"""Changes the settings while the server serves: `pipeline reload`.

    changes ──► API keys read ──► used by the supervisor ──► processes added, removed ──► stages restarted ──► keys used
                                                                     └──── a problem ────┴──► the settings before

`changed_settings.py` says what each setting needs.
"""

import logging
from collections.abc import Callable

import msgspec

from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.security.api_keys import Keys
from pipeline.supervisor.admin.admin_server import ReloadDone
from pipeline.supervisor.admin.questions import Answers, Questions
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.reconfigure.changed_settings import Change, changes, to_restart, to_scale
from pipeline.supervisor.reconfigure.scaling import Scaling
from pipeline.supervisor.restart.restarts import Restarts
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.server_state import ServerState
from pipeline.supervisor.shared.resources import SharedResources

KEYS_S = 5.0
"""Time for a gateway to read changed API keys."""


class _Steps(msgspec.Struct, eq=False):
    """A reload that is under way, and what is left of it."""

    before: Settings
    after: Settings
    source: SettingsSource
    api_keys: Keys | None
    changed: list[Change]
    done: ReloadDone
    to_scale: list[tuple[str, int]]
    to_restart: list[str]
    """Names of processes."""

    @property
    def keys(self) -> str:
        """Those that have changed, in words."""
        return ",".join(one.key for one in self.changed)


class Reloads:
    """Owns the reload that is under way; there is one at a time."""

    def __init__(
        self,
        run_mode: RunMode,
        resources: SharedResources,
        state: ServerState,
        table: ChildTable,
        restarts: Restarts,
        scaling: Scaling,
        questions: Questions,
        use: Callable[[Settings], None],
        log: logging.Logger,
    ) -> None:
        """`use` has the supervisor use settings, also for processes that start."""
        self.source = run_mode.source
        """Where the settings came from; None if a program gave them."""
        self._is_debugged = run_mode.is_debugged
        self._is_one_of_several = run_mode.model is not None
        self._resources = resources
        self._state = state
        self._table = table
        self._restarts = restarts
        self._scaling = scaling
        self._questions = questions
        self._use = use
        self._log = log
        self._is_busy = False

    def ask(self, settings: Settings, source: SettingsSource, is_dry_run: bool, done: ReloadDone) -> None:
        """Change the settings, add and remove processes, and restart the stages that use them, one process after the
        other. If one of them can't be started, the settings stay as they were, except the numbers of processes that
        have changed before."""
        if self._is_one_of_several:
            how = "`pipeline restart --set models.NAME.KEY=VALUE` replaces the whole server while streams go on"
            done([], f"a server of several models can't be reloaded: {how}", "")
            return
        before = self._resources.settings
        changed = changes(before, settings)
        if any(one.refusal for one in changed):
            done(changed, "", "")
            return
        if not is_dry_run and (self._is_busy or not self._state.takes_changes):
            done(changed, "the server is starting, reloading or shutting down", "")
            return
        try:  # always: the files of the keys may have changed
            api_keys, warnings = self._resources.keys.read_again(settings)
        except ConfigError as error:
            self._log.error("the API keys stay as they were", extra={"fields": {"why": str(error)}})
            done(changed, str(error), "")
            return
        if is_dry_run:
            done(changed, "", self._resources.keys.change_to(api_keys))
            return
        for warning in warnings:
            self._log.warning(warning)
        if not changed:
            self._use_keys(api_keys, changed, done)
            return
        if self._is_debugged and to_scale(changed):
            done(changed, "the number of processes is fixed while stages are debugged", "")
            return
        names = [name for stage in to_restart(changed) for name in topology.replicas_of(settings, stage)]
        names = [name for name in names if name == topology.lives_with(settings, name)[-1]]
        steps = _Steps(before, settings, source, api_keys, changed, done, to_scale(changed), names)
        self._is_busy = True
        self._use(_with_replicas_of(before, settings))
        self._log.info("reloading", extra={"fields": {"changed": steps.keys}})
        self._restarts.spans.begin("server", "reloads", changed=steps.keys)
        self._go_on(steps)

    def _go_on(self, steps: _Steps) -> None:
        if steps.to_scale:
            self._scale(steps, *steps.to_scale.pop(0))
        elif steps.to_restart:
            self._restart(steps, steps.to_restart.pop(0))
        else:
            self._is_busy = False
            self._restarts.spans.end("server")
            self.source = steps.source
            self._use_keys(steps.api_keys, steps.changed, steps.done)

    def _scale(self, steps: _Steps, stage: str, num: int) -> None:
        now, limits = topology.num_replicas(self._resources.settings, stage), steps.after.supervisor

        def done(problem: str) -> None:
            self._ended(steps, f"{stage}.replicas stays {now}: {problem}" if problem else "")

        self._scaling.ask(stage, now, num, limits.start_timeout_s, limits.drain_timeout_s, done)

    def _restart(self, steps: _Steps, name: str) -> None:
        def done(_: float, problem: str) -> None:
            self._ended(steps, f"{name} was not restarted: {problem}" if problem else "")

        self._restarts.planned.ask(name, f"pipeline reload: {steps.keys}", done)

    def _ended(self, steps: _Steps, problem: str) -> None:
        """A step has ended. After a problem, the settings are those before, with the present numbers of processes."""
        if not problem:
            self._go_on(steps)
            return
        self._is_busy = False
        self._restarts.spans.end("server", problem=problem)
        now = self._resources.settings
        self._use(_with_replicas_of(now, steps.before))
        scaled = [
            f"{stage}.replicas is {topology.num_replicas(now, stage)} now"
            for stage in topology.SCALABLE
            if topology.num_replicas(now, stage) != topology.num_replicas(steps.before, stage)
        ]
        steps.done(steps.changed, "; ".join((problem, *scaled)), "")

    def _use_keys(self, keys: Keys | None, changed: list[Change], done: ReloadDone) -> None:
        """The last step: have all gateways accept these API keys, if they differ."""
        change = self._resources.keys.change_to(keys)
        if keys is None or not change:
            done(changed, "", "")
            return
        self._resources.keys.use(keys)
        self._log.info("changed API keys", extra={"fields": {"keys": change}})
        gateways = topology.among(self._table.names_of_ready(), "gateway")

        def then(answers: Answers) -> None:
            late = [name for name in gateways if name not in answers or answers[name].error]
            done(changed, f"{', '.join(late)} did not answer: restart it" if late else "", change)

        self._questions.ask(gateways, m.RereadKeys(0), KEYS_S, then)


def _with_replicas_of(source: Settings, settings: Settings) -> Settings:
    """Settings with the numbers of processes of others."""
    for stage in topology.SCALABLE:
        settings = topology.with_replicas(settings, stage, topology.num_replicas(source, stage))
    return settings
