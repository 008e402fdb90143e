"""The queue of waiting sequences counts them."""

from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.messages import GenerationOptions
from pipeline.stages.schedule.policies.policy import POLICIES
from pipeline.stages.schedule.queues import WaitingQueue
from pipeline.stages.schedule.request import RequestState, Sequence

LONG = 8


def sequence(number: int, num_ids: int) -> Sequence:
    ids = np.ones(num_ids, np.int32)
    request = RequestState(number, 1, 0, 0.0, ids, GenerationOptions(), msgspec.Raw(b""))
    return Sequence(number, request, 0, ids, 10, (0, 0.0, number))


@given(st.data())
def test_a_waiting_queue_has_as_many_sequences_as_it_counts(data: Any) -> None:
    queue, waiting = WaitingQueue(POLICIES["fcfs"](), LONG), list[Sequence]()
    for number in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(("add", "add", "remove", "pace")))
        if what == "add":
            waiting.append(sequence(number, data.draw(st.sampled_from((1, LONG, LONG + 1)))))
            queue.add(waiting[-1])
        elif waiting and what == "remove":
            queue.remove(waiting.pop(data.draw(st.integers(0, len(waiting) - 1))))
        elif waiting:
            queue.pace(data.draw(st.sampled_from(waiting)))
        assert len(queue) == len(queue.sequences) == len(waiting)
        assert queue.num_unpaced == sum(not one.is_paced for one in waiting)
