"""Inboxes and outboxes: bounds, incarnations, foreign users, and wakes that are never lost."""

import asyncio
import itertools
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import uvloop
import zmq

from pipeline.runtime import messages as m
from pipeline.runtime.transport.async_inbox import AsyncInbox
from pipeline.runtime.transport.inbox import INBOX_BOUND, Inbox, MessageDecoder, address_of
from pipeline.runtime.transport.outbox import Outbox

PATIENCE_S = 30.0
_numbers = itertools.count()


def until(condition: Callable[[], Any], timeout_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.001)


class Channels:
    """Inboxes and outboxes of one test, closed at its end."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.address = address_of(f"test-{os.getpid()}-{next(_numbers)}", "stage.0", 1)
        self._open: list[Inbox[Any] | Outbox[Any]] = []

    def inbox(self, address: str = "") -> Inbox[Any]:
        inbox: Inbox[Any] = Inbox(self.context, address or self.address, m.DetokenizeInbox)
        self._open.append(inbox)
        return inbox

    def outbox(
        self, sender: str = "peer.0", incarnation: int = 1, bound: int = 10_000, address: str = ""
    ) -> Outbox[Any]:
        outbox: Outbox[Any] = Outbox(self.context, address or self.address, m.Envelope(sender, incarnation), bound)
        self._open.append(outbox)
        return outbox

    def close(self) -> None:
        for end in self._open:
            end.close()
        self.context.term()


@pytest.fixture
def channels():
    channels = Channels()
    yield channels
    channels.close()


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    end = time.monotonic() + PATIENCE_S
    while len(messages) < count:
        assert time.monotonic() < end, f"{len(messages)} of {count} arrived"
        messages += inbox.wait_all(0.1)
    return messages


def test_messages_of_one_sender_arrive_in_order(channels):
    inbox = channels.inbox()
    outbox = channels.outbox()
    for nonce in range(3000):
        assert outbox.send(m.Ping(nonce))
    assert receive(inbox, 3000) == [m.Ping(nonce) for nonce in range(3000)]
    assert (outbox.num_sent, inbox.num_received, inbox.last_sender) == (3000, 3000, "peer.0")


def test_an_outbox_can_send_before_the_peer_listens(channels):
    outbox = channels.outbox()
    assert outbox.send(m.Ping(1))
    inbox = channels.inbox()
    assert receive(inbox, 1) == [m.Ping(1)]


def test_a_full_edge_without_a_receiver_refuses_without_blocking(channels):
    outbox = channels.outbox(bound=10)
    begin = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    results = [outbox.send(m.Ping(nonce)) for nonce in range(1000)]
    num_waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - begin
    assert num_waits < 100, "this thread yielded the CPU on each refusal"
    assert results == [True] * 10 + [False] * 990
    assert outbox.num_refused == 990


def test_a_receiver_that_hangs_fills_the_edge_and_no_accepted_message_is_lost(channels):
    """Its I/O thread keeps reading; without a bound on that side, it would accept messages forever."""
    inbox = channels.inbox()
    outbox = channels.outbox(bound=10)
    options = m.GenerationOptions(stop=["x" * 10_000])
    opening = m.Open(1, 2, 0, 0, 0, b"", msgspec.Raw(msgspec.msgpack.encode(options)))
    num_sent = 0
    refused_since = time.monotonic()
    while time.monotonic() - refused_since < 0.3:
        if outbox.send(opening):
            num_sent += 1
            refused_since = time.monotonic()
        else:
            time.sleep(0.001)
        assert num_sent < 10 * INBOX_BOUND, "the edge has no bound"
    assert len(receive(inbox, num_sent)) == num_sent
    assert not inbox.wait(0.1)
    until(lambda: outbox.send(opening))


def test_room_that_the_peer_has_made_is_noticed_at_once(channels, monkeypatch):
    """libzmq looks for it once in a while, and refuses messages meanwhile."""

    class LookingSeldom:
        """A socket that notices room only when it is asked for events."""

        def __init__(self, socket: Any) -> None:
            self._socket, self._has_looked = socket, False

        def get(self, option: int) -> Any:
            self._has_looked = True
            return self._socket.get(option)

        def send_multipart(self, parts: Any, flags: int) -> None:
            if not self._has_looked:
                raise zmq.Again
            self._has_looked = False
            self._socket.send_multipart(parts, flags)

        def close(self) -> None:
            self._socket.close()

    inbox, outbox = channels.inbox(), channels.outbox(bound=10)
    monkeypatch.setattr(outbox, "_socket", LookingSeldom(outbox._socket))
    assert all(outbox.send(m.Ping(nonce)) for nonce in range(5))
    assert receive(inbox, 5) == [m.Ping(nonce) for nonce in range(5)]
    assert outbox.num_refused == 0


def test_messages_of_a_successor_wait_until_its_predecessor_is_known_to_be_dead(channels):
    inbox = channels.inbox()
    old, new = channels.outbox(incarnation=1), channels.outbox(incarnation=2)
    newest = channels.outbox(incarnation=3)
    other = channels.outbox(sender="other.0", incarnation=1)
    assert old.send(m.Ping(1))
    assert receive(inbox, 1) == [m.Ping(1)]
    assert newest.send(m.Ping(30))
    assert new.send(m.Ping(20))
    assert new.send(m.Ping(21))
    assert other.send(m.Ping(9))
    assert receive(inbox, 1) == [m.Ping(9)]
    until(lambda: not inbox.wait_all(0.01) and inbox.num_early == 3)
    inbox.replaced("peer.0", 2)
    assert receive(inbox, 2) == [m.Ping(20), m.Ping(21)]
    assert old.send(m.Ping(2))
    assert new.send(m.Ping(22))
    assert receive(inbox, 1) == [m.Ping(22)]
    until(lambda: not inbox.wait_all(0.01) and inbox.num_stale == 1)
    inbox.replaced("peer.0", 3)
    assert receive(inbox, 1) == [m.Ping(30)]


def test_messages_of_a_process_that_replaces_none_yet_can_be_read_and_dropped(channels):
    inbox = channels.inbox()
    old, new = channels.outbox(incarnation=1), channels.outbox(incarnation=2)
    assert old.send(m.Ping(1)) and receive(inbox, 1) == [m.Ping(1)]
    assert new.send(m.Ping(20))
    until(lambda: not inbox.wait_all(0.01) and inbox.early_of("peer.0") == [m.Ping(20)])
    assert old.send(m.Ping(2)) and receive(inbox, 1) == [m.Ping(2)], "the process before is still heard"
    inbox.drop_early("peer.0")
    assert inbox.early_of("peer.0") == []
    inbox.replaced("peer.0", 3)
    assert not inbox.wait_all(0.01)


def test_an_outbox_that_reconnects_sends_to_the_new_address_only(channels):
    address = channels.address + "-2"
    first, second = channels.inbox(), channels.inbox(address)
    outbox = channels.outbox()
    assert outbox.send(m.Ping(1))
    assert receive(first, 1) == [m.Ping(1)]
    outbox.reconnect(address)
    for nonce in range(100):
        assert outbox.send(m.Ping(nonce))
    assert receive(second, 100) == [m.Ping(nonce) for nonce in range(100)]
    assert not first.has_message()


def test_a_message_of_another_type_is_an_error(channels):
    inbox = channels.inbox()
    channels.outbox().send(m.Drained())
    assert inbox.wait(PATIENCE_S)
    with pytest.raises(msgspec.DecodeError, match="drained"):
        inbox.receive()


CONNECT_AS_USER = """
import os, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setuid(int(sys.argv[4]))
context = zmq.Context()
socket = context.socket(zmq.PUSH)
monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send_multipart((bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])), zmq.NOBLOCK)
while True:
    assert monitor.poll(20000), "nothing happened"
    event = recv_monitor_message(monitor)["event"]
    if event == zmq.EVENT_DISCONNECTED:
        print("refused")
        socket.close(linger=0)
        break
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        print("accepted")
        break
socket.close(linger=5000)
context.destroy(linger=5000)
"""


def connect_as(address: str, user: int) -> str:
    head = msgspec.msgpack.encode(m.Envelope("peer.0", 1)).hex()
    body = msgspec.msgpack.encode(m.Ping(666)).hex()
    # It changes its user after the imports, as another user may not be able to read this interpreter's folders.
    done = subprocess.run(
        [sys.executable, "-c", CONNECT_AS_USER, address, head, body, str(user)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_this_user_is_accepted(channels):
    inbox = channels.inbox()
    assert connect_as(channels.address, os.geteuid()) == "accepted"
    assert receive(inbox, 1) == [m.Ping(666)]


def test_other_users_are_rejected(channels, monkeypatch):
    """Without root, the roles are reversed: an inbox that expects another user rejects this one."""
    user = 65534
    if os.geteuid() != 0:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    inbox = channels.inbox()
    assert connect_as(channels.address, user) == "refused"
    assert not inbox.wait(0.1)


def test_two_inboxes_cannot_have_one_address(channels):
    channels.inbox()
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        channels.inbox()


def burst_sender(address: str, num_bursts: int, done: threading.Event) -> None:
    """Bursts of varying size, with pauses of about the duration of a receiver's wake."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox: Outbox[Any] = Outbox(context, address, m.Envelope("peer.0", 1), 100_000)
    nonce = 0
    for burst in range(num_bursts):
        for _ in range((burst * 7919) % 40 + 1):
            while not outbox.send(m.Ping(nonce)):
                time.sleep(0.0001)
            nonce += 1
        if burst % 3 == 0:
            done.wait(0.0001 * (burst % 5))
    done.wait(PATIENCE_S)
    outbox.close()
    context.term()


@pytest.mark.parametrize("limit", [1, 7, 256])
def test_an_async_inbox_never_misses_a_wake(channels, limit):
    num_bursts = 600
    expected = sum((burst * 7919) % 40 + 1 for burst in range(num_bursts))

    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        # Sends on this thread between receives can make edge-triggered descriptors lose a wake.
        echo = channels.inbox(channels.address + "-echo")
        answers = channels.outbox(bound=100_000, address=channels.address + "-echo")
        done = threading.Event()
        thread = threading.Thread(target=burst_sender, args=(channels.address, num_bursts, done))
        thread.start()
        received = []
        while len(received) < expected:
            messages = await asyncio.wait_for(inbox.receive_all(limit), PATIENCE_S)
            assert 1 <= len(messages) <= limit
            received += [message.nonce for message in messages]
            for message in messages:
                answers.send(message)
            echo.receive_all()
        done.set()
        thread.join(PATIENCE_S)
        inbox.close()
        return received

    assert uvloop.run(main()) == list(range(expected))


def test_an_async_inbox_that_handles_messages_in_the_callback_never_misses_a_wake(channels):
    num_bursts = 600
    expected = sum((burst * 7919) % 40 + 1 for burst in range(num_bursts))

    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        done = threading.Event()
        thread = threading.Thread(target=burst_sender, args=(channels.address, num_bursts, done))
        thread.start()
        received = []

        def handle(messages):
            received.extend(message.nonce for message in messages)
            return len(received) < expected

        await asyncio.wait_for(inbox.handle_all(handle), PATIENCE_S)
        done.set()
        thread.join(PATIENCE_S)
        inbox.close()
        return received

    assert uvloop.run(main()) == list(range(expected))


def test_an_error_of_a_handler_ends_the_wait_for_messages(channels):
    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        assert channels.outbox().send(m.Ping(1))

        def handle(messages):
            raise ValueError(f"{len(messages)} messages")

        try:
            await asyncio.wait_for(inbox.handle_all(handle), PATIENCE_S)
        finally:
            inbox.close()

    with pytest.raises(ValueError, match="1 messages"):
        uvloop.run(main())


def test_an_async_inbox_lets_other_tasks_run_under_load(channels):
    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        outbox = channels.outbox()
        for nonce in range(1000):
            assert outbox.send(m.Ping(nonce))
        turns = 0

        async def other():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        received = 0
        num_wakes = 0
        async with asyncio.timeout(PATIENCE_S):
            while received < 1000:
                received += len(await inbox.receive_all(10))
                num_wakes += 1
                assert turns >= num_wakes
        task.cancel()
        inbox.close()

    uvloop.run(main())


def test_a_waiting_message_does_not_make_the_loop_spin(channels):
    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        outbox = channels.outbox()
        assert outbox.send(m.Ping(0))
        assert await asyncio.wait_for(inbox.receive_all(), PATIENCE_S) == [m.Ping(0)]
        assert outbox.send(m.Ping(1))
        assert outbox.send(m.Ping(2))
        begin = time.thread_time()
        await asyncio.sleep(0.5)  # the receiver is busy
        assert time.thread_time() - begin < 0.05
        assert await asyncio.wait_for(inbox.receive_all(), PATIENCE_S) == [m.Ping(1), m.Ping(2)]
        inbox.close()

    uvloop.run(main())


def test_a_cancelled_receive_loses_nothing(channels):
    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        outbox = channels.outbox()
        received: list[Any] = []
        for nonce in range(200):
            task = asyncio.create_task(inbox.receive_all())
            for _ in range(nonce % 4):
                await asyncio.sleep(0)
            assert outbox.send(m.Ping(nonce))
            await asyncio.sleep(0.0002 * (nonce % 3))
            task.cancel()
            try:
                received += await task
            except asyncio.CancelledError:
                continue
        while len(received) < 200:
            received += await asyncio.wait_for(inbox.receive_all(), PATIENCE_S)
        assert [message.nonce for message in received] == list(range(200))
        inbox.close()

    uvloop.run(main())


@pytest.mark.parametrize("data", [b"", b"\xa1\xff", b"\x91" * 5000, b"\xc1", b"\x92\xa1\xff\x00"])
def test_a_decoder_raises_only_decode_errors(data):
    for what in (str, list[Any], m.DetokenizeInbox):
        if what is msgspec.Raw and data in (b"\xa1\xff", b"\x92\xa1\xff\x00"):
            assert MessageDecoder[Any](what).decode(data) == data  # undecoded, so not validated
            continue
        with pytest.raises(msgspec.DecodeError):
            MessageDecoder[Any](what).decode(data)
