"""Edges through shared memory: messages of any size arrive in order and wake the receiver."""

import itertools
import os
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from pipeline.runtime import messages as m
from pipeline.runtime.transport import inbox as channels
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.outbox import Outbox
from pipeline.runtime.transport.ring_edge import RingEdge
from pipeline.shm.ring import POSITION_BYTES, RingReader, RingWriter

NUM_BYTES, RESERVED_BYTES = 4096, 512
PATIENCE_S = 30.0
_numbers = itertools.count()


class Edge:
    """An inbox, an outbox to it through a ring, and one without."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        data, position = memoryview(bytearray(NUM_BYTES)), memoryview(bytearray(POSITION_BYTES))
        envelope = m.Envelope("schedule.0", 1)
        address = address_of(f"test-{os.getpid()}-{next(_numbers)}", "stage.0", 1)
        rings = [RingEdge(envelope, RingReader(data, position, self.event_fd))]
        self.inbox: Inbox[Any] = Inbox(self.context, address, m.DetokenizeInbox, rings=rings)
        ring = RingWriter(data, position, self.event_fd, RESERVED_BYTES)
        self.outbox: Outbox[Any] = Outbox(self.context, address, envelope, 100, ring)
        self.other: Outbox[Any] = Outbox(self.context, address, m.Envelope("supervisor.0", 1), 100)

    def close(self) -> None:
        for end in (self.inbox, self.outbox, self.other):
            end.close()
        self.context.term()
        os.close(self.event_fd)

    def receive(self, count: int) -> list[Any]:
        messages: list[Any] = []
        end = time.monotonic() + PATIENCE_S
        while len(messages) < count:
            assert time.monotonic() < end, f"only {len(messages)} of {count} messages arrived"
            messages += self.inbox.wait_all(0.1)
        return messages


@pytest.fixture
def edge(monkeypatch: pytest.MonkeyPatch) -> Iterator[Edge]:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    edge = Edge()
    yield edge
    edge.close()


def refuse(number: int, size: int = 0) -> m.Reject:
    return m.Reject(number, 1, 0, m.Failure(400, "x" * size))


def test_messages_of_any_size_arrive_in_order(edge: Edge) -> None:
    """Messages larger than the ring travel through the socket, and keep their place."""
    sizes = [random.Random(number).choice((0, 10, 900, NUM_BYTES, 3 * NUM_BYTES)) for number in range(200)]
    received: list[Any] = []
    end = time.monotonic() + PATIENCE_S
    for number, size in enumerate(sizes):
        # A refused message may find everything received already: ZeroMQ counts messages until its own thread is done.
        while not edge.outbox.send(refuse(number, size)):
            assert time.monotonic() < end, f"message {number} of {size} bytes is refused"
            received += edge.inbox.wait_all(0.01)
    received += edge.receive(len(sizes) - len(received))
    assert [(one.request_id, len(one.failure.message)) for one in received] == list(enumerate(sizes))
    assert edge.inbox.last_sender == "schedule.0" and edge.inbox.num_received == len(sizes)


def test_after_a_wake_the_receiver_looks_for_the_message_without_sleeping(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "AWAKE_S", PATIENCE_S)
    num_looks, look = 0, edge.inbox._look

    def look_three_times() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 3:
            assert edge.outbox.send(refuse(1))
        look()

    monkeypatch.setattr(edge.inbox, "_look", look_three_times)
    edge.outbox.wake()
    assert [one.request_id for one in edge.inbox.wait_all(PATIENCE_S)] == [1]
    assert num_looks == 3


@pytest.mark.parametrize("cores", [{3}, {3, 7}])
def test_a_receiver_is_woken_early_only_if_it_does_not_share_the_sender_s_core(
    cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "AWAKE_S", 0.05)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    edge, num_looks = Edge(), 0

    def look() -> None:
        nonlocal num_looks
        num_looks += 1

    monkeypatch.setattr(edge.inbox, "_look", look)
    edge.outbox.wake()
    assert not edge.inbox.wait(0)
    assert bool(num_looks) == (len(cores) > 1)
    edge.close()


def test_a_wake_without_a_message_does_not_end_the_wait(edge: Edge) -> None:
    edge.outbox.wake()
    assert not edge.inbox.wait(0.02) and edge.inbox.wait_s >= 0.02
    assert edge.outbox.send(refuse(1))
    assert [one.request_id for one in edge.receive(1)] == [1]


def test_an_outbox_without_a_ring_does_not_wake_its_peer(edge: Edge) -> None:
    edge.other.wake()
    assert not edge.inbox.wait(0)


def test_a_large_message_does_not_overtake_those_in_the_ring(edge: Edge) -> None:
    assert edge.outbox.send(refuse(1)) and edge.outbox.send(refuse(2, 2 * NUM_BYTES)) and edge.outbox.send(refuse(3))
    assert edge.other.send(m.Ping(9))
    messages = edge.receive(4)
    assert [one.request_id for one in messages if isinstance(one, m.Reject)] == [1, 2, 3]
    assert m.Ping(9) in messages


def test_messages_sent_together_keep_their_places_whether_they_fit_or_not(edge: Edge) -> None:
    """Those of one call go through the ring, or all through the socket."""
    for first, sizes in ((0, (0, 10)), (3, (900, 2 * NUM_BYTES, 0)), (7, (5, 900))):
        assert edge.outbox.send_all([refuse(first + i, size) for i, size in enumerate(sizes)])
        assert edge.outbox.send(refuse(first + len(sizes)))
    assert [one.request_id for one in edge.receive(10)] == list(range(10))
    assert edge.outbox.num_sent == edge.inbox.num_received == 10


def test_of_messages_sent_together_a_full_edge_takes_none(edge: Edge) -> None:
    num_sent = 0
    while edge.outbox.send_all([refuse(num_sent, 500), refuse(num_sent + 1, 500)]):
        num_sent += 2
        assert num_sent < 1000
    assert [one.request_id for one in edge.receive(num_sent)] == list(range(num_sent))
    assert edge.outbox.send_all([refuse(0)])


def test_a_full_ring_refuses_messages_until_the_receiver_reads(edge: Edge) -> None:
    """What does not fit goes through the socket while it can be announced."""
    num_sent = 0
    while edge.outbox.send(refuse(num_sent, 500)):
        num_sent += 1
        assert num_sent < 1000
    assert num_sent >= NUM_BYTES // 600 + RESERVED_BYTES // 8 and edge.outbox.num_refused == 1
    assert [one.request_id for one in edge.receive(num_sent)] == list(range(num_sent))
    assert edge.outbox.send(refuse(0))


def test_a_message_in_the_ring_wakes_the_receiver(edge: Edge) -> None:
    assert not edge.inbox.wait(0)
    threading.Timer(0.05, lambda: edge.outbox.send(refuse(7))).start()
    assert edge.inbox.wait(PATIENCE_S)
    assert [one.request_id for one in edge.inbox.receive_all()] == [7]


def test_a_wait_ends_at_its_timeout_without_using_the_processor(edge: Edge) -> None:
    """Even while an announced message is still on its way."""
    edge.outbox._ring.announce()  # type: ignore[union-attr]
    assert edge.outbox.send(refuse(1))
    assert edge.inbox.receive_all() == []
    begun_s, begun_cpu_s = time.monotonic(), time.thread_time()
    assert not edge.inbox.wait(0.3)
    assert time.monotonic() - begun_s >= 0.29 and time.thread_time() - begun_cpu_s < 0.1
    assert edge.inbox.receive_all() == []


def test_a_message_without_a_wake_is_received_when_another_sender_wakes(edge: Edge) -> None:
    event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    data, position = memoryview(bytearray(NUM_BYTES)), memoryview(bytearray(POSITION_BYTES))
    address, envelope = address_of(f"test-{os.getpid()}-{next(_numbers)}", "stage.0", 1), m.Envelope("gateway.0", 1)
    quiet = Outbox[Any](edge.context, address, envelope, 100, RingWriter(data, position, event_fd, RESERVED_BYTES))
    edge.inbox.replaced("gateway.0", 1, RingEdge(envelope, RingReader(data, position, event_fd)))
    try:
        assert quiet.send_all([refuse(1), refuse(2)], wakes=False)
        assert not edge.inbox.wait(0.05), "it sleeps on"
        assert edge.outbox.send(refuse(3))
        assert sorted(one.request_id for one in edge.receive(3)) == [1, 2, 3]
        quiet.notify()
        assert not edge.inbox.wait(0.05), "it has received them"
        assert quiet.send_all([refuse(4)], wakes=False)
        quiet.notify()
        assert [one.request_id for one in edge.receive(1)] == [4]
    finally:
        quiet.close()
        os.close(event_fd)
