"""The nesting depth of a body, compared with a decoder."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.http_server.bodies.json_depth import check_depth, depth_of
from pipeline.stages.gateway.errors import ApiError

LEAVES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(alphabet='"\\[]{}aé\n', max_size=8)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='"\\[]{}a', max_size=4), inner, max_size=4)
    ),
    max_leaves=30,
)


def levels_of(value: Any) -> int:
    match value:
        case dict():
            return 1 + max(map(levels_of, value.values()), default=0)
        case list():
            return 1 + max(map(levels_of, value), default=0)
    return 0


@given(VALUES, st.booleans())
def test_the_depth_of_json_is_exact(value: Any, ascii_only: bool) -> None:
    assert depth_of(json.dumps(value, ensure_ascii=ascii_only).encode()) == levels_of(value)


@given(st.binary(max_size=64))
def test_the_depth_of_other_bytes_is_bounded_by_their_length(body: bytes) -> None:
    assert 0 <= depth_of(body) <= len(body)


@pytest.mark.parametrize(
    ("body", "depth"),
    [
        (b"", 0),
        (b"[", 1),
        (b"]]]", 0),
        (b'"[[[', 0),
        (b'"\\"[[[', 0),
        (b'"\\\\"[[[', 3),
        (b'"\\\\\\"[[["[', 1),
        (b'{"a\\n": [{"b\\\\": "]]}}"}]}', 3),
    ],
)
def test_quotes_and_backslashes_are_handled(body: bytes, depth: int) -> None:
    assert depth_of(body) == depth


def test_the_depth_limit_is_exact() -> None:
    check_depth(b"[" * 128 + b"]" * 128, 128)
    check_depth(b"[]" * 1000 + b'"' + b"[" * 1000 + b'"', 128)
    with pytest.raises(ApiError, match="the limit is 128 levels") as error:
        check_depth(b"[" * 129 + b"]" * 129, 128)
    assert (error.value.status, error.value.code) == (400, "invalid_json")


@pytest.mark.parametrize("unit", [b"[", b'"', b"\\", b'"\\"', b'"",', b"[],", b"{", b'{"a":[', b"x", b'\\\\"['])
def test_four_megabytes_of_anything_are_scanned_fast(unit: bytes) -> None:
    body = unit * (4 * 1024**2 // len(unit))
    begin_s = time.process_time()
    depth_of(body)
    assert time.process_time() - begin_s < 0.5  # 0.06 s is usual
