"""Log probability records in the wire format are decoded to vLLM's dicts."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.client.logprobs import Logprob, logprobs_of
from pipeline.runtime.token_outputs import logprob_bytes, logprob_dtype
from tests.fakes import logprob, record


def test_the_sampled_id_comes_first_with_its_rank_if_known() -> None:
    data = struct.pack("<f2i2f", -2.5, 7, 9, -0.5, -1.5) + struct.pack("<f2i2f", -1.5, 7, 9, -0.5, -1.5)
    pieces = [b"a", b"b", b"\xc3", b"\xc3", b"b", b"\xc3"]
    first, second = logprobs_of([8, 9], data, pieces, 2)
    assert list(first.items()) == [
        (8, Logprob(-2.5, None, "a", b"a")),
        (7, Logprob(-0.5, 1, "b", b"b")),
        (9, Logprob(-1.5, 2, "\ufffd", b"\xc3")),
    ]
    assert list(second.items()) == [(9, Logprob(-1.5, 2, "\ufffd", b"\xc3")), (7, Logprob(-0.5, 1, "b", b"b"))]


def test_without_top_logprobs_only_the_id_is_returned() -> None:
    assert logprobs_of([5], struct.pack("<f", -0.25), [b"x"], 0) == [{5: Logprob(-0.25, None, "x", b"x")}]


@given(st.lists(st.integers(0, 900), max_size=20), st.integers(0, 20))
def test_records_of_the_executor_round_trip(ids: list[int], num_top: int) -> None:
    data = b"".join(record(one, num_top) for one in ids)
    assert len(data) == len(ids) * logprob_bytes(num_top) == len(ids) * logprob_dtype(num_top).itemsize
    pieces = [b"%d" % (one + max(0, k)) for one in ids for k in range(-1, num_top)]
    for one, read in zip(ids, logprobs_of(ids, data, pieces, num_top), strict=True):
        assert next(iter(read)) == one
        assert list(read) == list(range(one, one + max(1, num_top)))
        assert read[one].logprob == np.float32(logprob(one))
        assert read[one].rank == (1 if num_top else None)
        assert all(each.bytes == b"%d" % token_id for token_id, each in read.items())


@pytest.mark.parametrize("num_missing", [1, 3, 4, 12, 13, 24])
def test_truncated_records_are_read_up_to_the_last_complete_one(num_missing: int) -> None:
    data = (record(5, 1) + record(6, 1))[:-num_missing]
    assert [next(iter(one)) for one in logprobs_of([5, 6], data, [b"x"], 1)] == [5, 6][: len(data) // 12]
