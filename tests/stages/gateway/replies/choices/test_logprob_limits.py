"""How many logprobs a request may ask for."""

import math
from typing import Any

import pytest

from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate
from tests.stages.gateway.replies.choices.scored import token_outputs


class TestPromptLogprobsLimit:
    """Each choice repeats them, so a reply may be many times larger than the computed values."""

    MOST = 2**20
    """limits.max_prompt_logprobs"""

    @pytest.mark.parametrize(
        ("fields", "each"),
        [
            ({"prompt_logprobs": 20, "n": 128}, 21 * 128),
            ({"echo": True, "logprobs": 3, "n": 100}, 4 * 100),
            ({"echo": True, "logprobs": 3, "n": 100, "stream": True}, 4 * 100),
            ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, 5),
        ],
    )
    def test_prompt_logprobs_above_the_limit_are_rejected(self, gate: Gate, fields: dict[str, Any], each: int) -> None:
        num_ids = self.MOST // each
        response = gate.complete(COMPLETION | fields)
        submit = gate.submit()
        gate.accept(submit, num_ids + 1)
        refused = response.result()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_value")
        assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in fields else "logprobs")
        assert f"{(num_ids + 1) * each} log probabilities" in error["message"]
        assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id

    def test_all_prompts_count_together(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "prompt_logprobs": 0})
        first, second = gate.submit(), gate.submit()
        gate.accept(first, self.MOST // 2)
        gate.accept(second, self.MOST // 2 + 1)
        assert response.result().status_code == 400

    def test_a_chat_counts_them_once(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"prompt_logprobs": 0, "n": 2})
        submit = gate.submit()
        gate.accept(submit, self.MOST)
        for index in range(2):
            gate.finish(submit, "a", index)
        assert response.result().status_code == 200

    def test_tokens_only_errors_name_the_nested_field(self, gate: Gate) -> None:
        body = {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1}}
        response = gate.post(body, "/inference/v1/generate")
        gate.reject(gate.submit(), m.Failure(400, "'bad_words[0]' is empty", "bad_words"))
        error = response.result().json()["error"]
        assert error["param"] == "sampling_params.bad_words"
        assert error["message"] == "'sampling_params.bad_words[0]' is empty"
        response = gate.post(body, "/inference/v1/generate")
        gate.accept(gate.submit(), self.MOST)
        assert response.result().json()["error"]["param"] == "sampling_params.prompt_logprobs"


def test_top_logprobs_are_bounded_by_the_vocabulary(gate: Gate) -> None:
    response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 3})
    payload = token_outputs(-0.5, top=[(1, -0.5), (0, -1.0), (-1, -math.inf)])
    gate.delta(gate.begin(), "a", token_outputs=payload, pieces=[b"a", b"a", b"b", b""], finish=m.Finish.STOP)
    (one,) = response.result().json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in one["top_logprobs"]] == ["a", "b"]
