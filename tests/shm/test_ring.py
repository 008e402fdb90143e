"""A ring hands messages on whole, once and in order, whatever their sizes, and says when it is full."""

import os
import random
import select
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shm import segment
from pipeline.shm.ring import POSITION_BYTES, PUBLISHED_BYTES, RingReader, RingWriter

RESERVED_BYTES = 512


class Ends(NamedTuple):
    writer: RingWriter
    reader: RingReader


@pytest.fixture
def event_fd() -> Iterator[int]:
    fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


def ends(event_fd: int, num_bytes: int = 1024) -> Ends:
    data, position = memoryview(bytearray(num_bytes + PUBLISHED_BYTES)), memoryview(bytearray(POSITION_BYTES))
    return Ends(RingWriter(data, position, event_fd, RESERVED_BYTES), RingReader(data.toreadonly(), position, event_fd))


def test_messages_come_whole_and_in_order(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    assert not reader.count() and reader.take() is None
    assert writer.put(b"one") and writer.put(b"") and writer.put(b"x" * 100)
    assert [reader.take() for _ in range(4)] == [(b"one", False), (b"", False), (b"x" * 100, False), None]


def test_a_wake_makes_the_descriptor_readable_and_is_no_message(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    for _ in range(3):
        writer.wake()
    assert select.select([reader], [], [], 0) == ([reader], [], [])
    assert reader.count() == 0 and reader.was_woken and reader.take() is None
    assert select.select([reader], [], [], 0) == ([], [], [])
    writer.wake()
    assert writer.put(b"one")
    assert reader.count() == 1 and not reader.was_woken
    assert reader.take() == (b"one", False)


def test_messages_without_a_wake_are_seen_with_the_next_that_wakes(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    assert writer.put(b"one", wakes=False) and writer.put(b"two", wakes=False)
    assert select.select([reader], [], [], 0) == ([], [], []) and reader.take() is None
    writer.notify()
    assert [reader.take() for _ in range(3)] == [(b"one", False), (b"two", False), None]
    assert writer.put(b"three", wakes=False) and writer.put(b"four")
    assert [reader.take() for _ in range(3)] == [(b"three", False), (b"four", False), None]
    assert writer.put(b"five", wakes=False)
    writer.announce()
    assert [reader.take() for _ in range(3)] == [(b"five", False), (b"", True), None]
    writer.notify()
    assert select.select([reader], [], [], 0) == ([], [], []), "the receiver knows all"


def test_a_full_ring_takes_no_more_until_something_is_read(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    largest = 1024 - RESERVED_BYTES - 8
    assert not writer.put(b"x" * (largest + 1))
    assert writer.put(b"x" * largest)
    assert not writer.put(b"")
    assert reader.take() == (b"x" * largest, False)
    assert writer.put(b"y")
    assert reader.take() == (b"y", False)


def test_what_is_too_large_can_be_announced_while_the_ring_is_full(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    assert writer.put(b"x" * (1024 - RESERVED_BYTES - 8))
    announced = 0
    while writer.can_announce():
        writer.announce()
        announced += 1
    assert announced == RESERVED_BYTES // 8
    assert reader.take() == (b"x" * (1024 - RESERVED_BYTES - 8), False)
    assert [reader.take() for _ in range(announced + 1)] == [(b"", True)] * announced + [None]


@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=60), st.integers(66, 130))
def test_any_sizes_in_any_turns(steps: list[tuple[int, bool]], num_words: int) -> None:
    """Messages cross the end of the memory at every place."""
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        writer, reader = ends(fd, 8 * num_words)
        waiting: list[bytes] = []
        for number, (size, takes) in enumerate(steps):
            body = random.Random(number).randbytes(size)
            if writer.put(body):
                waiting.append(body)
            if takes:
                found = reader.take()
                assert (None if found is None else found.data) == (waiting.pop(0) if waiting else None)
        assert [reader.take() for _ in waiting] == [(body, False) for body in waiting]
        assert reader.take() is None
    finally:
        os.close(fd)


def test_accesses_that_no_system_call_orders_are_fenced(event_fd: int) -> None:
    """A CPU may not free bytes before they are read, nor write bytes before it knows that they are free."""
    data, position = memoryview(bytearray(1024 + PUBLISHED_BYTES)), memoryview(bytearray(POSITION_BYTES))
    writer = RingWriter(data, position, event_fd, RESERVED_BYTES)
    reader = RingReader(data.toreadonly(), position, event_fd)
    at_fences: list[tuple[bytes, int]] = []
    for end in (writer, reader):
        end._fence = lambda: at_fences.append((bytes(data[8:11]), position.cast("Q")[0]))  # type: ignore[assignment]
    assert writer.put(b"one") and at_fences == [(bytes(3), 0)]
    assert reader.take() == (b"one", False) and at_fences[1:] == [(b"one", 0)]
    assert position.cast("Q")[0] == 16


def test_a_message_without_a_wake_is_fenced_from_its_number(event_fd: int) -> None:
    """A receiver that sees how many there are sees all of them."""
    data, position = memoryview(bytearray(1024 + PUBLISHED_BYTES)), memoryview(bytearray(POSITION_BYTES))
    writer = RingWriter(data, position, event_fd, RESERVED_BYTES)
    reader = RingReader(data.toreadonly(), position, event_fd)
    at_fences: list[tuple[bytes, int]] = []
    for end in (writer, reader):
        end._fence = lambda: at_fences.append((bytes(data[8:11]), data[-8]))  # type: ignore[assignment]
    assert writer.put(b"one", wakes=False) and at_fences == [(bytes(3), 0), (b"one", 0)]
    reader.look()
    assert at_fences[2:] == [(b"one", 1)] and reader.num_waiting == 1


def test_a_receiver_that_looks_sees_messages_without_a_wake_once(event_fd: int) -> None:
    writer, reader = ends(event_fd)
    assert writer.put(b"one") and writer.put(b"two", wakes=False) and writer.put(b"three", wakes=False)
    reader.look()
    reader.look()
    assert [reader.take() for _ in range(4)] == [(b"one", False), (b"two", False), (b"three", False), None]
    writer.notify()
    assert select.select([reader], [], [], 0) == ([], [], []), "it has taken all of them"
    assert writer.put(b"four", wakes=False)
    reader.look()
    writer.notify()
    assert reader.count() == 1, "though the eventfd has counted three"
    assert writer.put(b"five")
    assert [reader.take() for _ in range(3)] == [(b"four", False), (b"five", False), None]


@given(st.lists(st.sampled_from(["put", "quiet", "notify", "look", "count", "take", "wake"]), max_size=80))
def test_any_order_of_quiet_messages_and_looks(steps: list[str]) -> None:
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        writer, reader = ends(fd, 8192)
        waiting: list[bytes] = []
        num_quiet = 0
        """Of the newest, which the receiver sees only if it looks."""
        for number, step in enumerate(steps):
            body = str(number).encode()
            if step in ("put", "quiet"):
                assert writer.put(body, wakes=step == "put")
                waiting.append(body)
                num_quiet = num_quiet + 1 if step == "quiet" else 0
            elif step in ("notify", "wake"):
                getattr(writer, step)()
                num_quiet = 0 if step == "notify" else num_quiet
            elif step == "look":
                reader.look()
                num_quiet = 0
                assert reader.num_waiting <= len(waiting)
            elif step == "count":
                assert len(waiting) - num_quiet <= reader.count() <= len(waiting)
            elif (found := reader.take()) is not None:
                assert found.data == waiting.pop(0)
                num_quiet = min(num_quiet, len(waiting))
            else:
                assert len(waiting) == num_quiet
        reader.look()
        assert [reader.take() for _ in range(len(waiting) + 1)] == [*((body, False) for body in waiting), None]
    finally:
        os.close(fd)


def test_two_processes(event_fd: int) -> None:
    """The reader sleeps until the writer wakes it, and finds each message as it was put."""
    num_messages, num_bytes = 2000, 4096
    fds = [segment.create(name, num_bytes, "test") for name in ("data", "position")]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            views = [segment.attach(fd, num_bytes, writable=fd == fds[0]) for fd in fds]
            writer = RingWriter(views[0], views[1], event_fd, RESERVED_BYTES)
            for number in range(num_messages):
                body = random.Random(number).randbytes(number % 1500)
                while not writer.put(body):
                    os.sched_yield()
            status = 0
        finally:
            os._exit(status)
    views = [segment.attach(fd, num_bytes, writable=fd == fds[1]) for fd in fds]
    reader = RingReader(views[0], views[1], event_fd)
    import select

    poller = select.poll()
    poller.register(reader.fileno(), select.POLLIN)
    for number in range(num_messages):
        while not reader.count():
            assert poller.poll(60_000), "the writer stopped"
        message = reader.take()
        assert message is not None and message.data == random.Random(number).randbytes(number % 1500)
    assert os.waitpid(child, 0)[1] == 0
    for fd in fds:
        os.close(fd)
