"""What each replica probably has in its prefix cache: the keys of the prompts that were routed to it, as an LRU of the
size of its KV cache. Memory is bounded by the sum of these sizes, whatever clients send.

    by replica      LRU of keys, least recently used first
    by key          a bit for each replica that has it, so that a lookup takes one access a key for all replicas

The longest prefix of all replicas is found in one walk along a prompt's keys:

    key       k0        k1        k2        k3
    holders   1111      0111      0011      0000      replica 3 has 1 key, replica 2 has 2, replicas 0 and 1 have 3
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence


class KeyCaches:
    """The LRUs of all replicas. A replica is a small index, chosen by the caller."""

    def __init__(self) -> None:
        self._caches: dict[int, OrderedDict[int, None]] = {}
        self._capacities: dict[int, int] = {}
        self._holders: dict[int, int] = {}

    def add(self, replica: int, capacity: int) -> None:
        """A replica whose KV cache holds `capacity` keys begins, empty."""
        assert replica not in self._caches, f"replica {replica} is there already"
        self._caches[replica] = OrderedDict()
        self._capacities[replica] = capacity

    def remove(self, replica: int) -> None:
        """A replica is gone."""
        for key in self._caches.pop(replica):
            self._clear(replica, key)
        del self._capacities[replica]

    def matches(self, keys: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yields (replica, number of keys from the first on) for each replica that has any."""
        left = -1
        num = 0
        for key in keys:
            holders = self._holders.get(key, 0) & left
            if holders != left and num:
                yield from ((replica, num) for replica in _set_bits(left & ~holders))
            left = holders
            if not left:
                return
            num += 1
        if num:
            yield from ((replica, num) for replica in _set_bits(left))

    def use(self, replica: int, keys: Sequence[int]) -> None:
        """A prompt with these keys goes to a replica. Its tail becomes the least recently used of it, as in the
        replica's own cache: a prefix is worth more than its continuation."""
        cache, capacity, bit = self._caches[replica], self._capacities[replica], 1 << replica
        holders = self._holders
        for key in reversed(keys[:capacity]):
            if key in cache:
                cache.move_to_end(key)
            else:
                cache[key] = None
                holders[key] = holders.get(key, 0) | bit
        while len(cache) > capacity:
            self._clear(replica, cache.popitem(last=False)[0])

    def num_keys(self, replica: int) -> int:
        """Keys that a replica has."""
        return len(self._caches[replica])

    def _clear(self, replica: int, key: int) -> None:
        holders = self._holders[key] & ~(1 << replica)
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def check(self) -> None:
        """Assert every invariant; for tests."""
        found: dict[int, int] = {}
        for replica, cache in self._caches.items():
            assert len(cache) <= self._capacities[replica], "an LRU is over its capacity"
            for key in cache:
                found[key] = found.get(key, 0) | 1 << replica
        assert found == self._holders, "the LRUs and the holders differ"


def _set_bits(bits: int) -> Iterator[int]:
    """The places of the bits that are set."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
