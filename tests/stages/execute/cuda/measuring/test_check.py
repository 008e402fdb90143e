"""check-model computes on a GPU what it computes on the CPU. Kernels are interpreted here."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.cli.check.cases import CheckPlan
from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.errors import UserError
from pipeline.stages.execute.measuring import check
from tests.stages.execute import checkpoints

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

SETTINGS = Settings(execute=ExecuteSettings(device="cuda", num_threads=1))


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps than by default: the interpreter takes half a second per step."""
    monkeypatch.setattr(check, "NUM_GREEDY", 1)
    monkeypatch.setattr(check, "PREFIX", 16)
    monkeypatch.setattr(check, "CHUNKS", ())
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)


def write(folder: Path) -> None:
    changes = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "num_kv_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    checkpoints.write(folder, checkpoints.config_of(**changes, max_position=64, tie_embeddings=True))


def test_float32_on_the_device_agrees_with_torch(tmp_path: Path) -> None:
    write(tmp_path)
    chance = random.Random(0)
    longest = [chance.randrange(3, 64) for _ in range(17)]
    sides: Any = check.compute(SETTINGS, tmp_path, CheckPlan([longest, [*longest[:16], 9]]))
    expected, ours = next(sides), next(sides)
    sides.close()
    assert (expected.program, ours.program) == ("torch, float32", "triton, Triton's interpreter, float32")
    assert ours.exact and ours.texts == expected.texts
    assert set(ours.texts) == {"whole", "all in one batch", "behind a cached prefix"}
    assert [(made.way, made.ids) for made in ours.made] == [(made.way, made.ids) for made in expected.made]
    for one, other in zip(ours.made, expected.made, strict=True):
        np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)
        assert one.logits.std() > 0.1


def test_without_a_gpu_the_output_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.setattr("pipeline.supervisor.gpu.is_interpreted", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(UserError, match=r"execute\.device is 'cuda', but the installed torch"):
        list(check.compute(SETTINGS, tmp_path, CheckPlan([[5, 6, 7]])))
