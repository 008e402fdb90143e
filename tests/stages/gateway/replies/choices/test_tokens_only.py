"""POST /inference/v1/generate, and the render routes that return bodies for it."""

import json
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.tokens.parsing import parse_tokens_only
from tests.stages.gateway.gate import (
    CHAT,
    COMPLETION,
    END,
    NONE_CACHED,
    Gate,
    ends_with_an_error,
    events_of,
    read_until,
)
from tests.stages.gateway.parsing.test_sampling_fields import KNOWN, refused_by
from tests.stages.gateway.replies.choices.scored import token_outputs

PATH = "/inference/v1/generate"
BODY = {"token_ids": [1, 2, 3], "sampling_params": {}}


def params(**fields: Any) -> dict[str, Any]:
    return BODY | {"sampling_params": fields}


class TestParse:
    def test_a_body_is_parsed_into_the_usual_options(self) -> None:
        body = params(
            temperature=0, max_tokens=5, n=2, stop="x", min_tokens=1, logprobs=2, structured_outputs={"regex": "a"}
        )
        parsed = parse_tokens_only(json.dumps(body).encode(), KNOWN)
        assert parsed.prompts == [m.IdsPrompt(np.array([1, 2, 3], "<i4").tobytes())]
        assert parsed.options == m.GenerationOptions(
            n=2,
            max_tokens=5,
            temperature=0.0,
            min_tokens=1,
            stop=["x"],
            num_logprobs=2,
            grammar=m.Grammar("regex", "a", "sampling_params.structured_outputs.regex"),
        )
        assert (parsed.model, parsed.n) == ("tiny", 2)
        assert parse_tokens_only(json.dumps(BODY).encode(), KNOWN).options.max_tokens == 16
        assert parse_tokens_only(json.dumps(params(max_tokens=None)).encode(), KNOWN).options.max_tokens == 16

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"token_ids": [1]}, "sampling_params"),
            ({"sampling_params": {}}, "token_ids"),
            (BODY | {"token_ids": []}, "token_ids"),
            (BODY | {"token_ids": [1, -1]}, "token_ids[1]"),
            (BODY | {"token_ids": [1] * 513}, "token_ids"),
            (params(temperature=3), "sampling_params.temperature"),
            (params(n=129), "sampling_params.n"),
            (params(seed=2**64), "sampling_params.seed"),
            (params(logit_bias={"5": 1, "7": [1]}), "sampling_params.logit_bias.7"),
            (params(stop_token_ids=[1, 1000]), "sampling_params.stop_token_ids[1]"),
            (params(logit_bias={"x": 1}), "sampling_params.logit_bias.x"),
            (params(allowed_token_ids=[1000]), "sampling_params.allowed_token_ids[0]"),
            (params(logprobs=21), "sampling_params.logprobs"),
            (params(max_tokens=0), "sampling_params.max_tokens"),
            (params(structured_outputs={"regex": ""}), "sampling_params.structured_outputs.regex"),
            (params(best_of=2), "sampling_params.best_of"),
            (params(extra_args={"a": 1}), "sampling_params.extra_args"),
            (BODY | {"features": {}}, "features"),
            (BODY | {"stream_options": {"include_usage": True}}, "stream_options"),
        ],
    )
    def test_an_invalid_field_is_named(self, body: Any, param: str) -> None:
        error = refused_by(KNOWN, body, parse_tokens_only)
        assert (error.status, error.param) == (400, param)
        assert f"'{param}'" in error.message or "the prompt has 513" in error.message

    def test_another_model_is_404(self) -> None:
        assert refused_by(KNOWN, BODY | {"model": "x"}, parse_tokens_only).status == 404


class TestReplies:
    def test_replies_have_ids_and_no_text(self, gate: Gate) -> None:
        response = gate.post(BODY | {"request_id": "me", "sampling_params": {"n": 2, "logprobs": 1}}, PATH)
        submit = gate.begin()
        top = [(7, -0.5)]
        gate.delta(submit, "text", 2, token_outputs=token_outputs(-1.0, -2.0, top=top), finish=m.Finish.STOP)
        gate.delta(submit, "x", 1, index=1, token_outputs=token_outputs(-3.0, top=top), finish=m.Finish.LENGTH)
        body = response.result().json()
        tops = [{"token": "token_id:7", "logprob": -0.5, "bytes": None}]

        def entry(token: str, logprob: float) -> dict[str, Any]:
            return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": tops}

        assert body == {
            "request_id": "me",
            "choices": [
                {
                    "index": 0,
                    "logprobs": {"content": [entry("token_id:0", -1.0), entry("token_id:1", -2.0)], "refusal": None},
                    "finish_reason": "stop",
                    "token_ids": [0, 1],
                },
                {
                    "index": 1,
                    "logprobs": {"content": [entry("token_id:0", -3.0)], "refusal": None},
                    "finish_reason": "length",
                    "token_ids": [0],
                },
            ],
            "prompt_logprobs": None,
            "kv_transfer_params": None,
            "usage": {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6, **NONE_CACHED},
        }

    def test_prompt_logprobs_are_returned(self, gate: Gate) -> None:
        response = gate.post(params(prompt_logprobs=0), PATH)
        submit = gate.begin()
        assert not submit.options.with_pieces and not submit.prompt_options.with_pieces
        gate.delta(submit, prompt=(0, token_outputs(-1.0, -2.0), []), finish=m.Finish.STOP)
        body = response.result().json()
        one = {"rank": None, "decoded_token": "token_id:1"}
        assert body["prompt_logprobs"][:2] == [None, {"1": {"logprob": -1.0, **one}}]
        assert body["request_id"].startswith("generate-")

    def test_a_stream_has_each_id_once(self, gate: Gate) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = gate.post(BODY | {"stream": True, "stream_options": options}, PATH)
        submit = gate.begin()
        gate.delta(submit, "", 2)
        gate.delta(submit, "ab", 1)
        gate.delta(submit, "", 0, finish=m.Finish.LENGTH)
        events = events_of(response.result().text)
        *chunks, last = events
        assert [one for chunk in chunks for one in chunk["choices"][0]["token_ids"]] == [0, 1, 2]
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
        assert all(set(chunk["choices"][0]) == {"index", "logprobs", "finish_reason", "token_ids"} for chunk in chunks)
        assert chunks[-1]["usage"]["completion_tokens"] == 3
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 3)

    def test_a_stream_that_fails_ends_with_the_error(self, gate: Gate) -> None:
        connection = gate.raw(BODY | {"stream": True}, PATH)
        submit = gate.begin()
        gate.delta(submit, "a", 1)
        assert b'"token_ids":[0]' in read_until(connection, b'"token_ids"')
        gate.delta(submit, "", 0, finish=m.Finish.ERROR)
        assert ends_with_an_error(read_until(connection, END), "the server could not finish this request")
        connection.close()

    def test_a_rejection_names_the_ids(self, gate: Gate) -> None:
        response = gate.post(BODY, PATH)
        gate.reject(gate.submit(), m.Failure(400, "no such id", "prompt[1]"))
        assert response.result().json()["error"]["param"] == "token_ids[1]"


class TestRendering:
    def accept(self, gate: Gate, text: str) -> m.Submit:
        submit = gate.submit()
        ids = np.arange(5, 8, dtype=np.int32).tobytes()
        gate.rig.send(m.Accepted(submit.request_id, submit.attempt, ids, text), "ingest.0")
        return submit

    def test_rendering_a_chat_returns_a_body_to_generate_from(self, gate: Gate) -> None:
        fields = {"temperature": 0.5, "logprobs": True, "top_logprobs": 3, "response_format": {"type": "json_object"}}
        response = gate.post(CHAT | fields | {"request_id": "me", "n": 3}, "/v1/chat/completions/render")
        submit = self.accept(gate, "<s>Hi")
        assert (submit.options.max_tokens, submit.options.n, submit.prompt_options.with_text) == (0, 1, True)
        assert submit.options.grammar == m.Grammar("json_object", "", "response_format")
        body = response.result().json()
        assert body == {
            "request_id": "me",
            "token_ids": [5, 6, 7],
            "sampling_params": {
                "response_format": {"type": "json_object"},
                "n": 3,
                "temperature": 0.5,
                "max_tokens": 509,
                "logprobs": 3,
            },
            "model": "tiny",
            "stream": False,
            "stream_options": None,
            "cache_salt": None,
            "priority": 0,
            "prompt": "<s>Hi",
        }
        parsed = parse_tokens_only(json.dumps(body).encode(), KNOWN)
        assert (parsed.n, parsed.options.max_tokens, parsed.details.num_top) == (3, 509, 3)

    def test_rendering_completions_returns_a_list(self, gate: Gate) -> None:
        fields = {"prompt": ["a", [1, 2]][:1] * 2, "stream": True, "max_tokens": 4, "guided_json": {"a": 1}}
        response = gate.post(COMPLETION | fields, "/v1/completions/render")
        self.accept(gate, "a")
        self.accept(gate, "b")
        first, second = response.result().json()
        assert first["sampling_params"] == second["sampling_params"] == {"guided_json": {"a": 1}, "max_tokens": 4}
        assert first["request_id"].startswith("cmpl-") and first["request_id"] != second["request_id"]
        assert {first["prompt"], second["prompt"]} == {"a", "b"} and first["stream"]
        assert parse_tokens_only(json.dumps(first).encode(), KNOWN).stream

    def test_an_invalid_request_is_not_rendered(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"temperature": 3}, "/v1/chat/completions/render").result()
        assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
        response = gate.post(COMPLETION | {"echo": True}, "/v1/completions/render").result()
        assert (response.status_code, response.json()["error"]["param"]) == (400, "echo")

    def test_a_rendered_request_is_not_open(self, gate: Gate) -> None:
        response = gate.post(CHAT, "/v1/chat/completions/render")
        self.accept(gate, "x")
        assert response.result().status_code == 200
        assert gate.client.get("/load").json()["open_sequences"] == 0
