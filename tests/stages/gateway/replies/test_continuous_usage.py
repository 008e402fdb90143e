"""With `stream_options.continuous_usage_stats`, each event has the complete usage of its choice."""

from typing import Any

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of

IDS = {"token_ids": [1], "sampling_params": {}}


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION), ("/inference/v1/generate", IDS)],
)
def test_usage_has_the_cached_prompt_tokens(gate: Gate, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = gate.post(body | {"stream": True, "stream_options": options}, path)
    submit = gate.begin()
    gate.delta(submit, "a", num_cached=2)
    gate.delta(submit, "b", finish=m.Finish.STOP)
    usages = [event["usage"] for event in events_of(response.result().text)]
    begun = [usage for usage in usages if usage["completion_tokens"]]
    assert len(begun) >= 2
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in begun] == [2] * len(begun)
    assert [usage["total_tokens"] for usage in usages] == [3 + usage["completion_tokens"] for usage in usages]
