"""Output that is sent repeatedly is stored once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.request import SequenceOutput


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
