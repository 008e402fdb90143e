"""What the router reads in a body."""

import json
from typing import Any

import pytest

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
