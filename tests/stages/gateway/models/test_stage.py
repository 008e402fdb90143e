"""The process that has a gateway for each of several models."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.models.stage import ModelGateways


async def test_a_models_files_are_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file chooses how long that takes, and all models' clients are in the loop."""
    found: list[Any] = []
    closed: list[bool] = []

    def load(folder: Path, settings: Settings) -> ServedModel:
        found.append((folder, threading.current_thread()))
        raise UserError("it can't be read")

    monkeypatch.setattr(ServedModel, "load", load)
    stage = SimpleNamespace(model_dir=Path("/model"), settings=Settings(), close=lambda: closed.append(True))
    monkeypatch.setattr("pipeline.stages.gateway.models.stage.open_stage", lambda *_: stage)
    gateways: Any = SimpleNamespace(_reading=WorkPool("reading models"), _blocking=WorkPool("closing stages"))
    launch: Any = SimpleNamespace(model_dir="/model", settings=Settings())
    with pytest.raises(UserError, match="it can't be read"):
        await ModelGateways._run(gateways, launch)
    assert closed == [True], "what the supervisor has given it stays open"
    assert found[0][0] == Path("/model") and found[0][1] is not threading.main_thread()
