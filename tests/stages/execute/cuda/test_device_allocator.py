"""The device allocator against a set of addresses."""

import random

from pipeline.stages.execute.cuda.rows.device_allocator import DeviceAllocator


def test_ranges_never_overlap_and_are_all_freed() -> None:
    chance = random.Random(5)
    for size in (1, 7, 100):
        allocator, taken, used = DeviceAllocator(size), [], set[int]()
        for _ in range(600):
            if chance.random() < 0.55:
                num = chance.randint(1, max(1, size // 4))
                begin = allocator.allocate(num)
                if begin is None:
                    runs = "".join("x" if word in used else "." for word in range(size))
                    assert "." * num not in runs
                    continue
                words = set(range(begin, begin + num))
                assert not words & used and max(words) < size
                used |= words
                taken.append((begin, num))
            elif taken:
                begin, num = taken.pop(chance.randrange(len(taken)))
                allocator.free(begin, num)
                used -= set(range(begin, begin + num))
            assert allocator.num_free == size - len(used)
        for begin, num in taken:
            allocator.free(begin, num)
        assert allocator.allocate(size) == 0
