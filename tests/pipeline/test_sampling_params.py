"""What may be asked for, and what is said of what may not."""

import subprocess
import sys
from typing import Any

import pytest

import pipeline
from pipeline.sampling_params import SamplingParams


def test_the_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.seed, params.max_tokens, params.stop, params.stop_token_ids) == (None, 16, [], [])
    assert (params.ignore_eos, params.skip_special_tokens, params.include_stop_str_in_output) == (False, True, False)


def test_stops_are_kept_as_lists() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    params = SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2))  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == (["a", "b"], [1, 2])


def test_nobody_changes_them_later() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().n = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("n", 0, ValueError),
        ("n", 129, ValueError),
        ("n", 1.0, TypeError),
        ("n", True, TypeError),
        ("temperature", -0.1, ValueError),
        ("temperature", 2.1, ValueError),
        ("temperature", float("nan"), ValueError),
        ("temperature", "hot", TypeError),
        ("top_p", 0, ValueError),
        ("top_p", 1.1, ValueError),
        ("top_k", -2, ValueError),
        ("min_p", float("inf"), ValueError),
        ("seed", 2**64, ValueError),
        ("seed", -(2**63) - 1, ValueError),
        ("max_tokens", 0, ValueError),
        ("max_tokens", "16", TypeError),
        ("stop", "", ValueError),
        ("stop", ["x"] * 17, ValueError),
        ("stop", "x" * 257, ValueError),
        ("stop", [1], TypeError),
        ("stop", 1, TypeError),
        ("stop_token_ids", [-1], ValueError),
        ("stop_token_ids", [1] * 129, ValueError),
        ("stop_token_ids", ["1"], TypeError),
        ("stop_token_ids", 1, TypeError),
        ("ignore_eos", 1, TypeError),
        ("skip_special_tokens", None, TypeError),
    ],
)
def test_what_is_wrong_is_named(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=rf"^{field}(\[0\])? must "):
        SamplingParams(**{field: value})


def test_the_public_names_are_there_and_load_nothing_before_they_are_used() -> None:
    for name in pipeline.__all__:
        assert getattr(pipeline, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = pipeline.nonsense
    code = "import sys, pipeline; assert not {'zmq', 'msgspec', 'asyncio'} & set(sys.modules), sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
