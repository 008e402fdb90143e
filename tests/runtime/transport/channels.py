"""Inboxes and outboxes of one test."""

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import zmq

from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import Inbox, address_of
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


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    end = time.monotonic() + PATIENCE_S
    while len(messages) < count:
        assert time.monotonic() < end, f"{len(messages)} of {count} arrived"
        messages += inbox.wait_all(0.1)
    return messages
