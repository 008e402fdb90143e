"""How layers are divided into KV groups, and how many blocks these need."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.model.kv_groups import (
    FULL,
    MAX_GROUPS,
    KVGroup,
    kv_layout,
    layout_of_sizes,
    longest_sequence,
    most_blocks,
    undivided,
)

BLOCK_SIZE = 16
GROUPS = st.lists(st.one_of(st.just(FULL), st.integers(1, 300).map(KVGroup)), min_size=1, max_size=4)


def every_sixth_full(num_layers: int) -> list[int | None]:
    """Gemma 3's layers."""
    return [None if layer % 6 == 5 else 512 for layer in range(num_layers)]


@pytest.mark.parametrize(
    ("windows", "expected", "layers_per_group"),
    [
        ([None] * 30, (0,), 30),
        ([4096] * 32, (4096,), 32),
        (every_sixth_full(18), (0, 512, 512, 512, 512, 512), 3),  # Gemma 3 270M
        (every_sixth_full(26), (0, 512, 512, 512, 512, 512, 512), 4),  # 1B: two places of 28 are unused
        ([128, None] * 12, (0, 128), 12),  # gpt-oss
        ([4096, 4096, 4096, None] * 8, (0, 4096, 4096, 4096), 8),  # Command R7B
        ([32768] * 32, (0,), 32),  # no sequence is longer than the window
        ([None, 32768, 64, 100], (0, 0, 64, 100), 1),
    ],
    ids=["full", "windows", "gemma-3-270m", "gemma-3-1b", "gpt-oss", "cohere2", "wide windows", "two windows"],
)
def test_layers_of_a_kind_are_divided_into_groups_of_one_size(
    windows: list[Any], expected: tuple[int, ...], layers_per_group: int
) -> None:
    layout = kv_layout(windows, 32768)
    assert (layout.windows, layout.layers_per_group) == (expected, layers_per_group)
    assert sum(group.num_layers for group in layout.groups) == len(windows)
    assert len(set(layout.layer_locations)) == len(windows), "two layers have the same place"
    for window, (group, index) in zip(windows, layout.layer_locations, strict=True):
        assert index < layers_per_group
        assert layout.windows[group] == (window if window and window < 32768 else 0)


@given(st.lists(st.sampled_from([None, 16, 512]), min_size=1, max_size=64))
def test_any_division_has_few_groups_and_wastes_little(windows: list[Any]) -> None:
    layout = kv_layout(windows, 4096)
    assert len(layout.groups) <= MAX_GROUPS
    assert len(layout.groups) * layout.layers_per_group <= 1.5 * len(windows) + 1
    assert list(layout.windows) == sorted(layout.windows), "full attention is first"


def test_layers_can_stay_undivided() -> None:
    assert kv_layout([512, None, 512], 4096, divides=False) == undivided(3)
    assert undivided(3).groups == (KVGroup(0, 3),)
    assert undivided(3).layer_locations == ((0, 0), (0, 1), (0, 2))


def test_a_window_needs_its_blocks_and_those_of_a_chunk() -> None:
    group = KVGroup(512)
    assert group.most_blocks(100, 96, BLOCK_SIZE) == 7, "no more than the sequence has"
    # 511 positions before a chunk of 96, of which the first may be the last of its block: 1 + ceil(606 / 16)
    assert group.most_blocks(8192, 96, BLOCK_SIZE) == 39
    assert most_blocks([FULL, group], 8192, 96, BLOCK_SIZE) == 512 + 39
    # Position 600 reads 89 .. 600.
    assert (group.first_block(600, BLOCK_SIZE), FULL.first_block(600, BLOCK_SIZE)) == (5, 0)
    assert group.first_block(511, BLOCK_SIZE) == group.first_block(0, BLOCK_SIZE) == 0


@given(group=st.integers(1, 100).map(KVGroup), position=st.integers(0, 500), chunk=st.integers(1, 60))
def test_most_blocks_is_enough_for_any_chunk(group: KVGroup, position: int, chunk: int) -> None:
    num_ids = position + chunk
    held = -(-num_ids // BLOCK_SIZE) - group.first_block(position, BLOCK_SIZE)
    assert held <= group.most_blocks(num_ids, chunk, BLOCK_SIZE)


@given(groups=GROUPS, num_blocks=st.integers(0, 200), chunk=st.integers(1, 100), longest=st.integers(1, 2000))
def test_the_longest_sequence_fits_and_a_longer_one_does_not(
    groups: list[KVGroup], num_blocks: int, chunk: int, longest: int
) -> None:
    length = longest_sequence(groups, num_blocks, chunk, BLOCK_SIZE, longest)
    assert length == 0 or most_blocks(groups, length, chunk, BLOCK_SIZE) <= num_blocks
    assert length == longest or most_blocks(groups, length + 1, chunk, BLOCK_SIZE) > num_blocks


SMALL, LARGE = 256, 512
"""Sizes of heads of Gemma 4 E2B, which has one KV head."""
E2B = 3 * [*4 * [SMALL], LARGE]
"""Of its layers with keys and values of their own."""


@pytest.mark.parametrize("scale_bytes", [0, 64], ids=["bfloat16", "int8"])
def test_two_small_layers_share_the_unit_of_a_large_one(scale_bytes: int) -> None:
    windows = [512 if dim == SMALL else None for dim in E2B]
    sizes = [32 * dim + scale_bytes for dim in E2B]
    layout = layout_of_sizes(windows, sizes, 4096)
    assert layout.unit_bytes == 2 * (32 * SMALL + scale_bytes), "in 8 bits a little more than a large layer"
    assert layout.groups == (KVGroup(0, 3), KVGroup(512, 3), KVGroup(512, 3))
    assert layout.layers_per_group == 3
    assert layout.layer_locations[4::5] == ((0, 0), (0, 1), (0, 2))
    assert layout.layer_locations[:4] == ((1, 0), (1, 0), (1, 1), (1, 1))
    assert layout.begins[:5] == (0, sizes[0], 0, sizes[0], 0)
    assert [layout.begin_of(i) for i in range(15)] == list(layout.begins)
    kept = [(location, begin) for location, begin in zip(layout.layer_locations, layout.begins, strict=True)]
    assert len(set(kept)) == 15, "no two layers have the same memory"


def test_layers_of_all_sizes_are_in_one_group_if_they_keep_all_positions() -> None:
    layout = layout_of_sizes([512, None, 512], [3, 4, 3], 512)
    assert layout.groups == (KVGroup(0, 3),) and layout.unit_bytes == 4
    assert layout_of_sizes([512, None, 512], [3, 4, 3], 4096, divides=False) == layout
