"""Copies of blocks, in the order of the plan; kernels are interpreted."""

import random
import time

import numpy as np
import pytest
import torch

from pipeline.stages.execute.cuda import device, host_transfer
from pipeline.stages.execute.cuda.device import Interpreted
from pipeline.stages.execute.cuda.host_transfer import BlockCopier

NUM_BLOCKS, NUM_SLOTS = 7, 6


def test_any_list_of_copies_equals_sequential_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """With buffers of two blocks, to and from slots that are adjacent or not."""
    chance = random.Random(3)
    kv = torch.randint(0, 2**30, (2, 2, NUM_BLOCKS, 1, 2, 2), dtype=torch.int32)
    slots = np.zeros((NUM_SLOTS, 2 * 2 * 4 * 4), np.uint8)
    monkeypatch.setattr(host_transfer, "PACKED_BYTES", 2 * slots.shape[1])
    # A copy of adjacent slots must not cross from one piece of pinned memory to the next.
    monkeypatch.setattr(device, "LOCKED_BYTES", 4 * slots.shape[1])
    copies = BlockCopier(Interpreted(), kv, slots)
    expected = [kv[:, :, i].clone() for i in range(NUM_BLOCKS)] + [torch.zeros(2, 2, 1, 2, 2, dtype=torch.int32)] * 6
    for _ in range(12):
        pairs = []
        while len(pairs) < 5:
            source, target = chance.sample(range(NUM_BLOCKS + NUM_SLOTS), 2)
            if source >= NUM_BLOCKS and chance.random() < 0.7:
                target = chance.randrange(NUM_BLOCKS)
            if min(source, target) < NUM_BLOCKS:
                pairs.append((source, target))
        if chance.random() < 0.5:
            pairs = [(i, NUM_BLOCKS + i) for i in range(5)]
        for source, target in pairs:
            expected[target] = expected[source]
        transfer = copies.enqueue(*(np.array(ids, np.int32) for ids in zip(*pairs, strict=True)))
        assert (transfer is not None) == any(max(pair) >= NUM_BLOCKS for pair in pairs)
        assert transfer is None or 0 < transfer.began.recorded_s <= transfer.ended.recorded_s  # type: ignore[attr-defined]
        for i in range(NUM_BLOCKS):
            torch.testing.assert_close(kv[:, :, i], expected[i], rtol=0, atol=0)
        for i in range(NUM_SLOTS):
            torch.testing.assert_close(
                torch.from_numpy(slots[i]).view(torch.int32).view(2, 2, 1, 2, 2), expected[NUM_BLOCKS + i]
            )


def test_copies_of_the_longest_sequences_are_sorted_quickly() -> None:
    """Looking up each copy in a list of the others would take seconds, in which no step is launched."""
    kv = torch.zeros(1, 2, 20000, 1, 1, 1, dtype=torch.int32)
    copies = BlockCopier(Interpreted(), kv, None)
    sources, targets = np.arange(0, 16000, dtype=np.int32), np.arange(20000, 36000, dtype=np.int32)
    began_s = time.perf_counter()
    runs = list(copies._runs(sources, targets))
    assert [len(blocks) for _, blocks, _ in runs] == [16000]
    assert time.perf_counter() - began_s < 1
