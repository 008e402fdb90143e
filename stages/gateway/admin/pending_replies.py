"""Questions to other processes that wait for replies.

    send ──question with a nonce──► one or several peers ──reply with the nonce──► handle ──► collect

The owner of a PendingReplies defines the messages. `send` works without waiting, so a replayed gateway can repeat it.
"""

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

Reply = TypeVar("Reply")
ONLY_PEER = 0
"""The peer's number, for questions that go to one process."""


class _Question(Generic[Reply]):
    def __init__(self, peers: Iterable[int]) -> None:
        self.missing = set(peers)
        self.replies: dict[int, Reply] = {}
        self.is_complete = asyncio.Event()


class PendingReplies(Generic[Reply]):
    """Questions by nonce, with the replies that have arrived. With `counts_unanswered`, a question whose deadline has
    passed, or whose caller was cancelled, stays until its last reply arrives, so that `len` bounds what peers may still
    send; otherwise it is dropped."""

    def __init__(self, timeout_s: float, *, counts_unanswered: bool = False) -> None:
        self._timeout_s = timeout_s
        self._counts_unanswered = counts_unanswered
        self._nonces = itertools.count()
        self._questions: dict[int, _Question[Reply]] = {}

    def __len__(self) -> int:
        return len(self._questions)

    def send(self, send: Callable[[int, int], bool], peers: Iterable[int] = (ONLY_PEER,)) -> int | None:
        """Call `send(nonce, peer)` for each peer; it returns False if the edge to that peer is full. Returns the nonce
        for `collect`, or None if an edge is full: then no reply is awaited, though some peers may have been asked."""
        nonce, peers = next(self._nonces), tuple(peers)
        for peer in peers:
            if not send(nonce, peer):
                return None
        self._questions[nonce] = _Question(peers)
        return nonce

    @property
    def nonces(self) -> list[int]:
        """Of the questions that are not answered."""
        return list(self._questions)

    def lost(self, reply: Reply, peer: int) -> None:
        """A peer has died: this stands for its replies."""
        for nonce in self.nonces:
            self.handle(nonce, reply, peer)

    def handle(self, nonce: int, reply: Reply, peer: int = ONLY_PEER) -> None:
        """A reply has arrived. Late and repeated replies are ignored."""
        question = self._questions.get(nonce)
        if question is None or peer not in question.missing:
            return
        question.missing.discard(peer)
        question.replies[peer] = reply
        if not question.missing:
            del self._questions[nonce]
            question.is_complete.set()

    async def collect(self, nonce: int, timeout_s: float | None = None) -> tuple[dict[int, Reply], set[int]]:
        """Wait until all peers have replied, or the deadline has passed, which is `timeout_s` if that is given. Returns
        the replies by peer, and the peers that have not replied. Call it in the same turn of the event loop as
        `send`."""
        question = self._questions[nonce]
        try:
            async with asyncio.timeout(self._timeout_s if timeout_s is None else timeout_s):
                await question.is_complete.wait()
        except TimeoutError:
            pass
        finally:
            if not self._counts_unanswered:
                self._questions.pop(nonce, None)
        return question.replies, question.missing
