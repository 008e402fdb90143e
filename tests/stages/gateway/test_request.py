"""Output that is sent repeatedly is stored once."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.settings import Settings
from pipeline.metrics.request_timings import RequestTimings, SequenceTimings
from pipeline.runtime import messages as m
from pipeline.runtime.replay_context import ReplayContext
from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from pipeline.stages.gateway.apis.openai.parsing import parse_completion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.submit import new_submits
from pipeline.stages.gateway.open_requests.timings import MAX_KEPT_SEQUENCES, NUM_KEPT, RecentRequests
from pipeline.text.formats.chat_formats import ChatFormats
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import COMPLETION
from tests.stages.gateway.parsing.bodies import LIMITS


def packed(begin: int, end: int) -> bytes:
    return np.arange(begin, end, dtype=np.int32).tobytes()


@given(st.text(min_size=1, max_size=40), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12))
def test_repeated_text_and_ids_are_dropped(text: str, deltas: list[tuple[float, float]]) -> None:
    sequence = SequenceOutput()
    taken = ""
    for back, forth in [*deltas, (0.0, 1.0)]:
        begin = int(sequence.num_chars * (1 - back))
        end = begin + round((len(text) - begin) * forth)
        sequence.extend(text[begin:end], begin, packed(begin, end), begin)
        taken += sequence.take_text()
        assert text.startswith(taken)
        assert bytes(sequence.ids) == packed(0, len(taken))
    assert taken == text


def test_missing_text_is_a_broken_invariant() -> None:
    sequence = SequenceOutput()
    with pytest.raises(AssertionError):
        sequence.extend("b", 1, packed(0, 1), 0)
    with pytest.raises(AssertionError):
        sequence.extend("a", 0, packed(1, 2), 1)


class CountedReads(ReplayContext):
    def __init__(self) -> None:
        self.num = 0

    def randbits(self, num_bits: int) -> int:
        self.num += 1
        return 2**num_bits - 1

    def time(self) -> float:
        self.num += 1
        return float(self.num)


class TestSubmits:
    """A recording has no more of a thousand inputs than of one, unless each needs a seed."""

    def submits(self, parsed: Any) -> tuple[list[m.Submit], int]:
        replay = CountedReads()
        stage: Any = SimpleNamespace(
            replay_context=replay, settings=Settings(), replica=1, launch=SimpleNamespace(incarnation=2)
        )
        return new_submits(stage, parsed), replay.num

    def test_of_inputs_that_are_embedded(self) -> None:
        body = {"model": "tiny", "input": ["a", "b", "c"]}
        submits, num_reads = self.submits(parse_embeddings(json.dumps(body).encode(), LIMITS))
        assert num_reads == 2
        assert [one.request_id for one in submits] == [2**63 - 1, 0, 1], "they are different, whatever the first is"
        assert {one.arrival_s for one in submits} == {2.0} and {one.options.seed for one in submits} == {0}
        assert [one.prompt for one in submits] == [m.TextPrompt(text) for text in "abc"]

    def test_of_prompts_with_and_without_a_seed(self) -> None:
        for fields, num_reads, seeds in (({}, 5, {2**64 - 1}), ({"seed": 7}, 2, {7})):
            body = COMPLETION | {"prompt": ["a", "b", "c"]} | fields
            submits, num = self.submits(parse_completion(json.dumps(body).encode(), LIMITS))
            assert num == num_reads and {one.options.seed for one in submits} == seeds


def test_nothing_waits_for_a_finished_request() -> None:
    """No message and no deadline would end the wait."""
    stage: Any = SimpleNamespace(replay_context=ReplayContext(), trace=None)
    request = Request(parse_completion(json.dumps(COMPLETION).encode(), LIMITS), stage, 1, ChatFormats())

    async def wait(condition: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await request.until(lambda: condition)

    request.num_open = 1
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(wait(False), 0.01))
    request.num_open = 0
    assert request.is_finished
    asyncio.run(wait(True))
    with pytest.raises(ApiError, match="has ended without what its response needs"):
        asyncio.run(wait(False))


def timings(name: str, num_sequences: int) -> RequestTimings:
    return RequestTimings(name, 0.0, [SequenceTimings(i, i, [0.0], 0.0, 1, 0, 1) for i in range(num_sequences)])


@pytest.mark.parametrize("num_sequences", [1, 64, 1000, MAX_KEPT_SEQUENCES + 1])
def test_timings_of_recent_requests_are_kept_for_a_bounded_number_of_sequences(num_sequences: int) -> None:
    recent = RecentRequests()
    for number in range(2 * NUM_KEPT):
        recent.add(timings(f"reply-{number}", num_sequences), "")
    kept = list(recent.newest(""))
    num_kept = min(NUM_KEPT, max(1, MAX_KEPT_SEQUENCES // num_sequences))
    assert [one.response_id for one in kept] == [f"reply-{2 * NUM_KEPT - 1 - i}" for i in range(num_kept)]
    assert recent.find("reply-0") is None
