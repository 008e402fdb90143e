"""How many KV blocks a GPU gets, and the error if it gets none."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.kv_groups import undivided
from pipeline.stages.execute.kv import MAX_CHOSEN_BLOCKS, DeviceMemory, KVPlan, plan_device_kv
from tests.stages.execute import checkpoints

GIB = 1024**3
LLAMA_8B = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128, "max_position": 131072}
BLOCK = block_bytes(32, 8, 128, torch.bfloat16.itemsize)
H100 = DeviceMemory(total_bytes=80 * GIB, free_bytes=63 * GIB, used_bytes=16 * GIB, reserved_bytes=2 * GIB)


def plan(memory: DeviceMemory = H100, max_model_len: int = 0, shape: Any = LLAMA_8B, **execute: Any) -> KVPlan:
    settings = Settings(max_model_len=max_model_len, execute=ExecuteSettings(device="cuda", **execute))
    return plan_device_kv(settings, checkpoints.config_of(**shape), memory)


def test_the_fraction_limits_all_memory_of_this_process() -> None:
    assert BLOCK == 16 * 131072
    assert plan().num_blocks == (72 - 16 - 2) * GIB // BLOCK
    assert plan(gpu_memory_utilization=0.5).num_blocks == (40 - 16 - 2) * GIB // BLOCK
    assert plan(dtype="float32").num_blocks == (72 - 16 - 2) * GIB // (2 * BLOCK)
    assert plan().max_model_len == 131072


def test_memory_of_other_processes_is_not_available() -> None:
    crowded = DeviceMemory(80 * GIB, free_bytes=20 * GIB, used_bytes=16 * GIB, reserved_bytes=2 * GIB)
    assert plan(crowded).num_blocks == 18 * GIB // BLOCK


def test_kv_bytes_override_the_fraction() -> None:
    assert plan(kv_cache_bytes=GIB + 5, gpu_memory_utilization=0.1).num_blocks == GIB // BLOCK
    assert plan(kv_cache_bytes=61 * GIB).num_blocks == 61 * GIB // BLOCK
    with pytest.raises(UserError, match=r"execute\.kv_cache_bytes is 62GiB, but only 61GiB of"):
        plan(kv_cache_bytes=62 * GIB)
    with pytest.raises(UserError, match=r"one block .* takes 2MiB: raise execute\.kv_cache_bytes"):
        plan(kv_cache_bytes=2**20)


def test_too_small_a_fraction_is_reported_with_what_uses_it() -> None:
    words = (
        r"execute\.gpu_memory_utilization is 0\.2, which is 16\.0 GiB of the GPU's 80\.0 GiB, and leaves no room for "
        r"KV blocks: weights take 16\.0 GiB, activations and graphs 2\.0 GiB\. Raise it"
    )
    with pytest.raises(UserError, match=words):
        plan(gpu_memory_utilization=0.2)


def test_a_gpu_filled_by_others_is_not_reported_as_too_small_a_fraction() -> None:
    full = DeviceMemory(80 * GIB, free_bytes=2 * GIB, used_bytes=16 * GIB, reserved_bytes=2 * GIB)
    with pytest.raises(UserError, match=r"other processes leave too little .* 2\.0 GiB are free.*nvidia-smi"):
        plan(full)
    with pytest.raises(UserError, match=r"only 0B of the GPU's memory are left"):
        plan(full, kv_cache_bytes=GIB)


def test_less_memory_than_the_longest_sequence_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    small = DeviceMemory(24 * GIB, free_bytes=7 * GIB, used_bytes=16 * GIB, reserved_bytes=2 * GIB)
    found = plan(small)
    assert found.max_model_len == found.num_blocks * 16 < 131072
    assert "max_model_len is reduced to that from 131072: raise execute.gpu_memory_utilization" in caplog.text
    caplog.clear()
    assert plan(small, max_model_len=8192).max_model_len == 8192
    assert not caplog.text


def test_the_number_of_blocks_of_a_tiny_model_is_limited() -> None:
    assert plan(shape={}).num_blocks == MAX_CHOSEN_BLOCKS
    assert plan(shape={}, kv_cache_bytes=30 * GIB).num_blocks > MAX_CHOSEN_BLOCKS, "an explicit size is not limited"


@given(
    total=st.integers(1, 200 * GIB),
    free=st.floats(0, 1),
    used=st.floats(0, 1),
    reserved=st.integers(0, 20 * GIB),
    fraction=st.floats(0.01, 1),
)
def test_the_plan_never_exceeds_free_memory(
    total: int, free: float, used: float, reserved: int, fraction: float
) -> None:
    memory = DeviceMemory(total, int(free * total), int(used * (total - free * total)), reserved)
    try:
        found = plan(memory, max_model_len=16, gpu_memory_utilization=fraction)
    except UserError:
        found = KVPlan(0, 0, undivided(32))
    kv_bytes = found.num_blocks * BLOCK
    if found.num_blocks:
        assert kv_bytes + reserved <= memory.free_bytes
        assert kv_bytes + reserved + memory.used_bytes <= fraction * total
    room = min(memory.free_bytes, int(fraction * total) - memory.used_bytes) - reserved
    assert max(0, room) - kv_bytes < BLOCK or found.num_blocks == MAX_CHOSEN_BLOCKS, "all memory that fits is used"
