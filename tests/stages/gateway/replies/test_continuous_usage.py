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
def test_only_the_last_usage_has_the_cached_prompt_tokens(gate: Gate, path: str, body: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = gate.post(body | {"stream": True, "stream_options": options}, path)
    submit = gate.begin()
    gate.delta(submit, "a", num_cached=2)
    gate.delta(submit, "b", finish=m.Finish.STOP)
    *usages, last = (event["usage"] for event in events_of(response.result().text))
    assert any(usage["completion_tokens"] for usage in usages)
    names = {"prompt_tokens", "completion_tokens", "total_tokens"}
    assert [set(usage) for usage in usages] == [names] * len(usages), "as in vLLM"
    assert last["prompt_tokens_details"] == {"cached_tokens": 2}
    assert [usage["total_tokens"] for usage in usages] == [3 + usage["completion_tokens"] for usage in usages]


def test_the_first_event_of_a_chat_has_no_output(gate: Gate) -> None:
    """As in vLLM, also if the first tokens arrive before it is sent."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = gate.post(CHAT | {"stream": True, "stream_options": options})
    gate.delta(gate.begin(), "a", finish=m.Finish.STOP)
    first, *_, last = events_of(response.result().text)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert (first["usage"]["completion_tokens"], first["usage"]["total_tokens"]) == (0, 3)
    assert last["usage"]["completion_tokens"] == 1


def test_an_echoed_message_has_no_output(gate: Gate) -> None:
    """It is the client's own text, also if the first tokens arrive before it is sent."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    message = {"role": "assistant", "content": "An apple a day"}
    body = CHAT | {"messages": [*CHAT["messages"], message], "echo": True}
    response = gate.post(body | {"stream": True, "stream_options": options})
    gate.delta(gate.begin(), "a", finish=m.Finish.STOP)
    _, echoed, *_, last = events_of(response.result().text)
    assert echoed["choices"][0]["delta"] == {"content": "An apple a day"}
    assert (echoed["usage"]["completion_tokens"], last["usage"]["completion_tokens"]) == (0, 1)
