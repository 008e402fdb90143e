"""A question collects one reply from each peer, until its deadline."""

import asyncio

from pipeline.stages.gateway.admin.pending_replies import ONLY_PEER, PendingReplies

LONG_S = 60.0


def accept(nonce: int, peer: int) -> bool:
    return True


def test_replies_of_all_peers_are_collected() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(LONG_S)
        sent: list[tuple[int, int]] = []
        nonce = pending.send(lambda nonce, peer: not sent.append((nonce, peer)), [2, 5])
        assert nonce is not None and sent == [(nonce, 2), (nonce, 5)] and len(pending) == 1
        waiter = asyncio.create_task(pending.collect(nonce))
        await asyncio.sleep(0)
        pending.handle(nonce, "two", 2)
        pending.handle(nonce, "two again", 2)
        pending.handle(nonce, "unexpected", 7)
        assert len(pending) == 1
        pending.handle(nonce, "five", 5)
        assert await waiter == ({2: "two", 5: "five"}, set()) and len(pending) == 0

    asyncio.run(scenario())


def test_each_question_has_its_own_nonce() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(LONG_S)
        first, second = pending.send(accept), pending.send(accept)
        assert first is not None and second is not None and first != second
        waiters = [asyncio.create_task(pending.collect(nonce)) for nonce in (first, second)]
        await asyncio.sleep(0)
        pending.handle(second, "second")
        pending.handle(first, "first")
        assert [await waiter for waiter in waiters] == [({ONLY_PEER: "first"}, set()), ({ONLY_PEER: "second"}, set())]

    asyncio.run(scenario())


def test_at_the_deadline_the_missing_peers_are_reported_and_the_question_is_dropped() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(0.01)
        nonce = pending.send(accept, [1, 2])
        assert nonce is not None
        pending.handle(nonce, "one", 1)
        assert await pending.collect(nonce) == ({1: "one"}, {2}) and len(pending) == 0
        pending.handle(nonce, "late", 2)
        assert len(pending) == 0

    asyncio.run(scenario())


def test_unanswered_questions_count_until_their_replies_arrive() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(0.01, counts_unanswered=True)
        nonce = pending.send(accept)
        assert nonce is not None
        assert await pending.collect(nonce) == ({}, {ONLY_PEER}) and len(pending) == 1
        pending.handle(nonce, "late")
        assert len(pending) == 0

    asyncio.run(scenario())


def test_a_full_edge_sends_no_further_and_awaits_nothing() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(LONG_S)
        peers: list[int] = []

        def send(nonce: int, peer: int) -> bool:
            peers.append(peer)
            return peer != 2

        assert pending.send(send, [1, 2, 3]) is None
        assert peers == [1, 2] and len(pending) == 0

    asyncio.run(scenario())


def test_a_cancelled_caller_drops_its_question() -> None:
    async def scenario() -> None:
        pending: PendingReplies[str] = PendingReplies(LONG_S)
        nonce = pending.send(accept)
        assert nonce is not None
        waiter = asyncio.create_task(pending.collect(nonce))
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        assert waiter.cancelled() and len(pending) == 0

    asyncio.run(scenario())
