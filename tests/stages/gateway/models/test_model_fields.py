"""What a body says about its model."""

from typing import Any

import pytest

from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.models.model_fields import MAX_KEEP_S, keep_s, model_fields_of


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (-1, -1.0),
        (90, 90.0),
        (1.5, 1.5),
        ("0", 0.0),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("100ms", 0.1),
        ("-1s", -1.0),
        ("1e3", ApiError),
        ("soon", ApiError),
        (True, ApiError),
        ([], ApiError),
        ("9" * 40, ApiError),
        (10**400, MAX_KEEP_S),
        (-(10**400), -1.0),
    ],
)
def test_a_time_is_seconds_or_a_duration_as_go_writes_it(value: Any, seconds: Any) -> None:
    if seconds is ApiError:
        with pytest.raises(ApiError, match="need seconds or a duration"):
            keep_s(value)
    else:
        assert keep_s(value) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    ("body", "has_input"),
    [
        (b'{"model": "a"}', False),
        (b'{"model": "a", "prompt": "", "messages": [], "input": null}', False),
        (b'{"model": "a", "prompt": "x"}', True),
        (b'{"model": "a", "messages": [{"role": "user"}]}', True),
        (b'{"model": "a", "input": [1]}', True),
    ],
)
def test_a_request_without_input_only_loads_or_unloads(body: bytes, has_input: bool) -> None:
    assert model_fields_of(body).has_input == has_input


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "a"} x', b'{"model": "\xff"}'])
def test_what_is_no_json_object_is_400(body: bytes) -> None:
    with pytest.raises(ApiError) as raised:
        model_fields_of(body)
    assert raised.value.status == 400
