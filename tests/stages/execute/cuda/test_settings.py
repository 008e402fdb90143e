"""A setting of [execute] whose effect needs a real GPU reaches the kernel launches."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.stages.execute.cuda import runner
from pipeline.stages.execute.cuda.model import DeviceModel
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.cuda.driver import CudaDriver


@pytest.mark.parametrize("early_launch", [False, True])
def test_early_launch_reaches_the_model(slight_dir: Path, monkeypatch: pytest.MonkeyPatch, early_launch: bool) -> None:
    made: list[bool] = []
    model = DeviceModel

    def note(*args: Any, early: bool, **options: Any) -> Any:
        made.append(early)
        return model(*args, early=early, **options)

    monkeypatch.setattr(runner, "DeviceModel", note)
    settings = on_device()
    execute = msgspec.structs.replace(settings.execute, programmatic_dependent_launch=early_launch)
    CudaDriver(slight_dir, msgspec.structs.replace(settings, execute=execute))
    assert made == [early_launch]
