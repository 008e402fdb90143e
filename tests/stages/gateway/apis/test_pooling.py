"""POST /classify, /pooling and /v2/embed, and the tasks of models."""

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admission.open_bytes import bounded, measured
from pipeline.stages.gateway.apis.anthropic.parsing import parse_messages
from pipeline.stages.gateway.apis.cohere.parsing import parse_embed
from pipeline.stages.gateway.apis.embeddings.parsing import parse_embeddings
from pipeline.stages.gateway.apis.ollama.parsing import parse_chat as parse_ollama_chat
from pipeline.stages.gateway.apis.ollama.parsing import parse_embed as parse_ollama_embed
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_completion
from pipeline.stages.gateway.apis.pooling import reply as pooling_reply
from pipeline.stages.gateway.apis.pooling.parsing import parse_classify, parse_pooling
from pipeline.stages.gateway.apis.scoring.parsing import parse_rerank, parse_score
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.replies import large_json
from tests.stages.gateway.apis.poolers import (
    CLASSIFIER,
    CROSS_ENCODER,
    EMBEDDER,
    TAGGER,
    gate_of,
    give,
    limits_of,
)
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate
from tests.stages.gateway.parsing.test_sampling_fields import KNOWN, refused_by

BODY = {"model": "tiny", "input": "Hi"}
EMBED = {"model": "tiny", "texts": ["Hi"], "input_type": "search_query"}
VECTOR = [3, 0, 4, -1, 0, 0, 0, 12]
LOGITS = np.array([0.0, 1.0, 2.0])
PROBABILITIES = np.exp(LOGITS) / np.exp(LOGITS).sum()
RERANK = {"model": "tiny", "query": "q", "documents": ["a"]}
SCORE = {"text_1": "q", "text_2": "a"}


def read(parse: Any, body: dict[str, Any], limits: Any = KNOWN) -> Any:
    return parse(json.dumps(body).encode(), limits)


class TestTasks:
    @pytest.mark.parametrize(
        ("parse", "body", "task"),
        [
            (parse_chat, CHAT, "generate"),
            (parse_completion, COMPLETION, "generate"),
            (parse_messages, CHAT | {"max_tokens": 1}, "generate"),
            (parse_ollama_chat, CHAT, "generate"),
            (parse_embeddings, BODY, "embed"),
            (parse_ollama_embed, BODY, "embed"),
            (parse_embed, EMBED, "embed"),
            (parse_score, SCORE, "score"),
            (parse_rerank, RERANK, "score"),
            (parse_classify, BODY, "classify"),
            (parse_pooling, BODY | {"task": "token_embed"}, "token_embed"),
        ],
    )
    def test_a_task_that_the_model_lacks_is_refused_with_those_that_it_has(
        self, parse: Any, body: dict[str, Any], task: str
    ) -> None:
        error = refused_by(limits_of(TAGGER), body, parse)
        assert (error.status, error.param, error.code) == (400, "model", "unsupported_task")
        assert f"(task {task}): its tasks are token_classify" in error.message

    @pytest.mark.parametrize(
        ("limits", "task", "pooling"),
        [
            (KNOWN, "embed", m.Pooling.LAST),
            (limits_of(EMBEDDER), "embed", m.Pooling.MEAN),
            (limits_of(EMBEDDER), "token_embed", m.Pooling.ALL),
            (limits_of(CLASSIFIER), "classify", m.Pooling.CLS),
            (limits_of(CROSS_ENCODER), "score", m.Pooling.CLS),
            (limits_of(TAGGER), "token_classify", m.Pooling.ALL),
        ],
    )
    def test_a_task_has_the_pooling_of_the_model(self, limits: Any, task: str, pooling: m.Pooling) -> None:
        assert read(parse_pooling, BODY | {"task": task}, limits).options.pooling == pooling
        if task != "token_embed":
            assert read(parse_pooling, BODY, limits).options.pooling == pooling


class TestPrompts:
    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({}, "Hi"),
            ({"input_type": "query"}, "search: Hi"),
            ({"prompt_name": "document"}, "text: Hi"),
            ({"input_type": "clustering"}, "group: Hi"),
            ({"input_type": "query", "prompt_name": "query"}, "search: Hi"),
        ],
    )
    def test_a_named_prompt_goes_before_the_text(self, fields: dict[str, Any], text: str) -> None:
        (prompt,) = read(parse_embeddings, BODY | fields, limits_of(EMBEDDER)).prompts
        assert prompt == m.TextPrompt(text)

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"input_type": "title"}, "input_type", "can't be 'title': the model has Clustering, document, query"),
            ({"prompt_name": ""}, "prompt_name", "the model has Clustering, document, query"),
            ({"input_type": "query", "prompt_name": "document"}, "prompt_name", "'input_type'"),
            ({"input_type": "query", "input": [1, 2]}, "input_type", "not allowed with token ids"),
            ({"dimensions": 3}, "dimensions", "one of 2, 4, not 3"),
        ],
    )
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(limits_of(EMBEDDER), BODY | fields, parse_embeddings)
        assert (error.status, error.param) == (400, param)
        assert words in error.message

    def test_the_default_prompt_is_for_texts(self) -> None:
        limits = limits_of(msgspec.structs.replace(EMBEDDER, default_prompt="document"))
        assert read(parse_embeddings, BODY, limits).prompts == [m.TextPrompt("text: Hi")]
        assert read(parse_embeddings, BODY | {"input_type": "query"}, limits).prompts == [m.TextPrompt("search: Hi")]
        assert isinstance(read(parse_embeddings, BODY | {"input": [1]}, limits).prompts[0], m.IdsPrompt)

    @pytest.mark.parametrize(
        ("input_type", "text"),
        [
            ("search_query", "search: Hi"),
            ("search_document", "text: Hi"),
            ("clustering", "group: Hi"),
            ("classification", "Hi"),
            ("document", "text: Hi"),
        ],
    )
    def test_cohere_s_types_mean_prompts_of_the_model(self, input_type: str, text: str) -> None:
        (prompt,) = read(parse_embed, EMBED | {"input_type": input_type}, limits_of(EMBEDDER)).prompts
        assert prompt == m.TextPrompt(text)
        if input_type != "document":
            assert read(parse_embed, EMBED | {"input_type": input_type}).prompts == [m.TextPrompt("Hi")]

    def test_truncation_keeps_the_first_tokens_for_models_that_don_t_generate(self) -> None:
        body = BODY | {"truncate_prompt_tokens": -1}
        for limits, right in ((KNOWN, False), (limits_of(EMBEDDER), True)):
            assert read(parse_embeddings, body, limits).prompt_options.truncates_right == right
            side = body | {"truncation_side": "left" if right else "right"}
            assert read(parse_embeddings, side, limits).prompt_options.truncates_right != right


class TestCohere:
    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"texts": None}, "texts", "'texts' or 'inputs' is required"),
            ({"texts": []}, "texts", "must not be an empty array"),
            ({"texts": ["a"] * 65}, "texts", "65 inputs"),
            ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "inputs", "not allowed together"),
            ({"texts": None, "inputs": [{"content": []}]}, "inputs[0].content", ">= 1"),
            ({"images": ["data:"]}, "images", "not supported"),
            ({"embedding_types": ["int8"]}, "embedding_types[0]", "can't be 'int8'"),
            ({"output_dimension": 9}, "output_dimension", "'output_dimension' must be at most 8"),
            ({"output_dimension": 3, "embedding_types": ["binary"]}, "embedding_types", "doesn't fill whole bytes"),
            ({"truncate": "NONE", "max_tokens": 3}, "max_tokens", "not supported"),
            ({"max_tokens": 513}, "max_tokens", "'max_tokens' must be at most"),
            ({"input_type": "title"}, "input_type", "the model has no prompts"),
        ],
    )
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(KNOWN, EMBED | fields, parse_embed)
        assert (error.status, error.param) == (400, param)
        assert words in error.message

    @pytest.mark.parametrize(
        ("fields", "truncate", "right"),
        [
            ({}, -1, True),
            ({"truncate": "END", "max_tokens": 7}, 7, True),
            ({"truncate": "START"}, -1, False),
            ({"truncate": "NONE"}, 0, True),
        ],
    )
    def test_truncation(self, fields: dict[str, Any], truncate: int, right: bool) -> None:
        options = read(parse_embed, EMBED | fields).prompt_options
        assert options.truncate == truncate
        assert options.truncates_right == right or not truncate

    def test_an_embedding_has_the_types_that_are_asked_for(self, gate: Gate) -> None:
        body = EMBED | {"texts": ["a", "b"], "embedding_types": ["ubinary", "float", "binary", "base64", "float"]}
        response = gate.post(body, "/v2/embed")
        for submit in [gate.begin() for _ in range(2)]:
            give(gate, submit, VECTOR)
        reply = response.result().json()
        vector = np.array(VECTOR, "<f4") / np.float32(np.linalg.norm(VECTOR))
        found = reply["embeddings"]
        assert list(found) == ["float", "base64", "binary", "ubinary"]
        assert np.allclose(found["float"], [vector] * 2)
        assert np.allclose(np.frombuffer(base64.b64decode(found["base64"][1]), "<f4"), vector)
        assert found["ubinary"] == [[0b11101111]] * 2
        assert found["binary"] == [[0b11101111 - 128]] * 2
        assert reply["texts"] == ["a", "b"] and reply["id"].startswith("embd-")
        assert reply["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": 6}}

    def test_the_old_route_has_a_list_unless_types_are_asked_for(self, gate: Gate) -> None:
        for fields, kind in (({}, "floats"), ({"embedding_types": ["float"]}, "by_type")):
            response = gate.post(
                {"texts": ["a"], "input_type": "search_query", "truncate": "NONE"} | fields, "/v1/embed"
            )
            give(gate, gate.begin(), VECTOR)
            reply = response.result().json()
            (vector,) = reply["embeddings"]["float"] if fields else reply["embeddings"]
            assert np.allclose(vector, np.array(VECTOR) / np.linalg.norm(VECTOR))
            assert reply["response_type"] == f"embeddings_{kind}" and reply["texts"] == ["a"]
            assert reply["meta"] == {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 3}}

    def test_parts_of_an_input_are_one_text(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        body = EMBED | {"texts": None, "inputs": [{"content": parts}]}
        assert read(parse_embed, body).prompts == [m.TextPrompt("ab")]


class TestClassify:
    @pytest.mark.parametrize(("fields", "numbers"), [({}, PROBABILITIES), ({"use_activation": False}, LOGITS)])
    def test_a_text_has_the_label_of_its_largest_number(self, tmp_path: Path, fields: Any, numbers: Any) -> None:
        with gate_of(tmp_path, CLASSIFIER) as gate:
            response = gate.post(BODY | {"input": ["a", "b"]} | fields, "/classify")
            for submit in [gate.begin() for _ in range(2)]:
                give(gate, submit, LOGITS if submit.prompt.text == "a" else LOGITS[::-1])  # type: ignore[union-attr]
            reply = response.result().json()
        assert [one["label"] for one in reply["data"]] == ["good", "bad"]
        assert [one["index"] for one in reply["data"]] == [0, 1] and reply["data"][0]["num_classes"] == 3
        assert np.allclose([one["probs"] for one in reply["data"]], [numbers, numbers[::-1]])
        assert reply["id"].startswith("classify-") and reply["usage"]["prompt_tokens"] == 6

    @pytest.mark.parametrize("scale", [1e30, -1e30])
    def test_huge_logits_have_probabilities(self, tmp_path: Path, scale: float) -> None:
        with gate_of(tmp_path, CLASSIFIER) as gate:
            response = gate.post(BODY, "/classify")
            give(gate, gate.begin(), LOGITS * scale)
            (data,) = response.result().json()["data"]
        assert data["probs"] == pytest.approx([0, 0, 1] if scale > 0 else [1, 0, 0])


class TestPooling:
    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_each_token_has_a_vector(self, tmp_path: Path, encoding: str) -> None:
        with gate_of(tmp_path, EMBEDDER) as gate:
            body = BODY | {"task": "token_embed", "dimensions": 4, "encoding_format": encoding}
            response = gate.post(body, "/pooling")
            submit = gate.begin()
            assert submit.options.pooling == m.Pooling.ALL
            give(gate, submit, [VECTOR, np.roll(VECTOR, 1), np.zeros(8)])
            reply = response.result().json()
        (data,) = reply["data"]
        numbers = data["data"]
        if encoding == "base64":
            numbers = np.frombuffer(base64.b64decode(numbers), "<f4").reshape(3, 4)
        expected = np.array([[3, 0, 4, -1], [12, 3, 0, 4], [0, 0, 0, 0]], np.float64)
        expected[:2] /= np.linalg.norm(expected[:2], axis=1, keepdims=True)
        assert np.allclose(numbers, expected)
        assert (data["object"], reply["id"][:5]) == ("pooling", "pool-")

    @pytest.mark.parametrize("encoding", ["float", "base64"])
    def test_vectors_of_many_tokens_are_encoded_in_parts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
    ) -> None:
        """The encoders hold Python's lock: half a second for the 8,192 tokens of one text."""
        sizes, encode, b64encode = list[int](), msgspec.json.encode, base64.b64encode

        def encoding_json(value: Any, **hooks: Any) -> bytes:
            sizes.append(len(body := encode(value, **hooks)))
            return body

        def encoding_base64(data: Any) -> bytes:
            sizes.append(len(body := b64encode(data)))
            return body

        encoder = SimpleNamespace(encode=encoding_json)
        monkeypatch.setattr(pooling_reply, "_encoder", encoder)
        monkeypatch.setattr(large_json, "msgspec", SimpleNamespace(json=encoder))
        monkeypatch.setattr(large_json, "base64", SimpleNamespace(b64encode=encoding_base64))
        vectors = np.random.default_rng(1).normal(size=(50_000, 8))
        with gate_of(tmp_path, EMBEDDER) as gate:
            body = BODY | {"task": "token_embed", "encoding_format": encoding, "use_activation": False}
            response = gate.post(body, "/pooling")
            give(gate, gate.begin(), vectors)
            found = response.result().json()["data"][0]["data"]
        if encoding == "base64":
            found = np.frombuffer(base64.b64decode(found), "<f4").reshape(-1, 8)
        assert np.array_equal(np.asarray(found, "<f4"), vectors.astype("<f4"))
        assert 0 < max(sizes) <= 4 * large_json.BASE64_BYTES // 3

    def test_what_the_vectors_of_tokens_may_take_is_bounded_before(self) -> None:
        """A result is as many times larger as its prompt has tokens, which for a text are known only later."""
        limits, max_bytes = limits_of(EMBEDDER), 100_000
        for given, fits in (("a" * 2000, False), ("a" * 20, True), ([1] * 512, False), ([1] * 20, True)):
            parsed = measured(read(parse_pooling, BODY | {"task": "token_embed", "input": given}, limits))
            assert bounded(measured(read(parse_pooling, BODY | {"input": given}, limits)), max_bytes, 8, 512)
            if fits:
                assert bounded(parsed, max_bytes, 8, 512)
                continue
            with pytest.raises(ApiError, match="lower input") as error:
                bounded(parsed, max_bytes, 8, 512)
            assert error.value.param == "input"
            cut = msgspec.structs.replace(parsed.prompt_options, truncate=8)
            assert bounded(msgspec.structs.replace(parsed, prompt_options=cut), max_bytes, 8, 512)

    def test_each_token_has_labels(self, tmp_path: Path) -> None:
        with gate_of(tmp_path, TAGGER) as gate:
            response = gate.post(BODY, "/pooling")
            give(gate, gate.begin(), [[0, 0], [0, 1e4]])
            assert response.result().json()["data"][0]["data"] == [[0.5, 0.5], [0.0, 1.0]]

    def test_a_model_that_generates_has_embeddings(self, gate: Gate) -> None:
        response = gate.post(BODY | {"use_activation": False}, "/pooling")
        give(gate, gate.begin(), VECTOR)
        assert response.result().json()["data"][0]["data"] == VECTOR

    def test_only_embeddings_have_dimensions(self) -> None:
        error = refused_by(limits_of(CLASSIFIER), BODY | {"dimensions": 2}, parse_pooling)
        assert error.param == "dimensions" and "only embeddings" in error.message
