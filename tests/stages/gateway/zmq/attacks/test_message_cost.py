"""A large message that would hold Python's lock for long while it is decoded is refused before."""

import asyncio
import struct
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.http_server.bodies.json_depth import LOCK_MS
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.zmq import large_messages
from pipeline.stages.gateway.zmq.large_messages import CONTAINER_NS, TEXT_NS, VALUE_NS, LargeMessages, check_cost
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate
from tests.stages.gateway.parsing.bodies import LIMITS

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=300)
    | st.binary(max_size=70_000)
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127), st.binary(max_size=20)),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=40), inner, max_size=20),
    max_leaves=40,
)


def cost_of(value: Any) -> int:
    match value:
        case dict():
            return CONTAINER_NS + sum(cost_of(key) + cost_of(one) for key, one in value.items())
        case list():
            return CONTAINER_NS + sum(map(cost_of, value))
        case str() | bytes() | msgspec.msgpack.Ext():
            return TEXT_NS
    return VALUE_NS


@given(VALUES)
def test_the_cost_is_that_of_all_values(value: Any) -> None:
    data = msgspec.msgpack.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        for cost_ns, is_refused in ((cost_of(value), False), (cost_of(value) - 1, True)):
            patch.setattr(large_messages, "LOCK_MS", cost_ns / 1_000_000)
            if is_refused:
                with pytest.raises(ApiError, match="too many values"):
                    check_cost(data)
            else:
                check_cost(data)


def test_bytes_that_are_no_messagepack_are_the_decoder_s() -> None:
    for data in (b"\xc1" * 1000, b"\xdb\xff\xff\xff\xff", b"\xdd", b"\xc6\xff", bytes(range(256))):
        check_cost(data)


@pytest.mark.parametrize("num_bytes", [4 * 1024**2, 32 * 1024**2])
def test_calls_of_a_byte_each_are_refused_before_they_are_decoded(num_bytes: int) -> None:
    """Four million of them took half a second, in which the loop had no turn."""
    begin = msgspec.msgpack.encode({"role": "assistant"})
    calls = b"\xaatool_calls\xdd" + struct.pack(">I", num_bytes) + b"\x80" * num_bytes
    data = b"\x81\xa8messages\x91\x82" + begin[1:] + calls
    message = ReceivedGenerate(1, msgspec.Raw(data), 0)
    messages = LargeMessages(lambda _: message)
    begin_s = time.process_time()
    read = asyncio.run(messages.read(data, "", lambda: LIMITS, lambda: None))
    assert isinstance(read.request, ApiError) and read.request.code == "too_many_values"
    assert time.process_time() - begin_s < 10 * LOCK_MS / 1000, "only heads are read, and none after the limit"
