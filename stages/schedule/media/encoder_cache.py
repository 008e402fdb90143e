"""The rows of the executor's encoder cache.

    free ──add──► held ──last holder releases──► kept ──hold──► held
                                                  └──evicted, the one released first──► free

Requests whose items have the same key share rows. Steps run in order, and a step encodes before it computes, so rows
may be written again by any step after the last one that reads them.
"""

from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from pipeline.stages.schedule.arrays import Int32s


class _Item:
    __slots__ = ("num_holders", "slots")

    def __init__(self, slots: Int32s) -> None:
        self.slots = slots
        self.num_holders = 1


class EncoderCache:
    """Says where the rows of each item are. An item's rows need not be next to each other, so free ones always fit."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._free: Int32s = np.arange(num_rows, dtype=np.int32)[::-1].copy()
        self.num_free = num_rows
        """Rows of no item."""
        self._items: dict[bytes, _Item] = {}
        self._kept: OrderedDict[bytes, None] = OrderedDict()
        """Items without holders, the one released first at the beginning."""
        self.num_kept = 0
        """Rows of items without holders."""
        self.num_queries = self.num_hits = self.num_rows_encoded = 0
        """Since start: items that steps needed, those of them that were here, and rows of the others."""

    def __contains__(self, key: object) -> bool:
        return key in self._items

    @property
    def num_held(self) -> int:
        """Rows of items with holders."""
        return self.num_rows - self.num_free - self.num_kept

    def num_available(self, pinned: Collection[bytes] = ()) -> int:
        """Rows that are free, or can be, if `pinned` items stay."""
        num_pinned = sum(len(self._items[key].slots) for key in pinned if key in self._kept)
        return self.num_free + self.num_kept - num_pinned

    def hold(self, key: bytes) -> Int32s:
        """One more holder of an item that is here. Returns its slots."""
        item = self._items[key]
        if key in self._kept:
            del self._kept[key]
            self.num_kept -= len(item.slots)
        item.num_holders += 1
        return item.slots

    def add(self, key: bytes, num_rows: int, pinned: Collection[bytes] = ()) -> Int32s:
        """Give an item rows, and one holder. Evicts others, but not those that are `pinned`. The caller has checked
        that as many are available. Returns its slots, int32 [num_rows]."""
        assert key not in self._items, "an item is in the encoder cache twice"
        for other in [one for one in self._kept if one not in pinned]:
            if self.num_free >= num_rows:
                break
            self._evict(other)
        assert self.num_free >= num_rows, f"{num_rows} rows of the encoder cache are needed, {self.num_free} are free"
        self.num_free -= num_rows
        slots = self._free[self.num_free : self.num_free + num_rows][::-1].copy()
        self._items[key] = _Item(slots)
        self.num_rows_encoded += num_rows
        return slots

    def release(self, key: bytes) -> None:
        """A holder needs an item no longer."""
        item = self._items[key]
        assert item.num_holders > 0, "an item of the encoder cache is released twice"
        item.num_holders -= 1
        if not item.num_holders:
            self._kept[key] = None
            self.num_kept += len(item.slots)

    def discard(self, key: bytes) -> None:
        """Its only holder gives up an item that was not encoded."""
        self.release(key)
        self._evict(key)

    def slots_of(self, key: bytes) -> Int32s:
        """Where an item is that is here."""
        return self._items[key].slots

    def forget_all(self) -> None:
        """The executor is gone, and no one holds anything."""
        assert not self.num_held, "rows of the encoder cache are held, though the executor is gone"
        for key in list(self._kept):
            self._evict(key)

    def _evict(self, key: bytes) -> None:
        del self._kept[key]
        slots = self._items.pop(key).slots
        self.num_kept -= len(slots)
        self._free[self.num_free : self.num_free + len(slots)] = slots[::-1]
        self.num_free += len(slots)

    def check(self, held: list[bytes]) -> None:
        """Assert every invariant; for tests. `held` are the items of all holders."""
        used = [slot for item in self._items.values() for slot in item.slots.tolist()]
        assert sorted([*used, *self._free[: self.num_free].tolist()]) == list(range(self.num_rows)), "a row is lost"
        for key, item in self._items.items():
            assert item.num_holders == held.count(key), "a reference to the encoder cache has no holder"
            assert (key in self._kept) == (item.num_holders == 0)
        assert set(held) <= self._items.keys()
        assert self.num_kept == sum(len(self._items[key].slots) for key in self._kept)
