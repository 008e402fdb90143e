"""/tokenize, /detokenize and /load."""

import json
from typing import Any

import httpx
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_detokenize, parse_tokenize
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from tests.stages.gateway.gate import CHAT, FACTS, MODEL, Gate
from tests.stages.gateway.parsing.bodies import refused

LIMITS = RequestLimits(model=MODEL, max_sequences=64)


def answer(gate: Gate, submit: m.Submit, ids: list[int], **shown: Any) -> None:
    """Play ingest: accept with these ids."""
    data = np.array(ids, np.int32).tobytes()
    gate.rig.send(m.Accepted(submit.request_id, submit.attempt, data, **shown), "ingest.0")


def assert_all_released(gate: Gate) -> None:
    gate.rig.until(lambda load: load.num_open_requests == 0)
    assert gate.rig.nothing("schedule", 0)


class TestTokenize:
    def test_tokenize_returns_ids_and_their_count(self, gate: Gate) -> None:
        response = gate.post({"model": MODEL, "prompt": "Hi there"}, "/tokenize")
        submit = gate.submit()
        assert submit.prompt == m.TextPrompt("Hi there")
        assert (submit.options.max_tokens, submit.prompt_options) == (0, m.PromptOptions(any_length=True))
        answer(gate, submit, [7, 8])
        assert (response.result().status_code, response.result().json()) == (
            200,
            {"count": 2, "max_model_len": FACTS.max_model_len, "tokens": [7, 8], "token_strs": None},
        )
        assert_all_released(gate)

    def test_tokenize_returns_token_strings_if_requested(self, gate: Gate) -> None:
        body = {"prompt": "é", "return_token_strs": True, "add_special_tokens": False}
        response = gate.post(body, "/tokenize")
        submit = gate.submit()
        assert submit.prompt_options == m.PromptOptions(False, any_length=True, with_token_strs=True)
        answer(gate, submit, [7, 8], token_strs=["Ã", "©"])
        assert response.result().json()["token_strs"] == ["Ã", "©"]

    @pytest.mark.parametrize("add_generation_prompt", [None, True, False])
    def test_tokenize_accepts_a_chat(self, gate: Gate, add_generation_prompt: bool | None) -> None:
        fields = {} if add_generation_prompt is None else {"add_generation_prompt": add_generation_prompt}
        response = gate.post(CHAT | fields, "/tokenize")
        submit = gate.submit()
        assert submit.prompt == m.ChatPrompt([m.ChatMessage("user", "Hi")], add_generation_prompt is not False)
        answer(gate, submit, [1])
        assert response.result().json()["count"] == 1

    def test_an_empty_input_gives_an_empty_result(self, gate: Gate) -> None:
        response = gate.post({"prompt": ""}, "/tokenize")
        answer(gate, gate.submit(), [])
        assert response.result().json()["tokens"] == []

    def test_a_rejection_has_its_status_and_field(self, gate: Gate) -> None:
        response = gate.post(CHAT, "/tokenize")
        submit = gate.submit()
        gate.reject(submit, m.Failure(400, "the template refused", "messages"))
        result = response.result()
        assert (result.status_code, result.json()["error"]["param"]) == (400, "messages")
        assert_all_released(gate)

    def test_ids_in_shared_memory_are_released(self, gate: Gate) -> None:
        response = gate.post({"prompt": "x"}, "/tokenize")
        submit = gate.submit()
        ref = gate.rig.arena("ingest.0").put(np.arange(5000, dtype=np.int32).tobytes(), readers=("gateway.0",))
        assert not isinstance(ref, bytes)
        gate.rig.send(m.Accepted(submit.request_id, 1, ref), "ingest.0")
        assert gate.rig.receive("ingest", m.Release) == m.Release([ref.offset], [ref.generation], "gateway.0")
        assert response.result().json()["tokens"] == list(range(5000))

    def test_a_disconnect_aborts_in_ingest_only_and_the_credit_is_held_until_the_reply(self, gate: Gate) -> None:
        with gate.raw({"prompt": "x"}, "/tokenize"):
            submit = gate.submit()
        assert gate.rig.receive("ingest", m.Abort) == m.Abort(submit.request_id, 1)
        assert gate.rig.load().num_open_requests == 1
        gate.reject(submit, m.Failure(499, "the request was aborted", code="aborted"))
        assert_all_released(gate)

    def test_a_lookup_takes_a_credit(self, tmp_path: Any) -> None:
        with Gate(tmp_path, max_open_sequences=1) as gate:
            first = gate.post({"prompt": "x"}, "/tokenize")
            submit = gate.submit()
            refused = gate.client.post("/detokenize", json={"tokens": [1]})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
            answer(gate, submit, [1])
            assert first.result().status_code == 200

    def test_a_lookup_ends_when_a_stage_dies(self, gate: Gate) -> None:
        response = gate.post({"prompt": "x"}, "/tokenize")
        gate.submit()
        gate.rig.send(m.StageDied("ingest.0", "exit code 1"))
        gate.rig.receive("supervisor", m.Drained)
        assert response.result().status_code == 500


class TestDetokenize:
    def test_detokenize_returns_the_text(self, gate: Gate) -> None:
        response = gate.post({"model": MODEL, "tokens": [5, 6]}, "/detokenize")
        submit = gate.submit()
        assert submit.prompt == m.IdsPrompt(np.array([5, 6], np.int32).tobytes())
        assert submit.prompt_options == m.PromptOptions(any_length=True, with_text=True)
        answer(gate, submit, [5, 6], text="hé")
        assert (response.result().status_code, response.result().json()) == (200, {"prompt": "hé"})
        assert_all_released(gate)

    def test_an_unknown_id_is_named(self, gate: Gate) -> None:
        response = gate.post({"tokens": [1, 2, 3, 10**6]}, "/detokenize")
        gate.reject(gate.submit(), m.Failure(400, "token id 1000000 …", "prompt[3]"))
        assert response.result().json()["error"]["param"] == "tokens[3]"

    def test_an_empty_input_gives_an_empty_result(self, gate: Gate) -> None:
        response = gate.post({"tokens": []}, "/detokenize")
        answer(gate, gate.submit(), [], text="")
        assert response.result().json() == {"prompt": ""}


BAD: list[tuple[Any, Any, str]] = [
    (parse_tokenize, {}, "prompt"),
    (parse_tokenize, {"prompt": "x", "messages": CHAT["messages"]}, "messages"),
    (parse_tokenize, {"prompt": ["x"]}, "prompt"),
    (parse_tokenize, {"messages": []}, "messages"),
    (parse_tokenize, {"messages": [{"role": "user"}]}, "messages[0].content"),
    (parse_tokenize, {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    (parse_tokenize, {"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
    (parse_tokenize, {"prompt": "x", "return_token_strs": "yes"}, "return_token_strs"),
    (parse_tokenize, {"prompt": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
    (parse_tokenize, {"prompt": "\ud800"}, "prompt"),
    (parse_detokenize, {}, "tokens"),
    (parse_detokenize, {"tokens": "x"}, "tokens"),
    (parse_detokenize, {"tokens": [1, 2, 3, -1]}, "tokens[3]"),
    (parse_detokenize, {"tokens": [2**31]}, "tokens[0]"),
    (parse_detokenize, {"tokens": [1.5]}, "tokens[0]"),
    (parse_detokenize, {"tokens": [True]}, "tokens[0]"),
    (parse_detokenize, {"tokens": [1] * (m.MAX_SHOWN_IDS + 1)}, "tokens"),
]


@pytest.mark.parametrize(("parse", "body", "param"), BAD)
def test_an_error_names_the_invalid_field(parse: Any, body: Any, param: str) -> None:
    error = refused(body, parse)
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize("parse", [parse_tokenize, parse_detokenize])
def test_an_unknown_model_is_404_and_the_model_is_optional(parse: Any) -> None:
    error = refused({"model": "gpt-9", "prompt": "x", "tokens": [1]}, parse)
    assert (error.status, error.param, error.code) == (404, "model", "model_not_found")
    assert parse(json.dumps({"prompt": "x", "tokens": [1]}).encode(), LIMITS).model == MODEL


class TestLoad:
    def load(self, gate: Gate) -> dict[str, int]:
        result: httpx.Response = gate.client.get("/load")
        assert result.status_code == 200
        loads: dict[str, int] = result.json()
        return loads

    def test_load_counts_only_generation_requests(self, gate: Gate) -> None:
        assert self.load(gate)["server_load"] == 0
        chat = gate.post(CHAT | {"n": 3})
        completion = gate.complete({"model": MODEL, "prompt": ["a", "b"]})
        submits = [gate.begin() for _ in range(3)]
        prompt_only = gate.post({"prompt": "x"}, "/tokenize")
        looked_up = gate.submit()
        assert self.load(gate)["server_load"] == 2
        answer(gate, looked_up, [1])
        for submit in submits:
            for index in range(submit.options.n):
                gate.finish(submit, "x", index)
        assert {r.result().status_code for r in (chat, completion, prompt_only)} == {200}
        gate.rig.until(lambda load: load.num_open_requests == 0)
        assert self.load(gate)["server_load"] == 0

    def test_load_does_not_count_disconnected_clients(self, gate: Gate) -> None:
        with gate.raw(CHAT):
            submit = gate.begin()
            assert self.load(gate)["server_load"] == 1
        gate.rig.receive("schedule", m.Abort)
        assert self.load(gate)["server_load"] == 0
        gate.finish(submit, finish=m.Finish.ABORT)
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_load_is_served_before_start_and_while_draining(self, tmp_path: Any) -> None:
        with Gate(tmp_path, start=False) as gate:
            assert self.load(gate)["server_load"] == 0
