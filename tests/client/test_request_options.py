"""Request options are checked before a request is sent."""

import math
from itertools import islice
from typing import Any

import pytest

from pipeline.client.client import ServerInfo
from pipeline.client.inputs.prompts import prompt_of
from pipeline.client.inputs.request_options import RequestOptions, checked, options_for
from pipeline.errors import PromptError

INFO = ServerInfo("tiny", 100, 8, 1000, 1, 1024, "", 4096)


def test_valid_options_are_accepted() -> None:
    assert checked() == RequestOptions(0, None, None)
    for priority in (-(2**31), 2**31 - 1):
        assert checked(priority, "é" * 1024, 5).priority == priority


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"priority": "high"}, "priority must be an integer, not 'high'"),
        ({"priority": True}, "priority must be an integer, not True"),
        ({"priority": 2**31}, "priority must be from -2147483648 to 2147483647, not 2147483648"),
        ({"cache_salt": 5}, "cache_salt must be a string, not 5"),
        ({"cache_salt": ""}, "cache_salt must have 1 to 1024 characters, not 0"),
        ({"cache_salt": "x" * 1025}, "cache_salt must have 1 to 1024 characters, not 1025"),
        ({"cache_salt": "\ud800"}, "cache_salt contains a lone surrogate, which is not a valid character"),
        ({"timeout_s": "5"}, "timeout_s must be a number, not '5'"),
        ({"timeout_s": 0}, "timeout_s must be above 0 and at most 1,000,000, not 0"),
        ({"timeout_s": math.nan}, "timeout_s must be above 0 and at most 1,000,000, not nan"),
        ({"timeout_s": math.inf}, "timeout_s must be above 0 and at most 1,000,000, not inf"),
    ],
)
def test_an_invalid_option_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        checked(**options)
    assert str(raised.value) == words


def test_a_batch_has_one_priority_for_all_requests_or_one_for_each() -> None:
    assert list(islice(options_for(None, "a", 5, 3), 3)) == [RequestOptions(0, "a", 5)] * 3
    assert [one.priority for one in islice(options_for(7, None, None, 2), 2)] == [7, 7]
    assert [one.priority for one in islice(options_for([1, -2], None, None, 2), 2)] == [1, -2]


def test_a_batch_of_a_different_length_is_rejected() -> None:
    with pytest.raises(PromptError, match="priority has 2 entries for 3 prompts: give one, or one for each"):
        options_for([1, 2], None, None, 3)
    options = options_for([1, 2], None, None, None)  # an iterator's length is not known
    assert len(list(islice(options, 2))) == 2
    with pytest.raises(PromptError, match="priority has 2 entries, but there are more prompts"):
        next(options)


@pytest.mark.parametrize("priority", ["high", 1.5, [1, "x"], {"a": 1}])
def test_an_invalid_priority_of_a_batch_is_named(priority: Any) -> None:
    with pytest.raises(PromptError, match="priority must be an integer"):
        options_for(priority, None, None, 2)


def test_a_prompt_may_have_its_own_cache_salt() -> None:
    assert prompt_of({"prompt": "Hi", "cache_salt": "a"}, "prompt", INFO).cache_salt == "a"
    assert prompt_of({"prompt_token_ids": [5], "cache_salt": "a"}, "prompt", INFO).cache_salt == "a"
    assert prompt_of({"prompt": "Hi", "cache_salt": None}, "prompt", INFO).cache_salt is None
    with pytest.raises(PromptError, match=r"^prompts\[3\]: cache_salt must be a string, not 5"):
        prompt_of({"prompt": "Hi", "cache_salt": 5}, "prompts[3]", INFO)
