"""Keys of prefixes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.routing import keys


def chat(*texts: str) -> bytes:
    return keys.message_bytes([{"role": "user", "content": text} for text in texts])


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(1, 40))
def test_equal_keys_mean_equal_bytes_from_the_first_on(one: bytes, other: bytes, size: int) -> None:
    for index, (left, right) in enumerate(zip(keys.keys_of(one, size), keys.keys_of(other, size), strict=False)):
        assert (left == right) == (one[: (index + 1) * size] == other[: (index + 1) * size])


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(1, 40))
def test_a_longer_prompt_has_the_keys_of_its_beginning(data: bytes, more: bytes, size: int) -> None:
    first = keys.keys_of(data, size)
    assert len(first) == len(data) // size
    assert keys.keys_of(data + more, size)[: len(first)] == first


def test_the_next_turn_begins_with_the_keys_of_this_one() -> None:
    turns = ["a question " * 200, "an answer " * 200, "another question"]
    first, second = keys.keys_of(chat(*turns[:2])), keys.keys_of(chat(*turns))
    assert len(first) == 4
    assert second[: len(first)] == first


def test_the_order_of_a_messages_fields_does_not_matter() -> None:
    assert keys.message_bytes([{"role": "user", "content": "x"}]) == keys.message_bytes(
        [{"content": "x", "role": "user"}]
    )


def test_tools_models_and_salts_separate_prompts() -> None:
    data = b"x" * 4096
    assert keys.keys_of(keys.message_bytes([], [{"name": "f"}]) + data) != keys.keys_of(data)
    roots = {keys.root(*each) for each in (("m", ""), ("", "m"), ("m", "s"), ("ms", ""), ("", ""))}
    assert len({keys.keys_of(data, root=root)[-1] for root in roots}) == 5


def test_a_long_prompt_has_a_bounded_number_of_keys() -> None:
    assert len(keys.keys_of(bytes(100 * 16), 16, max_keys=7)) == 7


def test_blocks_of_ids_have_keys() -> None:
    ids = np.arange(100, dtype=np.int32)
    found = keys.token_keys(ids.tobytes(), 16)
    assert len(found) == 6
    ids[50] = 0
    assert keys.token_keys(ids.tobytes(), 16)[:3] == found[:3]
    assert keys.token_keys(ids.tobytes(), 16)[3:] != found[3:]
