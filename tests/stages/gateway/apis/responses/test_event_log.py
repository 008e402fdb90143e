"""The log of a background stream: it is read from any event on, in pieces, while it grows and after its end."""

import asyncio

from pipeline.stages.gateway.apis.responses.event_log import OBJECT_BYTES, READ_BYTES, EventLog


def event(number: int, size: int = 0) -> bytes:
    return b"event: e\ndata: %d%b\n\n" % (number, b"x" * size)


def test_it_is_read_from_any_event_on() -> None:
    log = EventLog()
    log.append(event(0) + event(1))
    log.append(b"")
    log.append(event(2))
    assert len(log) == 3 and log.num_bytes == sum(len(event(number)) + OBJECT_BYTES for number in range(3))
    assert log.read(0) == (event(0) + event(1) + event(2), 3)
    assert log.read(2) == (event(2), 3)
    assert log.read(3) == (b"", 3) and log.read(9) == (b"", 9)


def test_a_large_log_is_read_in_pieces() -> None:
    log = EventLog()
    log.append(b"".join(event(number, READ_BYTES // 2) for number in range(5)))
    first, sizes, whole = 0, [], b""
    while first < len(log):
        data, end = log.read(first)
        sizes.append(end - first)
        whole, first = whole + data, end
    assert sizes == [2, 2, 1] and whole == b"".join(event(number, READ_BYTES // 2) for number in range(5))


async def test_all_readers_wake_at_news_and_at_the_end() -> None:
    log = EventLog()
    readers = [asyncio.create_task(log.more(num_read)) for num_read in (0, 0, 1)]
    await asyncio.sleep(0)
    log.append(event(0))
    done, waiting = await asyncio.wait(readers, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert done == set(readers[:2])
    log.close()
    assert log.is_over
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
    await asyncio.wait_for(log.more(1), 10)


def test_a_large_event_is_not_copied_for_its_readers() -> None:
    log = EventLog()
    log.append(event(0, 10) + event(1, 10 * READ_BYTES) + event(2, 10))
    pieces, first = [], 0
    while first < len(log):
        data, first = log.read(first)
        pieces.append(data)
    assert pieces == [event(0, 10), event(1, 10 * READ_BYTES), event(2, 10)]
    assert log.read(1)[0] is log.read(1)[0]
