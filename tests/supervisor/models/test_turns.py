"""Turns of models that don't fit together: the decisions, and random histories of a simulated server."""

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.supervisor.models.placement import Decision, Occupant, decide, turn_bytes

QUANTUM_S = 10.0
NEVER = math.inf


def occupant(name: str, **fields: object) -> Occupant:
    defaults = {"num_bytes": 10, "stays_bytes": 2, "is_busy": True, "awake_since_s": 0.0}
    return Occupant(name=name, **(defaults | fields))  # type: ignore[arg-type]


def decided(occupants: list[Occupant], memory_bytes: int, now_s: float = 0.0, quantum_s: float = QUANTUM_S) -> Decision:
    """About a model of 10 bytes, of which 2 stay while it sleeps."""
    return decide(10, occupants, memory_bytes, stays_bytes=2, now_s=now_s, quantum_s=quantum_s)


def test_a_busy_model_sleeps_once_its_quantum_has_passed() -> None:
    found = [occupant("a", awake_since_s=5.0)]
    assert decided(found, 12, 14.9) == Decision(waits_for=("a",), due_s=15.0)
    assert decided(found, 12, 15.0) == Decision(waits_for=("a",), due_s=15.0, sleep=("a",))


def test_the_model_that_is_awake_longest_sleeps_first_and_no_more_than_needed() -> None:
    found = [occupant("new", awake_since_s=3.0), occupant("old", awake_since_s=1.0)]
    assert decided(found, 22, 20.0).sleep == ("old",)
    assert decided(found, 14, 20.0).sleep == ("old", "new")


def test_a_model_that_is_idle_is_unloaded_at_once() -> None:
    found = [occupant("busy"), occupant("idle", is_busy=False)]
    assert decided(found, 20) == Decision(leave=("idle",), waits_for=("idle",))
    assert decided([occupant("idle", is_busy=False, is_asleep=True)], 11) == Decision(("idle",), ("idle",))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 30),
)
def test_turns_begin_at_the_memory_that_they_need(models: list[tuple[int, int, bool]], num_bytes: int) -> None:
    found = [
        occupant(str(index), num_bytes=size, stays_bytes=min(stays, size), is_busy=busy)
        for index, (size, stays, busy) in enumerate(models)
    ]
    busy = [one for one in found if one.is_busy]
    least = turn_bytes(num_bytes, 1, found)

    def decision(memory_bytes: int) -> Decision:
        return decide(num_bytes, busy, memory_bytes, stays_bytes=1, now_s=99.0, quantum_s=QUANTUM_S)

    assert decision(least).sleep or decision(least).loads
    assert decision(least - 1).is_open_ended or decision(least - 1).problem


def test_with_quantum_0_a_busy_model_is_waited_for() -> None:
    assert decided([occupant("a")], 12, 99.0, quantum_s=0.0) == Decision(waits_for=("a",), is_open_ended=True)


@pytest.mark.parametrize("fields", [{"is_pinned": True}, {"stays_bytes": None}])
def test_a_model_that_is_pinned_or_can_not_sleep_is_not_put_to_sleep(fields: dict[str, object]) -> None:
    assert not decided([occupant("a", **fields)], 12, 99.0).sleep


def test_a_model_that_is_being_loaded_has_its_quantum_later() -> None:
    assert decided([occupant("a", awake_since_s=NEVER)], 12, 99.0) == Decision(waits_for=("a",))


def test_a_model_that_falls_asleep_is_waited_for() -> None:
    assert decided([occupant("a", is_falling_asleep=True)], 12) == Decision(waits_for=("a",))
    assert decided([occupant("a", is_asleep=True)], 12).loads


def test_models_do_not_take_turns_if_one_of_them_could_not_wake() -> None:
    """The wanted one would fit beside the sleeping ones, but the large one would not fit beside it."""
    large = occupant("large", num_bytes=20)
    assert decided([large], 21, 99.0).is_open_ended
    assert decided([large], 22, 99.0).sleep == ("large",)


class Model(msgspec.Struct):
    name: str
    num_bytes: int
    stays_bytes: int
    takes_s: int
    """To be loaded, or to wake; falling asleep and unloading take a second."""
    is_pinned: bool
    state: str = "off"
    was_asleep: bool = False
    """Before it was unloaded."""
    since_s: float = 0.0
    num_open: int = 0
    wanted_s: float = NEVER
    idle_since_s: float = 0.0

    @property
    def used(self) -> int:
        return 0 if self.state == "off" else self.stays_bytes if self.sleeps else self.num_bytes

    @property
    def sleeps(self) -> bool:
        return self.state == "asleep" or (self.state == "unloading" and self.was_asleep)

    def occupant(self) -> Occupant:
        return Occupant(
            name=self.name,
            num_bytes=self.num_bytes,
            stays_bytes=None if self.is_pinned else self.stays_bytes,
            is_pinned=self.is_pinned,
            is_busy=self.num_open > 0 or self.state == "loading",
            is_leaving=self.state == "unloading",
            is_asleep=self.sleeps,
            is_falling_asleep=self.state == "falling asleep",
            idle_since_s=self.idle_since_s,
            awake_since_s=self.since_s if self.state == "awake" else NEVER,
        )


def turn(models: list[Model], memory: int, now_s: float) -> None:
    """What `WaitingModels.turn` does, for models whose turns take the time that they say."""
    by_name = {one.name: one for one in models}
    for one in models:
        ends_s = one.since_s + (one.takes_s if one.state == "loading" else 1)
        after = {"loading": "awake", "falling asleep": "asleep", "unloading": "off"}.get(one.state)
        if after and now_s >= ends_s:
            one.state, one.since_s = after, now_s
            if after == "asleep" and one.num_open:
                one.wanted_s = now_s
        if one.state == "asleep" and not one.num_open:
            one.wanted_s = NEVER
    only_sleepers = False
    for one in sorted((one for one in models if one.wanted_s < NEVER), key=lambda one: one.wanted_s):
        if one.state == "unloading" or (only_sleepers and one.state != "asleep"):
            continue
        others = [other.occupant() for other in models if other is not one and other.state != "off"]
        stays = None if one.is_pinned else one.stays_bytes
        decision = decide(one.num_bytes, others, memory, stays_bytes=stays, now_s=now_s, quantum_s=QUANTUM_S)
        for name in (*decision.leave, *decision.sleep):
            other = by_name[name]
            assert not other.is_pinned, "a pinned model never leaves"
            assert other.num_open == 0 or name in decision.sleep, "no stream is ended"
            other.was_asleep = other.state == "asleep"
            other.state, other.since_s = "falling asleep" if name in decision.sleep else "unloading", now_s
        if decision.waits_for and not decision.is_open_ended:
            return
        if decision.waits_for:
            only_sleepers = True
            continue
        assert not (decision.problem and one.state == "asleep"), "a model that sleeps can always wake"
        one.wanted_s = NEVER
        if decision.loads:
            one.state, one.since_s = "loading", now_s


SIZES = st.tuples(st.integers(3, 20), st.integers(0, 3), st.integers(1, 8), st.booleans())
EVENTS = st.lists(st.tuples(st.integers(0, 25), st.integers(0, 3), st.booleans()), max_size=40)


@settings(max_examples=300, deadline=None)
@given(st.lists(SIZES, min_size=2, max_size=4), st.integers(0, 30), EVENTS, st.booleans())
def test_random_histories_keep_the_memory_and_no_model_waits_longer_than_the_turns_of_the_others(
    sizes: list[tuple[int, int, int, bool]], spare: int, events: list[tuple[int, int, bool]], fits_turns: bool
) -> None:
    """If each could be the one that is awake, one that is wanted waits for the others' quanta, loads and sleeps."""
    models = [
        Model(f"m{index}", num, stays, takes, pinned and not fits_turns)
        for index, (num, stays, takes, pinned) in enumerate(sizes)
    ]
    low = sum(one.stays_bytes for one in models)
    memory = max(low + one.num_bytes - one.stays_bytes for one in models) + spare if fits_turns else 12 + spare
    shares = [QUANTUM_S + one.takes_s + 2 for one in models]  # a second to fall asleep, and one of the clock's ticks
    bounds = {one.name: 2 + sum(shares) - share for one, share in zip(models, shares, strict=True)}
    now_s = 0.0
    for pause_s, index, opens in [*events, (200, 0, True)]:
        one = models[index % len(models)]
        if opens:
            one.num_open += 1
            if one.state in ("off", "unloading", "asleep"):
                one.wanted_s = min(one.wanted_s, now_s)
        elif one.num_open:
            one.num_open -= 1
            one.idle_since_s = now_s
        for _ in range(pause_s):
            turn(models, memory, now_s)
            assert sum(one.used for one in models) <= memory
            now_s += 1
            if fits_turns:
                assert all(now_s - one.wanted_s <= bounds[one.name] for one in models)
