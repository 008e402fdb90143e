"""The fixture that tests of `pipeline serve` share."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from pipeline.config.load import load
from pipeline.config.settings import Settings
from pipeline.supervisor.run_mode import RunMode


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings that the supervisor is started with; it returns exit code 3."""
    settings_served: list[Settings] = []

    def serve(settings: Settings, run_mode: RunMode, *, take_over: object, is_restartable: bool) -> int:
        assert take_over is None and is_restartable
        source = run_mode.source
        assert source is not None
        assert run_mode == RunMode(source=source)
        path = Path(source.config) if source.config else None
        again = load(path, source.sets, source.flags, options=source.options, warn=lambda text: None)
        assert again == settings, "a reload reads the same"
        settings_served.append(settings)
        return 3

    supervisor = ModuleType("pipeline.supervisor.serve")
    supervisor.serve = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pipeline.supervisor.serve", supervisor)
    return settings_served
