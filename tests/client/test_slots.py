"""Slots bound the number of open requests."""

import asyncio
import random

import pytest

from pipeline.client.connection.slots import Slots


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_slots_are_granted_in_order_of_arrival() -> None:
    slots = Slots(3)
    await slots.take(2)
    order: list[str] = []

    async def acquire(name: str, num: int) -> None:
        await slots.take(num)
        order.append(name)

    tasks = [asyncio.create_task(acquire("big", 3)), asyncio.create_task(acquire("small", 1))]
    await settle()
    assert order == [], "a small one does not overtake a big one, which would never have its turn"
    slots.give(2)
    await settle()
    assert order == ["big"]
    slots.give(3)
    await asyncio.gather(*tasks)
    assert order == ["big", "small"]


async def test_a_request_for_more_slots_than_exist_gets_all_of_them() -> None:
    slots = Slots(2)
    await slots.take(1)
    big = asyncio.create_task(slots.take(5))
    await settle()
    assert not big.done()
    slots.give(1)
    await big
    small = asyncio.create_task(slots.take(1))
    await settle()
    assert not small.done()
    slots.give(5)
    await small


async def test_a_cancelled_wait_does_not_block_later_ones() -> None:
    slots = Slots(2)
    await slots.take(1)
    big, small = asyncio.create_task(slots.take(2)), asyncio.create_task(slots.take(1))
    await settle()
    big.cancel()
    await small
    with pytest.raises(asyncio.CancelledError):
        await big
    assert slots.num_taken == 2


async def test_slots_granted_to_a_cancelled_wait_are_returned() -> None:
    slots = Slots(1)
    await slots.take(1)
    late, next_one = asyncio.create_task(slots.take(1)), asyncio.create_task(slots.take(1))
    await settle()
    slots.give(1)  # `late` is granted its slot …
    late.cancel()  # … which is cancelled before it runs
    with pytest.raises(asyncio.CancelledError):
        await late
    await asyncio.wait_for(next_one, 1)
    slots.give(1)
    assert slots.num_taken == 0


async def test_no_slot_is_lost_by_cancellation() -> None:
    rng = random.Random(0)
    slots = Slots(7)
    most = 0

    async def use() -> None:
        nonlocal most
        num = rng.randint(1, 7)
        await slots.take(num)
        try:
            most = max(most, slots.num_taken)
            await asyncio.sleep(rng.random() / 1000)
        finally:
            slots.give(num)

    tasks = [asyncio.create_task(use()) for _ in range(400)]
    while not all(task.done() for task in tasks):
        rng.choice(tasks).cancel()
        await asyncio.sleep(0)
    assert slots.num_taken == 0
    assert 0 < most <= 7
    await asyncio.wait_for(slots.take(7), 1)
