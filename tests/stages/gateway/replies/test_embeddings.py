"""POST /v1/embeddings runs one step for each input and returns its vector."""

import base64
import json
import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.parsing.test_sampling_fields import KNOWN, refused_by

PATH = "/v1/embeddings"
BODY = {"model": "tiny", "input": "Hi"}
VECTOR = np.array([3, 0, 4, 0, 0, 0, 0, 12], "<f4")


def give(gate: Gate, submit: m.Submit, vector: Any = VECTOR) -> None:
    gate.delta(submit, "?", token_outputs=np.asarray(vector, "<f4").tobytes(), finish=m.Finish.LENGTH)


class TestParse:
    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"input": []}, "input", "must not be an empty array"),
            ({"input": ["a", 1]}, "input", "not a mixture"),
            ({"input": ["a", []]}, "input", "not a mixture"),
            ({"input": [[1], []]}, "input[1]", "must not be an empty array"),
            ({"input": [[1], [1] * 513]}, "input[1]", "maximum context length is 512"),
            ({"input": ["a"] * 65}, "input", "65 inputs"),
            ({"input": 5}, "input", "array"),
            ({"input": "x" * (4 * 1024**2 + 1)}, "input", "limits.max_prompt_bytes"),
            ({"encoding_format": "hex"}, "encoding_format", "must be one of base64, float, not 'hex'"),
            ({"dimensions": 0}, "dimensions", ">= 1"),
            ({"dimensions": 9}, "dimensions", "at most 8"),
            ({"pooling": "sum"}, "pooling", "must be one of cls, last, max, mean, mean_sqrt_len, weighted_mean, not"),
            ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
            ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "512"),
            ({"messages": [{"role": "user"}]}, "messages", "not supported"),
            ({"normalize": False, "use_activation": True}, "normalize", "are one field"),
            ({"embed_dtype": "int8"}, "embed_dtype", "not supported"),
            ({"input_type": "query"}, "input_type", "can't be 'query': the model has no prompts"),
            ({"priority": 1}, "priority", "priorities are disabled"),
            ({"timeout_s": 0}, "timeout_s", "> 0"),
            ({"request_id": "a b"}, "request_id", "request_id"),
        ],
    )
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(KNOWN, BODY | fields, parse_embeddings)
        assert (error.status, error.param) == (400, param)
        assert words in error.message

    def test_another_model_is_404(self) -> None:
        assert refused_by(KNOWN, BODY | {"model": "x"}, parse_embeddings).status == 404

    def test_neutral_fields_change_nothing(self) -> None:
        plain = parse_embeddings(json.dumps(BODY).encode(), KNOWN)
        more = {"user": "me", "encoding_format": "float", "pooling": "last", "normalize": True, "dimensions": None}
        assert parse_embeddings(json.dumps(BODY | more).encode(), KNOWN) == plain

    def test_the_options_request_a_pooled_vector(self) -> None:
        body = BODY | {"input": [[1, 2], [3]], "pooling": "mean", "truncate_prompt_tokens": -1}
        parsed = parse_embeddings(json.dumps(body).encode(), KNOWN)
        assert parsed.options == m.GenerationOptions(max_tokens=1, temperature=0.0, pooling=m.Pooling.MEAN)
        assert (parsed.prompt_options.truncate, len(parsed.prompts)) == (-1, 2)
        assert parse_embeddings(json.dumps(BODY).encode(), KNOWN).options.pooling == m.Pooling.LAST


class TestReplies:
    @pytest.mark.parametrize("path", [PATH, "/api/embed"])
    def test_vectors_are_not_encoded_in_one_call(self, gate: Gate, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The encoder holds Python's lock while it works, and the event loop waits for it: 0.2 s for a thousand vectors
        of 4,096 numbers."""
        encoded: list[bytes] = []
        encode = msgspec.json.encode

        def noted(value: Any, **options: Any) -> bytes:
            encoded.append(data := encode(value, **options))
            return data

        monkeypatch.setattr(msgspec.json, "encode", noted)
        response = gate.post(BODY | {"input": ["a"] * 3}, path)
        for _ in range(3):
            give(gate, gate.begin())
        body = response.result().json()
        vectors = body.get("embeddings") or [one["embedding"] for one in body["data"]]
        assert vectors == [pytest.approx((VECTOR / 13).tolist())] * 3
        assert encoded and not any(b"0.23" in data for data in encoded)

    def test_a_vector_has_length_1(self, gate: Gate) -> None:
        response = gate.post(BODY, PATH)
        give(gate, gate.begin())
        body = response.result().json()
        (data,) = body["data"]
        assert np.allclose(data.pop("embedding"), VECTOR / 13)
        assert data == {"object": "embedding", "index": 0}
        del body["data"]
        assert body == {"object": "list", "model": "tiny", "usage": {"prompt_tokens": 3, "total_tokens": 3}}

    def test_each_input_has_its_own_vector_in_order(self, gate: Gate) -> None:
        response = gate.post(BODY | {"input": ["a", "b", "c"]}, PATH)
        submits = [gate.begin() for _ in range(3)]
        first = submits[0]
        for submit in reversed(submits):
            vector = np.zeros(8)
            vector["abc".index(submit.prompt.text)] = 2  # type: ignore[union-attr]
            give(gate, submit, vector)
        assert first.options.n == 1 and first.options.max_tokens == 1
        vectors = [one["embedding"] for one in response.result().json()["data"]]
        assert np.argmax(vectors, axis=1).tolist() == [0, 1, 2]

    def test_base64_has_the_same_numbers(self, gate: Gate) -> None:
        response = gate.post(BODY | {"encoding_format": "base64", "dimensions": 3}, PATH)
        give(gate, gate.begin())
        vector = np.frombuffer(base64.b64decode(response.result().json()["data"][0]["embedding"]), "<f4")
        assert np.allclose(vector, [0.6, 0, 0.8])

    @pytest.mark.parametrize("scale", [1e30, 1e-30])
    def test_vectors_of_huge_and_tiny_numbers_have_length_1_too(self, gate: Gate, scale: float) -> None:
        response = gate.post(BODY, PATH)
        give(gate, gate.begin(), VECTOR * scale)
        assert np.allclose(response.result().json()["data"][0]["embedding"], VECTOR / 13)

    @pytest.mark.parametrize("name", ["normalize", "use_activation"])
    def test_a_vector_may_keep_its_length(self, gate: Gate, name: str) -> None:
        response = gate.post(BODY | {name: False, "dimensions": 3}, PATH)
        give(gate, gate.begin())
        assert response.result().json()["data"][0]["embedding"] == [3.0, 0.0, 4.0]

    def test_zeros_stay_zeros(self, gate: Gate) -> None:
        response = gate.post(BODY | {"dimensions": 2}, PATH)
        give(gate, gate.begin(), [0, 0, 4, 0, 0, 0, 0, 0])
        assert response.result().json()["data"][0]["embedding"] == [0.0, 0.0]

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_a_vector_that_is_not_finite_is_an_error(self, gate: Gate, value: float) -> None:
        response = gate.post(BODY, PATH)
        give(gate, gate.begin(), [value, *[0] * 7])
        result = response.result()
        assert result.status_code == 500 and "NaN or infinity" in result.json()["error"]["message"]

    def test_an_aborted_request_has_no_vector(self, gate: Gate) -> None:
        response = gate.post(BODY | {"request_id": "me"}, PATH)
        submit = gate.begin()
        assert gate.client.post("/abort_requests", json={"request_ids": ["me"]}).json()["num_aborted"] == 1
        gate.delta(submit, num_ids=0, finish=m.Finish.ABORT)
        result = response.result()
        assert (result.status_code, result.json()["error"]["code"]) == (503, "ended")

    def test_a_rejection_names_the_input(self, gate: Gate) -> None:
        response = gate.post(BODY | {"input": ["a", "b"]}, PATH)
        first, second = gate.begin(), gate.submit()
        gate.reject(second, m.Failure(400, "the prompt is empty", "prompt"))
        gate.delta(first, num_ids=0, finish=m.Finish.ABORT)
        error = response.result().json()["error"]
        assert error["param"] == "input[1]"
