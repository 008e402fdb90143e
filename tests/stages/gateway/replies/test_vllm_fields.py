"""vLLM's additions to replies: keys that are null unless they were requested, and the metrics of a request."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of

USAGE = {"stream": True, "stream_options": {"include_usage": True}}
TIMES = m.FirstTimes(0, queued_s=10.0, started_s=10.25, first_s=10.75, num_cached=0)


def finish_at(
    gate: Gate, submit: m.Submit, settled_s: float, num_ids: int = 5, drafts: tuple[int, int] | None = None
) -> None:
    """The only output of a sequence: its last id was settled at `settled_s`."""
    ids = b"\0" * 4 * num_ids
    deltas = m.Deltas(
        [submit.request_id],
        [submit.attempt],
        [0],
        ["x"],
        [0],
        ids,
        [0],
        [num_ids],
        [int(m.Finish.STOP)],
        [None],
        [TIMES],
        settled_s=settled_s,
        drafts=[] if drafts is None else [m.DraftCounts(0, *drafts)],
    )
    gate.rig.send(deltas, "detokenize.0")


class TestTokenIds:
    @pytest.mark.parametrize("fields", [{}, {"return_token_ids": None}, {"return_token_ids": False}])
    def test_they_are_null_unless_requested(self, gate: Gate, fields: dict[str, Any]) -> None:
        response = gate.post(CHAT | fields)
        gate.serve()
        chat = response.result().json()
        assert chat["prompt_token_ids"] is None and chat["choices"][0]["token_ids"] is None
        response = gate.complete(COMPLETION | fields)
        gate.serve()
        (choice,) = response.result().json()["choices"]
        assert choice["prompt_token_ids"] is None and choice["token_ids"] is None

    def test_events_have_them_where_vllm_has_them(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"stream": True})
        gate.serve()
        first, *others = events_of(response.result().text)
        assert first["prompt_token_ids"] is None and "token_ids" not in first["choices"][0]
        for event in others:
            assert "prompt_token_ids" not in event and event["choices"][0]["token_ids"] is None
        response = gate.complete(COMPLETION | {"stream": True})
        gate.serve()
        for event in events_of(response.result().text):
            assert event["choices"][0]["prompt_token_ids"] is None and event["choices"][0]["token_ids"] is None


def test_prompt_logprobs_and_kv_transfer_params_are_null_and_not_in_streams(gate: Gate) -> None:
    response = gate.post(CHAT)
    gate.serve()
    chat = response.result().json()
    assert chat["prompt_logprobs"] is None and chat["kv_transfer_params"] is None
    response = gate.complete(COMPLETION)
    gate.serve()
    completion = response.result().json()
    assert completion["choices"][0]["prompt_logprobs"] is None and completion["kv_transfer_params"] is None
    response = gate.complete(COMPLETION | {"stream": True})
    gate.serve()
    assert "prompt_logprobs" not in response.result().text and "kv_transfer" not in response.result().text


class TestMetrics:
    """gateway.per_request_metrics"""

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_the_times_of_a_request_are_in_its_reply(self, tmp_path: Path, path: str) -> None:
        expected = {
            "time_to_first_token_ms": 500.0,
            "generation_time_ms": 1000.0,
            "queue_time_ms": 250.0,
            "mean_itl_ms": 250.0,
            "tokens_per_second": pytest.approx(5 / 1.5),
            "speculative_decoding": None,
        }
        with Gate(tmp_path, per_request_metrics=True) as gate:
            body = CHAT if path.endswith("chat/completions") else COMPLETION
            response = gate.post(body, path)
            finish_at(gate, gate.begin(), 11.75)
            assert response.result().json()["metrics"] == expected
            response = gate.post(body | USAGE, path)
            finish_at(gate, gate.begin(), 11.75)
            *events, last = events_of(response.result().text)
            assert last["metrics"] == expected and last["choices"] == []
            assert all("metrics" not in event for event in events)

    def test_they_say_what_came_of_proposed_tokens(self, tmp_path: Path) -> None:
        with Gate(tmp_path, per_request_metrics=True) as gate:
            response = gate.post(CHAT)
            finish_at(gate, gate.begin(), 11.75, drafts=(3, 4))
            counts = {"num_draft_tokens": 7, "num_accepted_tokens": 3}
            assert response.result().json()["metrics"]["speculative_decoding"] == counts

    def test_several_choices_have_none(self, tmp_path: Path) -> None:
        with Gate(tmp_path, per_request_metrics=True) as gate:
            response = gate.post(CHAT | {"n": 2})
            gate.serve()
            assert response.result().json()["metrics"] is None
            response = gate.complete(COMPLETION | USAGE | {"prompt": ["a", "b"]})
            gate.serve()
            gate.serve()
            assert "metrics" not in response.result().text

    def test_a_single_token_has_no_time_between_tokens(self, tmp_path: Path) -> None:
        with Gate(tmp_path, per_request_metrics=True) as gate:
            response = gate.post(CHAT)
            finish_at(gate, gate.begin(), 10.75, num_ids=1)
            metrics = response.result().json()["metrics"]
            assert metrics["generation_time_ms"] == 0.0 and "mean_itl_ms" not in metrics

    def test_they_are_off_by_default(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        gate.serve()
        assert response.result().json()["metrics"] is None
        response = gate.post(CHAT | USAGE)
        gate.serve()
        assert "metrics" not in response.result().text


class TestFinish:
    """The finish_reason comes with the last text, not in an event of its own."""

    def test_of_a_chat_with_tools_it_comes_with_the_last_delta(self, tmp_path: Path) -> None:
        tools = [{"type": "function", "function": {"name": "now"}}]
        with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes")) as gate:
            response = gate.post(CHAT | {"stream": True, "tools": tools})
            submit = gate.begin()
            gate.delta(submit, '<tool_call>\n{"name": "now", "arguments": {')
            gate.finish(submit, "}}\n</tool_call>")
            choices = [event["choices"][0] for event in events_of(response.result().text)]
        assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "tool_calls" and choices[-1]["delta"]["tool_calls"]

    def test_without_text_it_has_an_empty_delta(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"stream": True})
        submit = gate.begin()
        gate.delta(submit, "Hello")
        gate.rig.until(lambda load: load.num_open_requests == 1)
        gate.finish(submit)
        choices = [event["choices"][0] for event in events_of(response.result().text)]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello"
        assert choices[-1]["finish_reason"] == "stop"
