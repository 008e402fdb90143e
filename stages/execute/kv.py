"""Plans the executor's KV memory: the numbers of blocks, of slots for recurrent states, the same in swap space, and the
maximum sequence length."""

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.sections.stages import ExecuteSettings
from pipeline.config.settings import Settings
from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import BLOCK_SIZE, block_bytes
from pipeline.runtime.model.kv_groups import (
    NO_LOCATION,
    KVLayout,
    kv_layout,
    layout_of_sizes,
    longest_sequence,
    most_blocks,
    scratch,
    undivided,
)
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.shm.available import available_bytes
from pipeline.stages.execute.layers.recurrent import slot_floats

SwapArray = np.ndarray[Any, np.dtype[np.uint8]]
"""Swap space: [num_swap_blocks, bytes of a block with all layers]. The program defines the layout of a block."""

DTYPE_BYTES = {"bfloat16": 2, "float32": 4, "int8": 1}
"""The size of a number in the KV cache."""

MAX_CHOSEN_BLOCKS = 2**20
"""Maximum number of blocks if execute.kv_cache_bytes is not set: 16 million tokens. The scheduler keeps a few words for
each block, and a tiny model on a large GPU would get hundreds of millions."""

MAX_STEPS = 4
"""In flight, each of which has blocks of its own."""

MIN_SLOTS = 2
"""One for the state of a row, one for its next state."""
MAX_SLOTS_PER_ROW = 4
"""If all rows run: the state of each, its next one, and two snapshots."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The size of KV memory. The scheduler assigns the blocks."""

    num_blocks: int
    max_model_len: int
    """The minimum of the model's limit, the configured limit and the capacity of all blocks."""
    layout: KVLayout
    num_state_slots: int = 0
    """Slots for the states of recurrent layers."""
    slot_bytes: int = 0
    """0: as many as the states of all recurrent layers take."""
    state_tokens: int = 0
    """Tokens whose KV has the size of a slot."""
    touches: bool = True
    """Whether all of the memory is touched, beside the steps. An executor that wakes touches what it uses."""


class SwapMemory(NamedTuple):
    """Swap space."""

    blocks: SwapArray
    slots: SwapArray
    """[num_slots, bytes of a slot]"""


def plan_kv(
    settings: Settings,
    config: ModelConfig,
    max_num_tokens: int,
    draft_bytes: int = 0,
    layout: KVLayout | None = None,
    slot_bytes: int | None = None,
) -> KVPlan:
    """The plan on a CPU, for steps of at most `max_num_tokens` tokens. `draft_bytes` of each block are those of a draft
    model's cache, which has as many blocks. `layout` and `slot_bytes` are by default those of all layers.
    Raises UserError if the memory is smaller than one block of each KV group, or larger than the free memory."""
    layout = layout_of(settings, config) if layout is None else layout
    num_bytes = kv_block_bytes(settings.execute, config, layout) + draft_bytes
    slot_bytes = state_slot_bytes(config) if slot_bytes is None else slot_bytes
    kv_bytes, num_slots = kv_bytes_in_ram(settings), 0
    if slot_bytes:
        num_slots = max(MIN_SLOTS, half_in_slots(kv_bytes, slot_bytes, settings))
    num_blocks = max(0, kv_bytes - num_slots * slot_bytes) // num_bytes
    if not config.causal:
        num_blocks = min(num_blocks, scratch_blocks(settings, max_num_tokens))
    if num_blocks < len(layout.groups):
        beside = f" and {MIN_SLOTS} states of its recurrent layers take" if slot_bytes else " takes"
        least = num_bytes * len(layout.groups) + num_slots * slot_bytes
        raise UserError(
            f"execute.kv_cache_bytes is {size_words(kv_bytes)}, but one block of {BLOCK_SIZE} tokens of "
            f"this model{beside} {size_words(least, up=True)}: raise execute.kv_cache_bytes"
        )
    available = available_bytes()
    if kv_bytes > available:
        raise UserError(
            f"execute.kv_cache_bytes is {size_words(kv_bytes)}, but only {size_words(available)} of memory are free: "
            "lower execute.kv_cache_bytes"
        )
    plan = _plan(settings, config, layout, num_blocks, max_num_tokens, num_bytes, "execute.kv_cache_bytes")
    if not slot_bytes:
        return plan
    state_tokens = slot_bytes * BLOCK_SIZE // (num_bytes * len(layout.groups))
    return replace(plan, num_state_slots=num_slots, slot_bytes=slot_bytes, state_tokens=state_tokens)


def scratch_blocks(settings: Settings, max_num_tokens: int) -> int:
    """Blocks that an encoder's steps in flight have at most: each text may fill its last one in part."""
    return MAX_STEPS * (max_num_tokens // BLOCK_SIZE + settings.schedule.max_num_seqs)


def state_slot_bytes(config: ModelConfig, layers: Collection[int] | None = None, num_ranks: int = 1) -> int:
    """Bytes of the state of all recurrent layers of a row, or as in `slot_floats`; 0 without such layers."""
    return slot_floats(config, layers, num_ranks) * np.dtype(np.float32).itemsize


def half_in_slots(num_bytes: int, slot_bytes: int, settings: Settings) -> int:
    """Slots in memory that is also for blocks: half of it, or what all rows need."""
    return min(num_bytes // 2 // slot_bytes, MAX_SLOTS_PER_ROW * settings.schedule.max_num_seqs)


def require_room(settings: Settings, weight_bytes: int) -> None:
    """Raise UserError if weights and KV cache are larger than the free memory: the system would kill this process, or
    another one. `weight_bytes` is what this process loads at least."""
    available, kv_bytes = available_bytes(), kv_bytes_in_ram(settings)
    if weight_bytes + kv_bytes > available:
        raise UserError(
            f"the weights take {size_words(weight_bytes, up=True)} and the KV cache {size_words(kv_bytes)}, but only "
            f"{size_words(available)} of memory are free: use a smaller model or quantized weights (--set "
            "quantization=q4_1), or lower execute.kv_cache_bytes"
        )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory when weights are loaded and KV blocks are to be reserved, in bytes."""

    total_bytes: int
    free_bytes: int
    """Free on the device."""
    used_bytes: int
    """Used by this process: weights and the CUDA context. Other processes may use the rest."""
    reserved_bytes: int
    """Still to be allocated: activations, graphs, scratch."""


def plan_device_kv(settings: Settings, config: ModelConfig, memory: DeviceMemory, draft_bytes: int = 0) -> KVPlan:
    """The plan on a GPU: `execute.kv_cache_bytes`, or the rest of `execute.gpu_memory_utilization`. `draft_bytes` as in
    `plan_kv`. Pure except for a warning. Raises UserError if there is no memory for one block, or less than
    `execute.kv_cache_bytes`."""
    layout, max_num_tokens = layout_of(settings, config), settings.schedule.max_step_tokens
    num_bytes = kv_block_bytes(settings.execute, config, layout) + draft_bytes
    least_bytes = num_bytes * len(layout.groups)
    left = memory.free_bytes - memory.reserved_bytes
    if asked := settings.execute.kv_cache_bytes:
        given = f"execute.kv_cache_bytes is {size_words(asked)}, but"
        if asked > left:
            raise UserError(
                f"{given} only {size_words(max(0, left))} of the GPU's memory are left beside weights, activations and "
                "graphs: lower execute.kv_cache_bytes, or set it to 0 to use what is left"
            )
        if asked < least_bytes:
            raise UserError(
                f"{given} one block of {BLOCK_SIZE} tokens of this model takes {size_words(least_bytes, up=True)}: "
                "raise execute.kv_cache_bytes"
            )
        return _plan(settings, config, layout, asked // num_bytes, max_num_tokens, num_bytes, "execute.kv_cache_bytes")
    fraction = settings.execute.gpu_memory_utilization
    ours = int(fraction * memory.total_bytes) - memory.used_bytes - memory.reserved_bytes
    num_blocks = min(ours, left, MAX_CHOSEN_BLOCKS * num_bytes) // num_bytes
    if num_blocks < len(layout.groups):
        takes = f"weights take {gib(memory.used_bytes)}, activations and graphs {gib(memory.reserved_bytes)}"
        if ours < least_bytes:
            raise UserError(
                f"execute.gpu_memory_utilization is {fraction:g}, which is {gib(fraction * memory.total_bytes)} of the "
                f"GPU's {gib(memory.total_bytes)}, and leaves no room for KV blocks: {takes}. Raise it, use a smaller "
                "model, or lower schedule.max_num_batched_tokens and schedule.max_num_seqs"
            )
        raise UserError(
            f"other processes leave too little of the GPU's {gib(memory.total_bytes)} for KV blocks: {takes}, and "
            f"{gib(memory.free_bytes)} are free. Stop the processes that nvidia-smi lists"
        )
    return _plan(settings, config, layout, num_blocks, max_num_tokens, num_bytes, "execute.gpu_memory_utilization")


def gib(num_bytes: float) -> str:
    """Bytes as GiB, for messages."""
    return f"{num_bytes / 1024**3:.1f} GiB"


def layout_of(settings: Settings, config: ModelConfig) -> KVLayout:
    """How the layers of a model are divided into KV groups."""
    if not config.causal:
        return scratch(config.num_layers)
    divides = settings.execute.hybrid_kv_cache_manager
    if _differs_by_layer(config):
        return _layout_by_layer(settings.execute, config, _wanted(settings, config), divides=divides)
    windows = [config.window_of(layer) for layer in range(config.num_layers) if not config.is_recurrent(layer)]
    layout = kv_layout(windows, _wanted(settings, config), divides=divides)
    if not config.has_states:
        return layout
    layer_locations = iter(layout.layer_locations)
    # Recurrent layers have states in place of keys and values.
    every = tuple(NO_LOCATION if config.is_recurrent(i) else next(layer_locations) for i in range(config.num_layers))
    return replace(layout, layer_locations=every)


def layout_of_all(execute: ExecuteSettings, config: ModelConfig) -> KVLayout:
    """All layers in one group, which keeps all positions."""
    if _differs_by_layer(config):
        return _layout_by_layer(execute, config, 0, divides=False)
    return undivided(config.num_layers)


def _differs_by_layer(config: ModelConfig) -> bool:
    """Whether some layers have more keys and values than others, or none of their own."""
    return config.other_heads is not None or config.first_shared_kv_layer is not None


def _layout_by_layer(execute: ExecuteSettings, config: ModelConfig, max_model_len: int, *, divides: bool) -> KVLayout:
    """The layout of layers with different heads, of which some read the keys and values of others."""
    layers = range(config.num_layers)
    own = [layer for layer in layers if config.kv_source(layer) == layer]
    sizes = [layer_kv_bytes(execute, config, layer) for layer in own]
    windows = [config.window_of(layer) for layer in own]
    layout = layout_of_sizes(windows, sizes, max_model_len, divides=divides)
    at = {layer: i for i, layer in enumerate(own)}
    sources = [at[config.kv_source(layer)] for layer in layers]
    locations = tuple(layout.layer_locations[source] for source in sources)
    return replace(layout, layer_locations=locations, begins=tuple(layout.begins[source] for source in sources))


def _wanted(settings: Settings, config: ModelConfig) -> int:
    """The longest sequence that model and settings allow."""
    return config.longest_sequence(settings.max_model_len)


def _plan(
    settings: Settings,
    config: ModelConfig,
    layout: KVLayout,
    num_blocks: int,
    max_num_tokens: int,
    num_bytes: int,
    key: str,
) -> KVPlan:
    """The plan for `num_blocks` blocks of `num_bytes`. Warns with the `key` to raise if they don't hold max_model_len
    tokens."""
    wanted = _wanted(settings, config)
    capacity = longest_sequence(layout.groups, num_blocks, max_num_tokens, BLOCK_SIZE, wanted)
    if capacity < wanted:
        lacking = most_blocks(layout.groups, wanted, max_num_tokens, BLOCK_SIZE) * num_bytes
        # Beside blocks, half of the memory has slots, until all rows have theirs.
        lacking += min(lacking, MAX_SLOTS_PER_ROW * settings.schedule.max_num_seqs * state_slot_bytes(config))
        logging.getLogger("pipeline").warning(
            "KV memory holds %d tokens, so max_model_len is reduced to that from %d: raise %s%s",
            capacity,
            wanted,
            key,
            f" to {size_words(lacking, up=True)}" if key.endswith("_bytes") else "",
        )
    return KVPlan(num_blocks, capacity, layout)


def divide_swap(settings: Settings, config: ModelConfig, memory: memoryview, kv: KVPlan) -> SwapMemory:
    """Swap space as whole slots, then whole blocks. Raises UserError if the memory is smaller than one block."""
    num_bytes, slot_bytes = kv_block_bytes(settings.execute, config, kv.layout), kv.slot_bytes
    num_slots = half_in_slots(len(memory), slot_bytes, settings) if slot_bytes else 0
    begin = num_slots * slot_bytes
    num_blocks = (len(memory) - begin) // num_bytes
    if num_blocks < 1:
        raise UserError(
            f"execute.swap_bytes is {size_words(len(memory))}, but one block of {BLOCK_SIZE} tokens of this model "
            f"takes {size_words(num_bytes, up=True)}: raise execute.swap_bytes, or set it to 0"
        )
    array = np.frombuffer(memory, np.uint8)
    blocks: SwapArray = array[begin : begin + num_blocks * num_bytes].reshape(num_blocks, num_bytes)
    return SwapMemory(blocks, array[:begin].reshape(num_slots, slot_bytes))


def kv_dtype(execute: ExecuteSettings) -> str:
    """The type of the KV cache: `int8`, or that of the model."""
    return execute.dtype if execute.kv_dtype == "auto" else execute.kv_dtype


def layer_kv_bytes(execute: ExecuteSettings, config: ModelConfig, layer: int) -> int:
    """Bytes of a layer's keys and values in a block."""
    heads = config.heads_of(layer)
    return block_bytes(1, heads.num_kv, heads.dim, DTYPE_BYTES[kv_dtype(execute)])


def kv_block_bytes(execute: ExecuteSettings, config: ModelConfig, layout: KVLayout | None = None) -> int:
    """Bytes of a KV block: with the layers of a group, or without a layout with all layers."""
    layout = layout_of_all(execute, config) if layout is None else layout
    if layout.unit_bytes:
        return layout.layers_per_group * layout.unit_bytes
    return layout.layers_per_group * layer_kv_bytes(execute, config, 0)
