"""How LoRA adapters share slots: bounded, first come first served, and none waits forever."""

import msgspec
import numpy as np

from pipeline.runtime.messages import GenerationOptions
from pipeline.stages.schedule.policies.adapter_slots import MAX_OVERTAKEN, AdapterSlots
from pipeline.stages.schedule.request import RequestState, Sequence
from tests.stages.schedule.bench import Bench, config


class Sequences:
    """Makes sequences in order of arrival."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, adapter_id: str) -> Sequence:
        self._num += 1
        ids = np.ones(4, np.int32)
        options = GenerationOptions(adapter_id=adapter_id)
        request = RequestState(self._num, 1, 0, 0.0, ids, options, msgspec.Raw(b""))
        sequence = Sequence(self._num, request, 0, ids, 10, (0, 0.0, self._num))
        request.open_sequences[0] = sequence
        return sequence


def test_requests_without_an_adapter_need_no_slot() -> None:
    slots, make = AdapterSlots(1), Sequences()
    assert slots.admit(make("a"))
    assert all(slots.admit(make("")) for _ in range(3))
    assert slots.release(make("")) == []
    assert slots.running == ["a"]


def test_an_adapter_without_a_slot_waits_until_another_has_no_sequences_left() -> None:
    slots, make = AdapterSlots(2), Sequences()
    first, second, other = make("a"), make("a"), make("b")
    assert slots.admit(first) and slots.admit(other) and slots.admit(second)
    parked = [make("c"), make("d"), make("c")]
    assert not any(slots.admit(one) for one in parked)
    assert slots.waiting == ["c", "d"] and len(slots) == 3
    assert slots.release(first) == []
    assert slots.release(second) == [parked[0], parked[2]], "all of the adapter that waited longest"
    assert slots.release(other) == [parked[1]]
    assert slots.running == ["c", "d"]
    slots.check()


def test_an_admitted_sequence_keeps_its_slot_when_it_waits_again() -> None:
    slots, make = AdapterSlots(1), Sequences()
    sequence, other = make("a"), make("b")
    assert slots.admit(sequence) and not slots.admit(other)
    assert slots.admit(sequence)
    assert slots.release(sequence) == [other]


def test_an_adapter_in_use_overtakes_others_a_bounded_number_of_times() -> None:
    slots, make = AdapterSlots(1), Sequences()
    running = [make("a")]
    assert slots.admit(running[0])
    waiting = make("b")
    assert not slots.admit(waiting)
    late = [make("a") for _ in range(MAX_OVERTAKEN + 3)]
    admitted = [slots.admit(one) for one in late]
    assert admitted == [True] * MAX_OVERTAKEN + [False] * 3
    running += late[:MAX_OVERTAKEN]
    for one in running[:-1]:
        assert slots.release(one) == []
    assert slots.release(running[-1]) == [waiting]
    assert slots.waiting == ["a"]
    assert slots.release(waiting) == late[MAX_OVERTAKEN:]
    slots.check()


def test_an_aborted_sequence_leaves_its_queue() -> None:
    slots, make = AdapterSlots(1), Sequences()
    running, first, second = make("a"), make("b"), make("c")
    assert slots.admit(running)
    assert not slots.admit(first) and not slots.admit(second)
    assert slots.is_parked(first) and first in slots
    slots.remove(first)
    assert not slots.is_parked(first) and slots.waiting == ["c"]
    assert slots.release(running) == [second]


def test_sequences_wait_until_the_executor_has_loaded_their_adapter() -> None:
    slots, make = AdapterSlots(2, waits=True), Sequences()
    first, second, other, plain = make("a"), make("a"), make("b"), make("")
    assert not slots.admit(first) and slots.admit(plain)
    assert slots.next_message() == (1, ["a"]) and slots.next_message() is None
    assert not slots.admit(second) and not slots.admit(other)
    assert slots.next_message() is None, "the first message is unanswered"
    assert slots.is_loading and len(slots) == 3 and second in slots and slots.is_parked(other)
    assert slots.loaded(1, []) == []
    assert slots.next_message() == (2, ["a", "b"])
    assert slots.loaded(1, ["a"]) == [], "an older answer"
    assert slots.loaded(2, ["a"]) == [first, second]
    assert slots.admit(make("a")) and not slots.admit(make("b"))
    slots.check()
    slots.remove(other)
    assert not slots.is_parked(other)
    assert [one.request.adapter_id for one in slots.loaded(2, ["a", "b"])] == ["b"]
    assert not slots.is_loading and len(slots) == 0
    slots.check()


def test_the_executor_keeps_its_adapters_until_it_gets_others() -> None:
    slots, make = AdapterSlots(1, waits=True), Sequences()
    first = make("a")
    assert not slots.admit(first) and slots.next_message() == (1, ["a"])
    assert slots.loaded(1, ["a"]) == [first] and slots.release(first) == []
    again = make("a")
    assert slots.admit(again) and slots.next_message() is None
    assert slots.release(again) == []
    other = make("b")
    assert not slots.admit(other) and slots.next_message() == (2, ["b"])
    assert slots.loaded(2, ["b"]) == [other] and slots.release(other) == []
    assert not slots.admit(make("a")), "it may be gone"
    slots.check()


def test_the_successor_of_the_executor_loads_adapters_again() -> None:
    slots, make = AdapterSlots(1, waits=True), Sequences()
    sequence = make("a")
    assert not slots.admit(sequence) and slots.next_message() == (1, ["a"])
    slots.executor_lost()
    assert slots.next_message() == (2, ["a"])
    assert slots.loaded(2, ["a"]) == [sequence]
    slots.executor_lost()
    assert not slots.is_loaded(sequence) and slots.is_loading
    assert not slots.admit(sequence) and slots.next_message() == (3, ["a"])
    assert slots.loaded(3, ["a"]) == [sequence]


def test_a_request_with_an_adapter_is_aborted_wherever_it_waits() -> None:
    """One waits for a row and has its adapter, another waits for a slot of its adapter."""
    bench = Bench(config(max_loras=1, max_num_seqs=1), depth=1)
    _, waiting, parked = (bench.admit(range(9), adapter_id=name) for name in ("a", "a", "b"))
    bench.fill()
    for request_id in (waiting, parked):
        bench.abort(request_id)
        bench.check()
    bench.run()
    assert not any(request.open_sequences for request in bench.scheduler.requests.values())
