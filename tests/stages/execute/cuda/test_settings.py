"""A setting of [execute] whose effect needs a real GPU reaches the kernel launches."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.stages.execute.cuda import loading, runner
from pipeline.stages.execute.cuda.device import Interpreted
from pipeline.stages.execute.cuda.model import layers as model_module
from pipeline.stages.execute.cuda.model.device_model import DeviceModel
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.cuda.driver import CudaDriver


@pytest.mark.parametrize("early_launch", [False, True])
def test_early_launch_reaches_the_model(slight_dir: Path, monkeypatch: pytest.MonkeyPatch, early_launch: bool) -> None:
    made: list[bool] = []
    model = DeviceModel

    def note(*args: Any, early: bool, **options: Any) -> Any:
        made.append(early)
        return model(*args, early=early, **options)

    monkeypatch.setattr(loading, "DeviceModel", note)
    settings = on_device()
    execute = msgspec.structs.replace(settings.execute, programmatic_dependent_launch=early_launch)
    CudaDriver(slight_dir, msgspec.structs.replace(settings, execute=execute))
    assert made == [early_launch]


class Hopper(Interpreted):
    """Has programmatic dependent launch, as far as nothing is launched."""

    launches_early = True


@pytest.mark.parametrize(("most_bytes", "is_early"), [(4096, True), (1024, False)])
def test_large_matrices_are_not_launched_early(
    slight_dir: Path, monkeypatch: pytest.MonkeyPatch, most_bytes: int, is_early: bool
) -> None:
    """Its largest matrix has 96 x 32 values."""
    monkeypatch.setattr(model_module, "EARLY_BYTES", most_bytes * 4)
    for device, expected in ((Hopper(), is_early), (Interpreted(), False)):
        made = runner.CudaRunner(on_device(), slight_dir, device=device)
        try:
            assert made.model._early == expected
        finally:
            made.close()
