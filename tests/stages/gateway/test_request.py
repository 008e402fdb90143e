"""What has been received is kept once, however often it is sent."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.stages.gateway.request import SequenceOutput


def packed(begin: int, end: int) -> bytes:
    return np.arange(begin, end, dtype=np.int32).tobytes()


@given(st.text(min_size=1, max_size=40), st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=12))
def test_text_and_ids_that_come_again_are_cut(text: str, deltas: list[tuple[float, float]]) -> None:
    sequence = SequenceOutput()
    given_out = ""
    for back, forth in [*deltas, (0.0, 1.0)]:
        begin = int(sequence.num_chars * (1 - back))
        end = begin + round((len(text) - begin) * forth)
        sequence.extend(text[begin:end], begin, packed(begin, end), begin)
        given_out += sequence.take_text()
        assert text.startswith(given_out)
        assert bytes(sequence.ids) == packed(0, len(given_out))
    assert given_out == text


def test_text_that_is_missing_is_a_broken_invariant() -> None:
    sequence = SequenceOutput()
    with pytest.raises(AssertionError):
        sequence.extend("b", 1, packed(0, 1), 0)
    with pytest.raises(AssertionError):
        sequence.extend("a", 0, packed(1, 2), 1)
