"""An inbox in an event loop: wakes that are never lost, other tasks, and handlers that fail."""

import asyncio
import threading
import time
from typing import Any

import pytest
import uvloop
import zmq

from pipeline.runtime import messages as m
from pipeline.runtime.transport.async_inbox import AsyncInbox
from pipeline.runtime.transport.outbox import Outbox
from tests.runtime.transport.channels import PATIENCE_S


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


def test_a_wake_without_a_message_is_no_turn(channels):
    async def main():
        channel = channels.inbox()
        inbox: AsyncInbox[Any] = AsyncInbox(channel)
        outbox = channels.outbox()
        turns: list[list[int]] = []

        def handle(messages):
            turns.append([message.nonce for message in messages])
            return len(turns) < 2

        handled = asyncio.create_task(inbox.handle_all(handle))
        assert outbox.send(m.Ping(1))
        async with asyncio.timeout(PATIENCE_S):
            while not turns:
                await asyncio.sleep(0)
            channel._may_have_message = True  # as a descriptor that is readable although what came is no message
            inbox._handle_ready()
            assert outbox.send(m.Ping(2))
            await handled
        inbox.close()
        return turns

    assert uvloop.run(main()) == [[1], [2]]


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


def test_an_error_of_further_work_ends_the_wait_for_messages(channels):
    async def main():
        inbox: AsyncInbox[Any] = AsyncInbox(channels.inbox())
        assert channels.outbox().send(m.Ping(1))

        def fail():
            raise ValueError("in another turn of the loop")

        def handle(messages):
            asyncio.get_running_loop().call_soon(inbox.run, fail)
            return True

        try:
            await asyncio.wait_for(inbox.handle_all(handle), PATIENCE_S)
        finally:
            inbox.close()

    with pytest.raises(ValueError, match="another turn"):
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
