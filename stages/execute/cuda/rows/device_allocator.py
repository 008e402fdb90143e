"""First-fit allocation of device memory for lists of variable size. Adjacent free ranges are joined."""

from bisect import bisect_left


class DeviceAllocator:
    """Tracks the free ranges of `num_words` words. The caller keeps the size of each range."""

    def __init__(self, num_words: int) -> None:
        self._free: list[tuple[int, int]] = [(0, num_words)]

    @property
    def num_free(self) -> int:
        return sum(size for _, size in self._free)

    def allocate(self, num: int) -> int | None:
        """Allocate `num` words, at least one. Returns the offset, or None if no free range is large enough."""
        assert num > 0
        for i, (begin, size) in enumerate(self._free):
            if size >= num:
                if size == num:
                    del self._free[i]
                else:
                    self._free[i] = begin + num, size - num
                return begin
        return None

    def free(self, begin: int, num: int) -> None:
        """Free a range that was allocated."""
        i = bisect_left(self._free, (begin, 0))
        if i < len(self._free) and begin + num == self._free[i][0]:
            num += self._free.pop(i)[1]
        if i > 0 and sum(self._free[i - 1]) == begin:
            begin, before = self._free[i - 1]
            self._free[i - 1] = begin, before + num
        else:
            self._free.insert(i, (begin, num))
