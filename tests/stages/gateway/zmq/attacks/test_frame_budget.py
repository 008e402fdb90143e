"""The budget of large frames: bounded, fair, and never stuck."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.stages.gateway.zmq.frame_budget import GRACE_S, MAX_OVERDRAFTS, MIN_BYTES_PER_S, FrameBudget

FRAME = 8
MAX_BYTES = 4 * FRAME


@dataclass(eq=False)
class Sender:
    owner: str
    size: int = FRAME
    is_waiting: bool = False
    begun_s: float | None = 0.0
    num_arrived: int = 0
    committed: int = field(default=0)


def receive(budget: FrameBudget[Sender], sender: Sender, num_bytes: int) -> None:
    """It needs room; those that get it go on."""
    sender.committed = num_bytes
    granted = budget.take(sender, num_bytes)
    sender.is_waiting = True
    for one in granted:
        one.is_waiting = False


def end(budget: FrameBudget[Sender], sender: Sender) -> None:
    for one in budget.release(sender):
        one.is_waiting = False


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, FRAME)), min_size=1, max_size=40), st.randoms())
@settings(deadline=None)
def test_every_frame_is_received_in_the_end_within_the_bound(frames: list[tuple[str, int]], random: object) -> None:
    """Senders that begin in any order and go on in any order, in steps that double: none is stuck."""
    budget: FrameBudget[Sender] = FrameBudget(MAX_BYTES)
    waiting = [Sender(owner, size) for owner, size in frames]
    begun: list[Sender] = []
    while waiting or begun:
        going_on = [one for one in begun if not one.is_waiting]
        assert going_on or not begun, "one of them can go on"
        if waiting and (not going_on or random.random() < 0.5):  # type: ignore[attr-defined]
            begun.append(sender := waiting.pop())
            receive(budget, sender, 1)
        else:
            sender = random.choice(going_on)  # type: ignore[attr-defined]
            if sender.committed == sender.size:
                begun.remove(sender)
                end(budget, sender)
            else:
                receive(budget, sender, min(sender.size, 2 * sender.committed))
        held = sum(budget._held.values())
        assert budget.num_bytes == held <= MAX_BYTES
        assert len(budget._overdrafts) <= MAX_OVERDRAFTS
    assert not budget.has_waiting and budget.num_bytes == 0 and not budget._overdrafts


def test_another_owner_never_waits_for_the_frames_of_one() -> None:
    budget: FrameBudget[Sender] = FrameBudget(MAX_BYTES)
    many = [Sender("a") for _ in range(20)]
    for one in many:
        receive(budget, one, FRAME)
    assert [one.is_waiting for one in many] == [False] * 5 + [True] * 15, "the budget, and one beyond it"
    others = [Sender(owner) for owner in "bcdef"]
    for one in others:
        receive(budget, one, FRAME)
    assert [one.is_waiting for one in others] == [False] * 3 + [True] * 2
    end(budget, others[0])
    assert not others[3].is_waiting, "`a` has a frame beyond the budget already"
    end(budget, many[0])
    end(budget, many[1])
    assert not others[4].is_waiting, "it waits for one of `a` at most"
    assert [one.is_waiting for one in many[5:7]] == [False, True]


def test_the_slowest_is_given_up_and_only_for_others() -> None:
    budget: FrameBudget[Sender] = FrameBudget(MAX_BYTES)
    holders = [Sender("a") for _ in range(5)]
    for index, one in enumerate(holders):
        receive(budget, one, FRAME)
        one.num_arrived = 10 * (5 - index)
    late_s = GRACE_S + 1.0
    assert budget.slowest(late_s) is None, "none waits"
    receive(budget, (waits := Sender("a", num_arrived=1)), FRAME)
    assert budget.slowest(GRACE_S - 0.1) is None, "none is slow yet"
    assert budget.slowest(late_s) is holders[4]
    holders[4].num_arrived = int(MIN_BYTES_PER_S * late_s) + 1
    assert budget.slowest(late_s) is holders[3]
    end(budget, holders[3])
    assert not waits.is_waiting and budget.slowest(late_s) is None


def test_a_frame_that_ends_while_it_waits_is_forgotten() -> None:
    budget: FrameBudget[Sender] = FrameBudget(FRAME)
    holders = [Sender("a") for _ in range(3)]
    for one in holders:
        receive(budget, one, FRAME)
    assert holders[2].is_waiting and budget.has_waiting
    end(budget, holders[2])
    assert not budget.has_waiting
    with pytest.raises(KeyError):
        budget._held[holders[2]]
