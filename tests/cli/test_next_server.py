"""`pipeline restart --stop-first` waits for a server that may end before it serves."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.cli.restart import server
from pipeline.errors import UserError


class EndingAdmin:
    """A server that ends while it is asked."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Any:
        def stats() -> SimpleNamespace:
            raise UserError(f"server {self.name} has ended without an answer")

        return SimpleNamespace(stats=stats)

    def __exit__(self, *_: object) -> None:
        pass


def test_a_next_server_that_ends_while_it_is_asked_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = 2**22 + 1  # above the kernel's largest pid
    monkeypatch.setattr(server, "Admin", EndingAdmin)
    monkeypatch.setattr(server, "find_servers", lambda: [f"{gone}-next"])
    monkeypatch.setattr(server, "pid_of", lambda name: gone)
    with pytest.raises(UserError, match=r"did not start, so there is none now: its log says why"):
        server._wait_for_next(f"{gone}-first", time.monotonic() + 60.0)
