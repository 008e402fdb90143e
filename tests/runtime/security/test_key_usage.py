"""What API keys have used: counters that outlive a gateway, and the window of the limits."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.metrics.stats import KeyUsage
from pipeline.runtime.security import key_usage
from pipeline.runtime.security.key_usage import WINDOW_S, UsageMemory


@pytest.fixture
def fd() -> Iterator[int]:
    fd = key_usage.create()
    yield fd
    os.close(fd)


def used(memory: UsageMemory, slot: int, now_s: float) -> tuple[int, int]:
    window = memory.window(slot, now_s)
    return window.requests, window.tokens


def test_the_successor_of_a_gateway_goes_on_with_its_counters(fd: int) -> None:
    first = UsageMemory(fd, 3)
    first.count(7, 0, 2)
    first.count(7, 3, 100)
    del first  # it dies
    UsageMemory(fd, 3).count(7, 3, 5)
    UsageMemory(fd, 0).count(7, 0, 1)
    assert UsageMemory(fd).usage({"a": 7, "b": 8}) == [
        KeyUsage("a", num_requests=3, num_output_tokens=105),
        KeyUsage("b"),
    ]


def test_nothing_is_used_before_a_gateway_has_begun(fd: int) -> None:
    assert UsageMemory(fd).usage({"a": 0}) == [KeyUsage("a")]


def test_only_what_was_touched_takes_memory(fd: int) -> None:
    memory = UsageMemory(fd, 0)
    for slot in range(100):
        memory.count(slot, 0)
        memory.window(slot, 5.0)
    memory.usage({str(slot): slot for slot in range(100)})
    assert os.fstat(fd).st_blocks * 512 < 100 * 4096


def test_all_gateways_share_one_window(fd: int) -> None:
    one, other = UsageMemory(fd, 0), UsageMemory(fd, 1)
    one.add(0, 100.5, requests=2, tokens=50)
    other.add(0, 101.0, requests=1, tokens=5)
    assert used(one, 0, 101.0) == used(other, 0, 159.9) == (3, 55)
    assert used(one, 0, 160.0) == (1, 5)
    assert used(one, 0, 161.0) == (0, 0)


def test_how_long_to_wait(fd: int) -> None:
    memory = UsageMemory(fd, 0)
    for second in (10, 20, 30):
        memory.add(0, second, requests=1, tokens=100)
    window = memory.window(0, 40.5)
    assert window.free_after_s(1, 0) == 29.5
    assert window.free_after_s(0, 101) == 39.5
    assert window.free_after_s(float("inf"), 0) == 49.5
    assert memory.window(0, 95.0).free_after_s(1, 0) == 0


@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2), st.integers(0, 9), st.integers(0, 99)), max_size=40),
    st.integers(0, 100),
    st.integers(1, 20),
)
def test_the_window_is_the_sum_of_the_last_minute(
    adds: list[tuple[float, int, int, int]], pause: int, wanted: int
) -> None:
    fd = key_usage.create()
    try:
        parts = [UsageMemory(fd, part) for part in range(3)]
        now_s, log = 1000.0, []
        for step_s, part, requests, tokens in adds:
            now_s += step_s
            parts[part].add(5, now_s, requests=requests, tokens=tokens)
            log.append((int(now_s), requests, tokens))
        now_s += pause
        first = int(now_s) - WINDOW_S
        expected = [entry for entry in log if entry[0] > first]
        num, tokens = used(parts[0], 5, now_s)
        assert (num, tokens) == (sum(one[1] for one in expected), sum(one[2] for one in expected))
        wait_s = parts[1].window(5, now_s).free_after_s(min(wanted, num), 0)
        assert used(parts[2], 5, now_s + wait_s)[0] <= num - min(wanted, num)
        assert 0 <= wait_s <= WINDOW_S
    finally:
        os.close(fd)


def test_a_correction_leaves_the_window_with_its_estimate(fd: int) -> None:
    """Else a much too high estimate would be room for other requests a minute later."""
    memory = UsageMemory(fd, 0)
    memory.add(0, 100.0, tokens=1000)
    memory.add(0, 103.0, tokens=50)
    memory.correct(0, 100.9, -990)
    assert used(memory, 0, 103.0) == (0, 60)
    assert used(memory, 0, 161.0) == (0, 50)
    memory.correct(0, 100.0 - key_usage.NUM_SECONDS, -990)
    assert used(memory, 0, 103.0) == (0, 60), "of a second that is not remembered any more"
