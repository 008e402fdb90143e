"""KV groups: layers that keep the same positions, and so share a block table.

A layer with full attention reads the keys and values of all positions before a token; one with a sliding window reads
the last ones only, so the blocks before them are free for others. A model that mixes both (Gemma 3: five layers with a
window, then one without) has a block table for each group:

    all groups have the same number of layers, so a block has the same size in each, and one pool serves all

    Gemma 3 270M    group 0   layers 5 11 17         full attention
                    group 1   layers 0 1 2           window of 512
                    group 2   layers 3 4 6           window of 512
                    ...
                    group 5   layers 14 15 16        window of 512

vLLM's hybrid KV cache manager divides layers in the same way. A group differs from others in the blocks that it keeps
(`first_block`) and in how many it can need (`most_blocks`). Layers of other kinds, such as cross-attention or recurrent
state, would be groups with rules of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_GROUPS = 8
"""More groups would save little memory, and the scheduler handles each block of each group."""
MIN_CHUNK = 16
"""Positions that a sequence may compute in a step, at the least. More than there are steps in flight."""


class KVGroup(msgspec.Struct, array_like=True, frozen=True):
    """Some layers of a model."""

    window: int = 0
    """Number of positions that attention sees, including its own; 0: all up to its own."""
    num_layers: int = 0
    """Layers in the group; 0 if they don't matter."""

    def first_block(self, position: int, block_size: int) -> int:
        """The first block that `position` and later ones read."""
        return max(0, position - self.window + 1) // block_size if self.window else 0

    def most_blocks(self, num_ids: int, chunk: int, block_size: int) -> int:
        """Blocks that a sequence of `num_ids` ids holds at most, if a step computes at most `chunk` of its
        positions."""
        num_blocks = -(-num_ids // block_size)
        if not self.window:
            return num_blocks
        num_positions = self.window - 1 + max(chunk, MIN_CHUNK)  # of which the first may be the last of its block
        return min(num_blocks, (num_positions + block_size - 2) // block_size + 1)


FULL = KVGroup()
"""Layers that keep all positions."""


def most_blocks(groups: Sequence[KVGroup], num_ids: int, chunk: int, block_size: int) -> int:
    """Blocks of all groups that a sequence of `num_ids` ids holds at most."""
    return sum(group.most_blocks(num_ids, chunk, block_size) for group in groups)


def longest_sequence(
    groups: Sequence[KVGroup], num_blocks: int, chunk: int, block_size: int, longest: int = 2**31 - 1
) -> int:
    """Ids of the longest sequence that fits in `num_blocks` blocks, at most `longest`; whole blocks unless that limits
    it."""
    low, high = 0, -(-longest // block_size)
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, middle * block_size, chunk, block_size) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return min(longest, low * block_size)


NO_LOCATION = -1, -1
"""Of a layer without keys and values."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Where the layers of a model keep keys and values."""

    groups: tuple[KVGroup, ...]
    """Layers that keep all positions are in the first groups."""
    layer_locations: tuple[tuple[int, int], ...]
    """Of each layer: its group, and its unit in the group's blocks; or NO_LOCATION."""
    layers_per_group: int
    """Units in a block: layers, if all have the same size."""
    unit_bytes: int = 0
    """Bytes of a unit, if layers have different sizes; else 0."""
    begins: tuple[int, ...] = ()
    """Of each layer: the byte of its unit at which its keys and values begin; empty: 0 for all."""

    def begin_of(self, layer: int) -> int:
        """The byte of its unit at which a layer's keys and values begin."""
        return self.begins[layer] if self.begins else 0

    @property
    def windows(self) -> tuple[int, ...]:
        return tuple(group.window for group in self.groups)


def kv_layout(windows: Sequence[int | None], max_model_len: int, *, divides: bool = True) -> KVLayout:
    """Divide layers with these windows, None for full attention, into groups. Windows of at least `max_model_len` keep
    all positions. Without `divides`, all layers are in one group, which does."""
    kinds: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        kinds.setdefault(window if divides and window and window < max_model_len else 0, []).append(layer)
    layers_per_group = _layers_per_group([len(layers) for layers in kinds.values()])
    groups: list[KVGroup] = []
    layer_locations: list[tuple[int, int]] = [(0, 0)] * len(windows)
    for window in sorted(kinds):
        layers = kinds[window]
        for begin in range(0, len(layers), layers_per_group):
            part = layers[begin : begin + layers_per_group]
            for index, layer in enumerate(part):
                layer_locations[layer] = len(groups), index
            groups.append(KVGroup(window, len(part)))
    return KVLayout(tuple(groups) or (FULL,), tuple(layer_locations), layers_per_group)


def layout_of_sizes(
    windows: Sequence[int | None], sizes: Sequence[int], max_model_len: int, *, divides: bool = True
) -> KVLayout:
    """The same of layers whose keys and values of a block have `sizes`, in bytes. A unit has one layer, or several
    adjacent ones of the same kind, if they are small:

        Gemma 4 E2B     group 0   layers (4) (9) (14)              full attention, heads of 512
                        group 1   layers (0 1) (2 3) (5 6)         window of 512, heads of 256
                        group 2   layers (7 8) (10 11) (12 13)     window of 512
    """
    kinds = [window if divides and window and window < max_model_len else 0 for window in windows]
    largest = max(sizes)
    # A unit may be a little larger than the largest layer, so that smaller layers fill it.
    options = {largest, *(-(-largest // size) * size for size in sizes)}
    unit_bytes = min(options, key=lambda option: (option * _num_units(kinds, sizes, option), option))
    units = _units(kinds, sizes, unit_bytes)
    num_units = _num_units(kinds, sizes, unit_bytes)
    windows_of = [next(kind for kind, (at, _) in zip(kinds, units, strict=True) if at == i) for i in range(num_units)]
    layout = kv_layout(windows_of, max_model_len, divides=divides)
    locations = tuple(layout.layer_locations[unit] for unit, _ in units)
    begins = tuple(begin for _, begin in units)
    return KVLayout(layout.groups, locations, layout.layers_per_group, unit_bytes, begins)


def _units(kinds: Sequence[int], sizes: Sequence[int], unit_bytes: int) -> list[tuple[int, int]]:
    """The number of each layer's unit, and the byte where it begins there."""
    units: list[tuple[int, int]] = []
    last: dict[int, tuple[int, int]] = {}
    """The last unit of each kind of layers, and the bytes of it that are used."""
    num = 0
    for kind, size in zip(kinds, sizes, strict=True):
        unit, used = last.get(kind, (0, unit_bytes))
        if used + size > unit_bytes:
            unit, used, num = num, 0, num + 1
        units.append((unit, used))
        last[kind] = unit, used + size
    return units


def _num_units(kinds: Sequence[int], sizes: Sequence[int], unit_bytes: int) -> int:
    return 1 + max(unit for unit, _ in _units(kinds, sizes, unit_bytes))


def has_windows(groups: Sequence[KVGroup]) -> bool:
    """Whether any layers keep only a window of positions."""
    return any(group.window for group in groups)


def described(groups: Sequence[KVGroup]) -> str:
    """For logs, as `1 full + 5 of window 512`."""
    kinds: dict[int, int] = {}
    for group in groups:
        kinds[group.window] = kinds.get(group.window, 0) + 1
    return " + ".join(f"{num} of window {window}" if window else f"{num} full" for window, num in kinds.items())


def undivided(num_layers: int) -> KVLayout:
    """All layers in one group, which keeps all positions."""
    return kv_layout([None] * num_layers, 0)


def scratch(num_layers: int) -> KVLayout:
    """Of an encoder: no step reads the keys and values of another one, nor a layer those of another. So all layers have
    the same place, and blocks have the size of one layer."""
    return KVLayout((FULL,), ((0, 0),) * num_layers, 1)


def _layers_per_group(counts: list[int]) -> int:
    """The number of layers in a block, given the number of layers of each kind: that which leaves the fewest places of
    blocks unused, of equals the one with fewest groups."""
    if len(counts) <= 1:
        return max(counts, default=0)
    best: tuple[int, int, int] | None = None
    for size in range(1, max(counts) + 1):
        num_groups = sum(-(-count // size) for count in counts)
        if num_groups <= max(MAX_GROUPS, len(counts)):
            option = num_groups * size, num_groups, size
            best = option if best is None else min(best, option)
    assert best is not None
    return best[2]
