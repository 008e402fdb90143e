"""The executor's KV memory: how many blocks it has, and swap space, and how long a sequence can be in it."""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.kv_layout import block_bytes
from pipeline.kernels.step_inputs import BLOCK_SIZE
from pipeline.runtime.model_folder import ModelConfig
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.cpu.program import SwapArray

MAX_CHOSEN_BLOCKS = 2**20
"""The most that are made where nobody said how many: 16 million tokens. The scheduler keeps a few words of each, and a
tiny model's blocks would be hundreds of millions on a large GPU."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """How much KV memory there is. Which block belongs to whom is the scheduler's business."""

    num_blocks: int
    max_model_len: int
    """The longest sequence: the least of the model's limit, the settings' and what all blocks hold."""


def plan_kv(settings: Settings, config: ModelConfig) -> KVPlan:
    """Raises UserError where the memory doesn't hold one block, or the machine doesn't hold the memory."""
    num_bytes = _block_bytes(settings, config)
    kv_bytes = kv_bytes_in_ram(settings)
    num_blocks = kv_bytes // num_bytes
    if num_blocks < 1:
        raise UserError(
            f"execute.kv_cache_bytes is {kv_bytes}, but one block of {BLOCK_SIZE} tokens of "
            f"this model takes {num_bytes} bytes: raise execute.kv_cache_bytes"
        )
    available = available_bytes()
    if kv_bytes > available:
        raise UserError(
            f"execute.kv_cache_bytes is {kv_bytes}, but only {available} bytes of memory are "
            "free: lower execute.kv_cache_bytes"
        )
    return _plan(settings, config, num_blocks, num_bytes, "execute.kv_cache_bytes")


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory when weights are loaded and KV blocks are to be reserved, in bytes."""

    total_bytes: int
    free_bytes: int
    """What nobody has."""
    used_bytes: int
    """What this process has: weights, and what CUDA itself takes. Others may have the rest."""
    reserved_bytes: int
    """What it will still take: activations, graphs, scratch."""


def plan_device_kv(settings: Settings, config: ModelConfig, memory: DeviceMemory) -> KVPlan:
    """Likewise on a GPU: `execute.kv_cache_bytes`, or what `execute.gpu_memory_fraction` of its memory leaves. Pure but
    for a warning. Raises UserError where there is no room for one block, or not for what was asked."""
    num_bytes = _block_bytes(settings, config)
    left = memory.free_bytes - memory.reserved_bytes
    if asked := settings.execute.kv_cache_bytes:
        if asked > left:
            raise UserError(
                f"execute.kv_cache_bytes is {asked}, but of the GPU's memory only {max(0, left)} bytes are left beside "
                f"weights, activations and graphs: lower execute.kv_cache_bytes, or set it to 0, which takes what fits"
            )
        if asked < num_bytes:
            raise UserError(
                f"execute.kv_cache_bytes is {asked}, but one block of {BLOCK_SIZE} tokens of this model takes "
                f"{num_bytes} bytes: raise execute.kv_cache_bytes"
            )
        return _plan(settings, config, asked // num_bytes, num_bytes, "execute.kv_cache_bytes")
    fraction = settings.execute.gpu_memory_fraction
    ours = int(fraction * memory.total_bytes) - memory.used_bytes - memory.reserved_bytes
    num_blocks = min(ours, left, MAX_CHOSEN_BLOCKS * num_bytes) // num_bytes
    if num_blocks < 1:
        takes = f"weights take {gib(memory.used_bytes)}, activations and graphs {gib(memory.reserved_bytes)}"
        if ours < num_bytes:
            raise UserError(
                f"execute.gpu_memory_fraction is {fraction:g}, which is {gib(fraction * memory.total_bytes)} of the "
                f"GPU's {gib(memory.total_bytes)}, and leaves no room for KV blocks: {takes}. Raise it, take a smaller "
                "model, or lower schedule.max_num_batched_tokens and schedule.max_num_seqs"
            )
        raise UserError(
            f"the GPU has {gib(memory.total_bytes)}, of which others leave too little for KV blocks: {takes}, and "
            f"{gib(memory.free_bytes)} are free. End what has the rest; nvidia-smi shows it"
        )
    return _plan(settings, config, num_blocks, num_bytes, "execute.gpu_memory_fraction")


def gib(num_bytes: float) -> str:
    """As people say it."""
    return f"{num_bytes / 1024**3:.1f} GiB"


def _plan(settings: Settings, config: ModelConfig, num_blocks: int, num_bytes: int, key: str) -> KVPlan:
    """What follows from so many blocks. Where they don't hold the longest sequence that was wanted, a warning names the
    `key` to raise."""
    wanted = min(config.max_position, settings.max_model_len or config.max_position)
    if num_blocks * BLOCK_SIZE < wanted:
        by = f" to {-(-wanted // BLOCK_SIZE) * num_bytes}" if key.endswith("_bytes") else ""
        logging.getLogger("pipeline").warning(
            "KV memory holds %d tokens, so max_model_len is that and not %d: raise %s%s",
            num_blocks * BLOCK_SIZE,
            wanted,
            key,
            by,
        )
    return KVPlan(num_blocks, min(wanted, num_blocks * BLOCK_SIZE))


def divide_swap(settings: Settings, config: ModelConfig, memory: memoryview) -> SwapArray:
    """Swap space as whole blocks. Raises UserError where the memory doesn't hold one."""
    num_bytes = _block_bytes(settings, config)
    num_blocks = len(memory) // num_bytes
    if num_blocks < 1:
        raise UserError(
            f"execute.swap_bytes is {len(memory)}, but one block of {BLOCK_SIZE} tokens of this model takes "
            f"{num_bytes} bytes: raise execute.swap_bytes, or set it to 0"
        )
    swap: SwapArray = np.frombuffer(memory, np.uint8)[: num_blocks * num_bytes].reshape(num_blocks, num_bytes)
    return swap


def _block_bytes(settings: Settings, config: ModelConfig) -> int:
    dtype: torch.dtype = getattr(torch, settings.execute.dtype)
    return block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
