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
from pipeline.model_folder import ModelConfig
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.program import SwapArray


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
    wanted = min(config.max_position, settings.max_model_len or config.max_position)
    if num_blocks * BLOCK_SIZE < wanted:
        logging.getLogger("pipeline").warning(
            "KV memory holds %d tokens, so max_model_len is that and not %d: raise execute.kv_cache_bytes to %d",
            num_blocks * BLOCK_SIZE,
            wanted,
            -(-wanted // BLOCK_SIZE) * num_bytes,
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
