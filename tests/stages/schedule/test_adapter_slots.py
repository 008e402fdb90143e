"""How LoRA adapters share slots: bounded, first come first served, and none waits forever."""

import msgspec
import numpy as np

from pipeline.runtime.messages import GenerationOptions
from pipeline.stages.schedule.adapter_slots import MAX_OVERTAKEN, AdapterSlots
from pipeline.stages.schedule.request import RequestState, Sequence


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
