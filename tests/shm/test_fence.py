"""Where memory shared with other processes may be polled."""

import platform
import threading

import pytest

from pipeline.shm.fence import Fence, is_known


@pytest.mark.parametrize(
    ("machine", "known"), [("x86_64", True), ("aarch64", True), ("riscv64", False), ("ppc64le", False)]
)
def test_only_machines_whose_order_is_known(machine: str, known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert is_known() is known
    assert is_known("x86_64")


def test_a_fence_releases_a_lock_and_then_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order the two are a full barrier on aarch64; taken and then released, they are not."""
    calls: list[str] = []

    class Recorded:
        def acquire(self) -> None:
            calls.append("take")

        def release(self) -> None:
            calls.append("release")

    monkeypatch.setattr("pipeline.shm.fence.Lock", Recorded)
    fence = Fence()
    assert calls == ["take"]
    fence()
    assert calls[1:] == ["release", "take"]


def test_a_fence_can_be_called_again_and_by_other_threads() -> None:
    fence = Fence()
    done = threading.Thread(target=lambda: [fence() for _ in range(3)], daemon=True)
    done.start()
    done.join(30)
    assert not done.is_alive()
