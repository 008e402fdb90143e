"""A gateway is told the log probabilities of just the ids that count, however they come."""

import numpy as np
import pytest

from pipeline import messages as m
from pipeline.stages.detokenize.sequences import Sequences
from tests.stages.detokenize.test_sequences import VOCABULARY, ids_of, opening

ASKING = m.TextOptions(stop=["stop"], with_logprobs=True)
WORDS = ids_of("it has to stop here and now")
LOGPROBS = [-0.5 - place / 8 for place in range(len(WORDS))]
NUM_COUNTED = len("it has to stop")


def told(deltas: m.Deltas) -> list[tuple[list[int], list[float]]]:
    """Ids and log probabilities of each entry."""
    ids, logprobs = np.frombuffer(deltas.ids, "<i4").tolist(), np.frombuffer(deltas.logprobs, "<f4").tolist()
    assert len(ids) == len(logprobs)
    found, begin = [], 0
    for num in deltas.num_ids:
        found.append((ids[begin : begin + num], logprobs[begin : begin + num]))
        begin += num
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 100])
@pytest.mark.parametrize("tell_every", [1, 3, 100])
def test_behind_a_stop_string_none_count_however_ids_come(size: int, tell_every: int) -> None:
    sequences = Sequences(VOCABULARY)
    sequences.open(opening(5, ASKING))
    ids: list[int] = []
    logprobs: list[float] = []
    for turn, start in enumerate(range(0, len(WORDS), size)):
        part = WORDS[start : start + size]
        finish = m.Finish.LENGTH if start + size >= len(WORDS) else m.Finish.NONE
        sequences.settle([5], [start], [len(part)], part, [finish], logprobs=LOGPROBS[start : start + size])
        for gateway in sequences.unsent() if turn % tell_every == 0 or finish else ():
            for entry in told(sequences.deltas(gateway)):
                ids += entry[0]
                logprobs += entry[1]
            sequences.sent(gateway)
    assert ids == WORDS[:NUM_COUNTED]
    assert logprobs == LOGPROBS[:NUM_COUNTED]


def test_ids_that_come_twice_count_once_and_the_id_that_stops_counts() -> None:
    sequences = Sequences(VOCABULARY)
    sequences.open(opening(5, m.TextOptions(with_logprobs=True)))
    sequences.settle([5], [0], [4], WORDS[:4], [m.Finish.NONE], logprobs=LOGPROBS[:4])
    sequences.settle([5], [2], [6], WORDS[2:8], [m.Finish.STOP], logprobs=LOGPROBS[2:8])
    assert told(sequences.deltas(0)) == [(WORDS[:8], LOGPROBS[:8])]


def test_those_who_do_not_ask_have_zeros_beside_those_who_do_and_else_nothing() -> None:
    sequences = Sequences(VOCABULARY)
    for seq, options in ((3, None), (4, ASKING), (5, None)):
        sequences.open(opening(seq, options))
    sequences.settle([3, 5], [0, 0], [2, 1], WORDS[:3], [0, 0])
    assert sequences.deltas(0).logprobs == b""
    sequences.settle([3, 4, 5], [2, 0, 1], [1, 2, 1], WORDS[:4], [0, 0, 0], logprobs=[0.0, -1.0, -2.0, 0.0])
    assert [logprobs for _, logprobs in told(sequences.deltas(0))] == [[0.0] * 3, [0.0] * 2, [-1.0, -2.0]]
    sequences.sent(0)
    sequences.settle([3], [3], [1], WORDS[:1], [0])
    assert sequences.deltas(0).logprobs == b""


def test_each_gateway_is_told_of_its_own() -> None:
    sequences = Sequences(VOCABULARY)
    sequences.open(opening(3, ASKING, gateway=0))
    sequences.open(opening(4, None, gateway=1))
    sequences.settle([3, 4], [0, 0], [1, 1], WORDS[:2], [0, 0], logprobs=[-1.0, 0.0])
    assert sequences.deltas(1).logprobs == b""
    assert told(sequences.deltas(0)) == [(WORDS[:1], [-1.0])]
