"""The fair queue and the gate over it: nothing is lost or starves, and waits are bounded."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.queues.fair_queue import CLASS_BITS, MAX_REMEMBERED, FairQueue, _Scope

SCOPES = "abcd"
COSTS = st.one_of(st.integers(1, 64), st.integers(1, 4_000_000))
PUSHES = st.tuples(st.sampled_from(SCOPES), COSTS)
HISTORIES = st.lists(st.one_of(PUSHES, st.just("pop"), st.tuples(st.just("remove"), st.integers(0, 30))), max_size=120)


def size_class(cost: int) -> int:
    return (cost.bit_length() + 1) // CLASS_BITS


def drained(queue: "FairQueue[int, tuple[str, int]]") -> list[tuple[str, int]]:
    found = []
    while (turn := queue.pop()) is not None:
        found.append(turn[1])
    return found


@given(HISTORIES)
@settings(deadline=None)
def test_each_item_leaves_once_and_the_next_of_a_scope_is_the_oldest_of_its_size(history: list[object]) -> None:
    queue: FairQueue[int, tuple[str, int]] = FairQueue()
    waiting: dict[int, tuple[str, int]] = {}
    for number, event in enumerate(history):
        match event:
            case "pop":
                turn = queue.pop()
                assert (turn is None) == (not waiting)
                if turn is not None:
                    key, item, scope = turn
                    assert waiting[key] == item and item[0] == scope
                    same = [k for k, (s, c) in waiting.items() if (s, size_class(c)) == (scope, size_class(item[1]))]
                    assert key == same[0], "in order of arrival"
                    del waiting[key]
            case ("remove", int(key)):
                assert queue.remove(key) == waiting.pop(key, None)
            case (str(scope), int(cost)):
                queue.push(number, (scope, cost), scope, cost)
                waiting[number] = scope, cost
        assert len(queue) == len(waiting) and list(queue) == list(waiting)
        assert all(queue[key] == item for key, item in waiting.items())
    assert sorted(drained(queue)) == sorted(waiting.values())
    assert len(queue._idle) == len(queue._scopes) <= len(SCOPES)


@given(HISTORIES, st.sets(st.sampled_from(SCOPES)))
@settings(deadline=None)
def test_the_next_scope_is_the_one_with_the_first_turn(history: list[object], without: set[str]) -> None:
    queue: FairQueue[int, None] = FairQueue()
    for number, event in enumerate(history):
        turns = [(flow.turn, name) for name, flow in queue._scopes.items() if flow.num_items and name not in without]
        turn = queue.peek(without)
        assert (turn and turn[2]) == (min(turns)[1] if turns else None)
        match event:
            case "pop":
                assert queue.pop(without) == turn
            case ("remove", int(key)):
                queue.remove(key)
            case (str(scope), int(cost)):
                queue.push(number, None, scope, cost)


def test_a_turn_takes_no_time_for_each_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    next_class = vars(_Scope)["next_class"].fget

    def look(self: _Scope[int, None]) -> object:
        nonlocal num_looks
        num_looks += 1
        return next_class(self)

    monkeypatch.setattr(_Scope, "next_class", property(look))
    queue: FairQueue[int, None] = FairQueue()
    for number in range(2 * (num_scopes := 2000)):
        queue.push(number, None, f"address {number % num_scopes}", 1)
    while queue.pop() is not None:
        assert len(queue._turns) <= 3 * num_scopes
    assert num_looks <= 20 * num_scopes


def test_scopes_that_wait_no_more_are_forgotten() -> None:
    queue: FairQueue[int, None] = FairQueue()
    for number in range(5000):
        queue.push(number, None, f"address {number}", 1)
        queue.pop()
    assert len(queue._scopes) <= MAX_REMEMBERED + 1


def test_a_scope_that_had_its_turn_goes_after_one_that_had_none() -> None:
    """Although nothing waited in between, as while the work of its turn goes on."""
    queue: FairQueue[str, None] = FairQueue()
    queue.push("a0", None, "a", 100)
    queue.pop()
    for key, scope, cost in (("a1", "a", 100), ("b", "b", 10**6)):
        queue.push(key, None, scope, cost)
    assert queue.pop() == ("b", None, "b")


@given(st.lists(PUSHES, min_size=1, max_size=60), st.integers(0, 59), COSTS)
@settings(deadline=None)
def test_a_scope_that_begins_to_wait_is_before_all_but_one_item_of_each_other(
    pushes: list[tuple[str, int]], num_before: int, cost: int
) -> None:
    queue: FairQueue[int, tuple[str, int]] = FairQueue()
    for number, (scope, size) in enumerate(pushes):
        queue.push(number, (scope, size), scope, size)
    for _ in range(min(num_before, len(pushes) - 1)):
        queue.pop()
    queue.push(-1, ("new", cost), "new", cost)
    order = [scope for scope, _ in drained(queue)]
    assert max(Counter(order[: order.index("new")]).values(), default=0) <= 1


@given(st.lists(PUSHES, min_size=2, max_size=80))
@settings(deadline=None)
def test_scopes_that_wait_get_the_same_share_of_the_work(pushes: list[tuple[str, int]]) -> None:
    queue: FairQueue[int, tuple[str, int]] = FairQueue()
    left: Counter[str] = Counter()
    largest: Counter[str] = Counter()
    for number, (scope, cost) in enumerate(pushes):
        queue.push(number, (scope, cost), scope, cost)
        left[scope] += 1
        largest[scope] = max(largest[scope], cost)
    done: Counter[str] = Counter()
    while (turn := queue.pop()) is not None:
        _, (scope, cost), _ = turn
        done[scope] += cost
        left[scope] -= 1
        if not left[scope]:
            return  # the others have more from now on
        for one in largest:
            for other in largest:
                assert abs(done[one] - done[other]) <= largest[one] + largest[other]


@given(st.lists(st.integers(50_000, 4_000_000), min_size=1, max_size=40), st.integers(0, 39))
@settings(deadline=None)
def test_a_small_item_waits_for_at_most_one_large_one_of_each_size(costs: list[int], num_before: int) -> None:
    queue: FairQueue[int, tuple[str, int]] = FairQueue()
    for number, cost in enumerate(costs):
        queue.push(number, ("a", cost), "a", cost)
    for _ in range(min(num_before, len(costs) - 1)):
        queue.pop()
    queue.push(-1, ("a", 100), "a", 100)
    order = [cost for _, cost in drained(queue)]
    sizes = Counter(size_class(cost) for cost in order[: order.index(100)])
    assert max(sizes.values(), default=0) <= 1


@given(st.lists(COSTS, min_size=200, max_size=200), COSTS)
@settings(deadline=None, max_examples=20)
def test_nothing_starves_behind_items_that_keep_coming(costs: list[int], cost: int) -> None:
    """Scope `a` and smaller items of the own scope come for ever: the item is popped before much more work than its
    own cost, once for each scope and class, is done."""
    queue: FairQueue[int, tuple[str, int]] = FairQueue()
    queue.push(-1, ("b", cost), "b", cost)
    done = 0
    for number in range(100_000):
        for scope in "ab":
            one = costs[number % len(costs)]
            queue.push(2 * number + "ab".index(scope), (scope, one), scope, one)
        turn = queue.pop()
        assert turn is not None
        if turn[0] == -1:
            break
        done += turn[1][1]
    assert done <= 4 * 8 * (cost + max(costs))


def test_scopes_can_be_left_out() -> None:
    queue: FairQueue[str, int] = FairQueue()
    queue.push("x", 1, "a", 1)
    queue.push("y", 2, "b", 100)
    assert queue.pop(without=["a"]) == ("y", 2, "b")
    assert queue.pop(without=["a"]) is None and "x" in queue
    assert queue.pop() == ("x", 1, "a")


class TestGate:
    async def test_a_scope_takes_its_places_and_leaves_the_others_free(self) -> None:
        gate = FairGate(3, num_per_scope=2)
        await gate.enter("a", 1)
        await gate.enter("a", 1)
        third = asyncio.create_task(gate.enter("a", 1))
        await asyncio.sleep(0)
        assert not third.done() and gate.num_waiting == 1
        await gate.enter("b", 10**9)
        gate.leave("b")
        await asyncio.sleep(0)
        assert not third.done(), "it is of a scope that has two"
        gate.leave("a")
        await third

    async def test_a_cancelled_entry_has_no_place(self) -> None:
        gate = FairGate(1, num_per_scope=1)
        await gate.enter("a", 1)
        waiting, admitted = (asyncio.create_task(gate.enter("b", cost)) for cost in (1000, 1))
        await asyncio.sleep(0)
        gate.leave("a")  # admits the cheap one of b
        for task in (waiting, admitted):
            task.cancel()
        for task in (waiting, admitted):
            with pytest.raises(asyncio.CancelledError):
                await task
        await gate.enter("c", 1)
        assert gate.num_waiting == 0
