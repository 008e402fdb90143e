"""Orders to replace the whole server, which come to the thread of one of its models."""

import queue
from collections.abc import Callable

from pipeline.supervisor.restart.server_restart import Done, RestartOrder, ServerRestart

Call = Callable[[Callable[[], None]], None]
"""Has a function called in a model's thread."""


class RestartOrders:
    """Takes them to the manager's loop, and its answers back."""

    def __init__(self, restart: ServerRestart, wake: Callable[[], None]) -> None:
        """`wake` has the loop call `turn`."""
        self._restart = restart
        self._wake = wake
        self._orders: queue.SimpleQueue[tuple[RestartOrder, Call, Done]] = queue.SimpleQueue()

    def ask(self, order: RestartOrder, call: Call, done: Done) -> None:
        """Replace the server. Called in a model's thread, as is `done`."""
        self._orders.put((order, call, done))
        self._wake()

    def turn(self, memory_bytes: int, *, is_serving: bool) -> None:
        """Handle what has come."""
        while not self._orders.empty():
            self._handle(*self._orders.get(), memory_bytes, is_serving)

    def _handle(self, order: RestartOrder, call: Call, done: Done, memory_bytes: int, is_serving: bool) -> None:
        def answer(pid: int, problem: str) -> None:
            call(lambda: done(pid, problem))

        if is_serving:
            self._restart.ask(order, None, memory_bytes, answer)
        else:
            answer(0, "the server is starting or shutting down")
