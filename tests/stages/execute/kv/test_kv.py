"""The plan of KV memory on a CPU: how it is divided among KV groups, and the longest sequence that fits."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute import kv
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.kv import KVPlan, kv_block_bytes, plan_kv
from pipeline.stages.execute.weights import Weights
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import settings
from tests.stages.execute.native_driver import write

MIB = 1024**2
SHAPE = {"num_layers": 18, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "max_position": 32768}
LAYER_BYTES = block_bytes(1, 1, 256, 2)


def gemma() -> ModelConfig:
    """The shape of Gemma 3 270M: 15 layers with a window of 512, three without."""
    sliding = [layer for layer in range(18) if layer % 6 != 5]
    return checkpoints.config_of(**SHAPE, sliding_window=512, sliding_layers=sliding)


def plan(config: ModelConfig, max_model_len: int = 0, **execute: Any) -> KVPlan:
    return plan_kv(Settings(max_model_len=max_model_len, execute=ExecuteSettings(**execute)), config, 96)


def test_layers_are_divided_only_with_the_setting() -> None:
    divided, whole = (plan(gemma(), kv_cache_bytes=64 * MIB, hybrid_kv_cache_manager=on) for on in (True, False))
    assert divided.layout.windows == (0, 512, 512, 512, 512, 512)
    assert divided.num_blocks == 64 * MIB // (3 * LAYER_BYTES)
    assert whole.layout.windows == (0,)
    assert whole.num_blocks == 64 * MIB // (18 * LAYER_BYTES)


def test_windows_leave_room_for_longer_sequences(caplog: pytest.LogCaptureFixture) -> None:
    divided, whole = (plan(gemma(), kv_cache_bytes=64 * MIB, hybrid_kv_cache_manager=on) for on in (True, False))
    assert whole.max_model_len == 16 * (64 * MIB // (18 * LAYER_BYTES)) == 3632
    # Of 1,365 blocks, five windows take at most 39 each; the others are for full attention.
    assert divided.max_model_len == 16 * (1365 - 5 * 39) == 18720
    enough = (2048 + 5 * 39) * 3 * LAYER_BYTES
    assert f"reduced to that from 32768: raise execute.kv_cache_bytes to {size_words(enough, up=True)}" in caplog.text
    assert plan(gemma(), kv_cache_bytes=enough).max_model_len == 32768


def test_a_window_that_no_sequence_leaves_makes_no_group() -> None:
    short = plan(gemma(), max_model_len=512, kv_cache_bytes=64 * MIB)
    assert short.layout.groups == (KVGroup(0, 18),)
    assert plan(gemma(), max_model_len=513, kv_cache_bytes=64 * MIB).layout.windows[1] == 512


def test_a_model_without_windows_is_planned_as_before() -> None:
    found = plan(checkpoints.config_of(**SHAPE), kv_cache_bytes=64 * MIB)
    assert (found.num_blocks, found.max_model_len) == (227, 3632)
    assert found.layout.groups == (KVGroup(0, 18),)
    assert kv_block_bytes(ExecuteSettings(), gemma(), found.layout) == 18 * LAYER_BYTES


def test_memory_for_less_than_a_block_of_each_group_is_refused() -> None:
    with pytest.raises(UserError, match=f"takes {size_words(18 * LAYER_BYTES, up=True)}: raise execute.kv_cache_bytes"):
        plan(gemma(), kv_cache_bytes=18 * LAYER_BYTES - 1)


@pytest.mark.parametrize("is_enough", [False, True])
def test_weights_that_do_not_fit_beside_the_kv_cache_are_refused_before_they_are_loaded(
    is_enough: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = checkpoints.config_of(**SHAPE)
    write(tmp_path, config, ("bf16",))
    how = settings(kv_mib=64, dtype="bfloat16")
    needed = Weights(tmp_path, ModelConfig.load(tmp_path), "bf16").least_bytes(config) + 64 * MIB
    assert needed > 65 * MIB
    monkeypatch.setattr(kv, "available_bytes", lambda: needed - (not is_enough))
    if is_enough:
        CpuRunner(how, tmp_path).close()
        return
    with pytest.raises(UserError, match=r"^the weights take \d+KiB and the KV cache 64MiB, but only 66MiB of memory "):
        CpuRunner(how, tmp_path)
