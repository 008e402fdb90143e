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

    def load(folder: Path, settings: Settings) -> ServedModel:
        found.append((folder, threading.current_thread()))
        raise UserError("it can't be read")

    monkeypatch.setattr(ServedModel, "load", load)
    gateways: Any = SimpleNamespace(_reading=WorkPool("reading models"))
    launch: Any = SimpleNamespace(model_dir="/model", settings=Settings())
    with pytest.raises(UserError, match="it can't be read"):
        await ModelGateways._run(gateways, launch)
    assert found[0][0] == Path("/model") and found[0][1] is not threading.main_thread()
