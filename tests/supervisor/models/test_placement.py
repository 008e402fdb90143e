"""Which models are loaded: pure decisions."""

from hypothesis import given
from hypothesis import strategies as st

from pipeline.supervisor.models.placement import Decision, Occupant, decide


def occupant(name: str, num_bytes: int = 10, **fields: object) -> Occupant:
    return Occupant(name=name, num_bytes=num_bytes, **fields)  # type: ignore[arg-type]


def test_what_fits_is_loaded() -> None:
    assert decide(10, [occupant("a", 20)], 30).loads


def test_idle_models_leave_the_one_that_was_used_longest_ago_first_and_no_more_than_needed() -> None:
    found = [occupant("new", idle_since_s=9), occupant("old", idle_since_s=1), occupant("mid", idle_since_s=5)]
    assert decide(10, found, 30) == Decision(leave=("old",), waits_for=("old",))
    assert decide(20, found, 30) == Decision(leave=("old", "mid"), waits_for=("old", "mid"))


def test_a_busy_model_is_waited_for_and_not_ended() -> None:
    found = [occupant("busy", is_busy=True), occupant("idle", idle_since_s=5)]
    assert decide(20, found, 20) == Decision(("idle",), ("idle", "busy"), is_open_ended=True)


def test_a_pinned_model_never_leaves_and_the_problem_tells_its_memory() -> None:
    decision = decide(20, [occupant("kept", is_pinned=True), occupant("idle")], 20)
    assert not decision.leave and "of which pinned models have" in decision.problem
    assert "memory_bytes is 10GiB" in decide(20 * 1024**3, [], 10 * 1024**3).problem


def test_room_that_is_being_made_is_waited_for() -> None:
    assert decide(10, [occupant("leaving", is_leaving=True)], 10) == Decision(waits_for=("leaving",))


@given(
    st.integers(1, 50),
    st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9))),
    st.integers(1, 100),
)
def test_a_decision_makes_enough_room_or_says_why_not(
    num_bytes: int, models: list[tuple[int, bool, bool, bool, int]], memory: int
) -> None:
    found = [
        occupant(str(index), size, is_pinned=pinned, is_busy=busy, is_leaving=leaving, idle_since_s=float(idle))
        for index, (size, pinned, busy, leaving, idle) in enumerate(models)
    ]
    decision = decide(num_bytes, found, memory)
    by_name = {one.name: one for one in found}
    for name in decision.leave:
        assert not (by_name[name].is_pinned or by_name[name].is_busy or by_name[name].is_leaving)
    stays = sum(one.num_bytes for one in found if one.name not in decision.waits_for)
    if decision.problem:
        needed = sum(one.num_bytes for one in found if one.is_pinned and not one.is_leaving)
        assert num_bytes + needed > memory
    else:
        assert num_bytes + stays <= memory
