"""What the router reads in a body."""

import json
import tracemalloc
from typing import Any

import pytest

from pipeline.deploy import prompts
from pipeline.deploy.prompts import KEY_TOKENS, prompt_of

LONG = "a long text " * 400


def prompt(**body: Any) -> Any:
    return prompt_of(json.dumps(body).encode())


def test_the_next_turn_of_a_chat_has_the_keys_of_this_one():
    first = [{"role": "user", "content": LONG}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": LONG}]
    keys, more = prompt(messages=first, model="m").keys, prompt(messages=second, model="m").keys
    assert len(keys) >= 4 and list(more[: len(keys)]) == list(keys) and len(more) > len(keys)


@pytest.mark.parametrize("change", [{"model": "other"}, {"cache_salt": "s"}, {"tools": [{"a": 1}]}])
def test_what_changes_the_prefix_changes_the_keys(change: dict[str, Any]):
    body = {"messages": [{"role": "user", "content": LONG}], "model": "m"}
    assert not set(prompt(**body).keys) & set(prompt(**(body | change)).keys)


def test_prompts_of_two_api_keys_share_no_key():
    for body in (b'{"prompt":"%s"}' % (LONG.encode()), json.dumps({"prompt": list(range(3 * KEY_TOKENS))}).encode()):
        one, other, unknown = (set(prompt_of(body, scope).keys) for scope in ("01", "02", ""))
        assert one and other and unknown and not one & other and not one & unknown


def test_texts_ids_and_inputs_have_keys():
    assert (
        prompt(prompt=LONG).keys and prompt(input=LONG).keys and prompt(input=[{"role": "user", "content": LONG}]).keys
    )
    ids = prompt(prompt=list(range(3 * KEY_TOKENS)))
    assert len(ids.keys) == 3 and ids.num_tokens == 3 * KEY_TOKENS


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": {}}', b'{"prompt": [99999999999]}'])
def test_any_body_has_a_size(body: bytes):
    found = prompt_of(body)
    assert found.num_tokens >= 1 and found.num_sequences == 1


def test_sequences_are_counted():
    assert prompt(prompt="x", n=4).num_sequences == 4
    assert prompt(prompt="x", n="many").num_sequences == 1


MANY = 1024**2
BODIES = {
    "ids": b'{"prompt":[' + b",".join([b"1"] * (MANY // 2)) + b"]}",
    "lists": b'{"prompt":[' + b",".join([b"[]"] * (MANY // 3)) + b"]}",
    "messages": b'{"messages":[' + b",".join([b"{}"] * (MANY // 3)) + b"]}",
    "tools": b'{"messages":[],"tools":[' + b",".join([b'{"a":1}'] * (MANY // 8)) + b"]}",
    "a model": b'{"model":[' + b",".join([b"[]"] * (MANY // 3)) + b"]}",
    "another field": b'{"x":[' + b",".join([b"[]"] * (MANY // 3)) + b"]}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_of_many_small_values_makes_no_object_for_each(body: bytes):
    """A list takes 56 bytes, so a body that is decoded takes 20 times its size, and its time."""
    tracemalloc.start()
    try:
        found = prompt_of(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.num_tokens >= 1 and peak < 5 * len(body)


def test_a_chat_of_many_values_still_has_the_keys_of_its_beginning():
    first = [{"role": "user", "content": [{"type": "text", "text": "a"}] * 40_000}]
    keys, more = prompt(messages=first).keys, prompt(messages=[*first, {"role": "assistant", "content": "b"}]).keys
    assert len(keys) > 100 and list(more[: len(keys) - 1]) == list(keys[:-1])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("1", 1.0), ("0.5", 0.5), ("1000000", 1e6), ("0", None), ("-1", None), ("1000001", None), ("true", None),
     ('"1"', None), ("null", None), ("1e999", None), ("[1]", None)],
)  # fmt: skip
def test_the_time_of_a_request_is_read_if_a_replica_would_take_it(value: str, expected: float | None):
    assert prompts.read(b'{"prompt":"a","timeout_s":%b}' % value.encode())[1] == expected
    assert prompts.read(b'{"prompt":[{}')[1] is None
