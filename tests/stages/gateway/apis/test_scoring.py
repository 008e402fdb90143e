"""POST /score and /rerank: pairs for a cross-encoder, and cosines of embeddings."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.admission import open_bytes
from pipeline.stages.gateway.apis.scoring.parsing import parse_cohere_rerank, parse_rerank, parse_score
from pipeline.stages.gateway.parsing import prompt_fields
from tests.stages.gateway.apis.poolers import CLASSIFIER, CROSS_ENCODER, EMBEDDER, TEMPLATED, gate_of, give, limits_of
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.parsing.test_sampling_fields import KNOWN, refused_by

SCORE = {"model": "tiny", "text_1": "q", "text_2": ["a", "b"]}
RERANK = {"model": "tiny", "query": "q", "documents": ["a", {"text": "b", "id": 7}, "c"]}
AXES = np.eye(8)


def texts(parsed: Any) -> list[Any]:
    return [one.text if one.pair is None else (one.text, one.pair) for one in parsed.prompts]


def parsed(parse: Any, body: dict[str, Any], limits: Any = KNOWN) -> Any:
    return parse(json.dumps(body).encode(), limits)


class TestParse:
    @pytest.mark.parametrize(
        ("names", "second"),
        [
            (("text_1", "text_2"), ["a", "b"]),
            (("data_1", "data_2"), ["a", "b"]),
            (("queries", "documents"), "a"),
            (("queries", "items"), ["a"]),
        ],
    )
    def test_the_texts_have_one_of_four_pairs_of_names(self, names: tuple[str, str], second: Any) -> None:
        body = {names[0]: "q", names[1]: second}
        expected = ["q", *([second] if isinstance(second, str) else second)]
        assert texts(parsed(parse_score, body)) == expected
        pairs = texts(parsed(parse_score, body, limits_of(CROSS_ENCODER)))
        assert pairs == [("q", one) for one in expected[1:]]

    def test_two_lists_are_scored_in_pairs(self) -> None:
        body = {"text_1": ["p", "q"], "text_2": ["a", "b"]}
        assert texts(parsed(parse_score, body)) == ["p", "q", "a", "b"]
        assert texts(parsed(parse_score, body, limits_of(CROSS_ENCODER))) == [("p", "a"), ("q", "b")]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"text_2": []}, "text_2", "must not be an empty array"),
            ({"text_1": []}, "text_1", "must not be an empty array"),
            ({"text_1": ["p", "q", "r"]}, "text_1", "as many as 'text_2', which has 2: not 3"),
            ({"text_2": None}, "text_2", "'text_2' is required with 'text_1'"),
            ({"text_1": None, "text_2": None}, "text_1", "'data_1' and 'data_2'"),
            ({"data_1": "x"}, "text_1", "one of these pairs"),
            ({"text_2": ["a"] * 64}, "text_2", "65 inputs exceed the limit of 64"),
            ({"text_2": [5]}, "text_2[0]", "a string"),
            ({"text_2": ["a", "x" * (4 * 1024**2 + 1)]}, "text_2[1]", "limits.max_prompt_bytes"),
            ({"text_1": "x" * (4 * 1024**2 + 1)}, "text_1", "limits.max_prompt_bytes"),
            ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs", "not supported"),
            ({"truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "512"),
        ],
    )
    def test_an_invalid_field_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(KNOWN, SCORE | fields, parse_score)
        assert (error.status, error.param) == (400, param)
        assert words in error.message

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"documents": []}, "documents", "must not be an empty array"),
            ({"documents": ["a"] * 65}, "documents", "65 inputs exceed the limit of 64"),
            ({"documents": [{"title": "a"}]}, "documents[0].text", "required"),
            ({"documents": "a"}, "documents", "an array"),
            ({"query": None}, "query", "a string"),
            ({"top_n": -1}, "top_n", ">= 0"),
            ({"max_tokens_per_doc": 100}, "max_tokens_per_doc", "not supported"),
        ],
    )
    def test_an_invalid_field_of_a_rerank_is_named(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(KNOWN, RERANK | fields, parse_rerank)
        assert (error.status, error.param) == (400, param)
        assert words in error.message

    def test_a_model_without_scores_is_refused_by_its_tasks(self) -> None:
        error = refused_by(limits_of(CLASSIFIER), RERANK, parse_rerank)
        assert (error.status, error.code) == (400, "unsupported_task")
        assert "its tasks are classify" in error.message

    def test_queries_and_documents_have_the_prompts_of_the_model(self) -> None:
        found = texts(parsed(parse_rerank, RERANK, limits_of(EMBEDDER)))
        assert found == ["search: q", "text: a", "text: b", "text: c"]
        assert texts(parsed(parse_score, SCORE, limits_of(EMBEDDER))) == ["q", "a", "b"]

    def test_an_instruction_is_a_variable_of_the_template_of_pairs(self) -> None:
        for given, expected in (
            ({}, ""),
            ({"instruction": "Find it."}, '{"instruction":"Find it."}'),
            (
                {"instruction": "a", "chat_template_kwargs": {"instruction": "b", "c": [1]}},
                '{"instruction":"b","c":[1]}',
            ),
        ):
            for parse, body in ((parse_score, SCORE), (parse_rerank, RERANK), (parse_cohere_rerank, RERANK)):
                found = parsed(parse, body | given, limits_of(TEMPLATED))
                assert {one.template_kwargs for one in found.prompts} == {expected}
                assert {one.text for one in found.prompts} == {"q"}, "the default prompt is the template's"

    def test_a_cross_encoders_default_prompt_goes_before_the_query(self) -> None:
        limits = limits_of(msgspec.structs.replace(TEMPLATED, pairs=None))
        assert texts(parsed(parse_score, SCORE, limits)) == [("Look.q", "a"), ("Look.q", "b")]

    @pytest.mark.parametrize(
        ("fields", "param", "words"),
        [
            ({"instruction": "Find it."}, "instruction", "need a reranker"),
            ({"chat_template_kwargs": {"a": 1}}, "instruction", "need a reranker"),
            ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
        ],
    )
    def test_embeddings_take_no_instruction(self, fields: dict[str, Any], param: str, words: str) -> None:
        error = refused_by(limits_of(EMBEDDER), SCORE | fields, parse_score)
        assert (error.status, error.param) == (400, param) and words in error.message

    def test_cohere_cuts_documents_by_default(self) -> None:
        for limits in (KNOWN, limits_of(EMBEDDER), limits_of(CROSS_ENCODER)):
            assert parsed(parse_rerank, RERANK, limits).prompt_options.truncate == 0
            assert parsed(parse_cohere_rerank, RERANK, limits).prompt_options.truncate == -1
        assert not parsed(parse_cohere_rerank, RERANK).prompt_options.truncates_right
        assert parsed(parse_cohere_rerank, RERANK, limits_of(EMBEDDER)).prompt_options.truncates_right

    def test_a_query_is_measured_once_and_not_for_each_document(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """1,024 documents and a query of 3.8 MB that is not ASCII kept the thread of large bodies for six seconds."""
        query, measured = "é" * 1000, list[str]()
        for module, name in ((prompt_fields, "_num_bytes"), (open_bytes, "utf8_bytes")):
            monkeypatch.setattr(module, name, _noting(getattr(module, name), measured))
        body = RERANK | {"query": query, "documents": ["a"] * 64}
        request = open_bytes.measured(parsed(parse_rerank, body, limits_of(CROSS_ENCODER)))
        assert request.size is not None and request.size.num_tokens == [(2 * len(query) + 1) // 4] * 64
        assert measured.count(query) == 2 and max(map(len, measured)) == len(query)


def _noting(function: Any, given: list[str]) -> Any:
    def noting(text: str) -> Any:
        given.append(text)
        return function(text)

    return noting


class TestCosines:
    @pytest.mark.parametrize("path", ["/score", "/v1/score"])
    def test_a_score_is_the_cosine_of_both_embeddings(self, gate: Gate, path: str) -> None:
        response = gate.post(SCORE | {"text_2": ["a", "b", "c"]}, path)
        submits = {submit.prompt.text: submit for submit in (gate.begin() for _ in range(4))}  # type: ignore[union-attr]
        give(gate, submits["b"], 3 * AXES[1])
        give(gate, submits["q"], 2 * AXES[0])
        give(gate, submits["c"], 0 * AXES[0])
        give(gate, submits["a"], AXES[0] + AXES[1])
        body = response.result().json()
        assert [one["index"] for one in body["data"]] == [0, 1, 2]
        assert [one["score"] for one in body["data"]] == pytest.approx([2**-0.5, 0, 0])
        assert body["id"].startswith("score-") and body["object"] == "list" and body["model"] == "tiny"
        assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}

    def test_two_lists(self, gate: Gate) -> None:
        response = gate.post({"text_1": ["0", "1"], "text_2": ["1", "1"]}, "/score")
        for submit in [gate.begin() for _ in range(4)]:
            give(gate, submit, AXES[int(submit.prompt.text)])  # type: ignore[union-attr]
        assert [one["score"] for one in response.result().json()["data"]] == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("path", "fields", "shows"),
        [
            ("/rerank", {}, True),
            ("/v1/rerank", {}, True),
            ("/v2/rerank", {}, False),
            ("/v2/rerank", {"return_documents": True}, True),
            ("/rerank", {"return_documents": False}, False),
        ],
    )
    def test_the_best_documents_come_first(self, gate: Gate, path: str, fields: dict[str, Any], shows: bool) -> None:
        response = gate.post(RERANK | {"top_n": 2} | fields, path)
        numbers = {"q": AXES[0], "a": AXES[1], "b": AXES[0], "c": AXES[0] + AXES[1]}
        for submit in [gate.begin() for _ in range(4)]:
            give(gate, submit, numbers[submit.prompt.text])  # type: ignore[union-attr]
        body = response.result().json()
        assert body["usage"] == {"prompt_tokens": 12, "total_tokens": 12}
        assert [one["index"] for one in body["results"]] == [1, 2]
        assert [one["relevance_score"] for one in body["results"]] == pytest.approx([1, 2**-0.5])
        assert [one.get("document") for one in body["results"]] == (
            [{"text": "b"}, {"text": "c"}] if shows else [None, None]
        )

    def test_equal_scores_keep_the_order_of_the_documents(self, gate: Gate) -> None:
        response = gate.post(RERANK, "/rerank")
        for submit in [gate.begin() for _ in range(4)]:
            give(gate, submit, AXES[0])
        assert [one["index"] for one in response.result().json()["results"]] == [0, 1, 2]

    @pytest.mark.parametrize(("text", "param"), [("q", "query"), ("b", "documents[1]")])
    def test_a_rejection_names_the_text(self, gate: Gate, text: str, param: str) -> None:
        response = gate.post(RERANK, "/rerank")
        for submit in [gate.submit() for _ in range(4)]:
            if submit.prompt.text == text:  # type: ignore[union-attr]
                gate.reject(submit, m.Failure(400, "'prompt' is too long", "prompt"))
            else:
                gate.accept(submit)
                gate.delta(submit, num_ids=0, finish=m.Finish.ABORT)
        error = response.result().json()["error"]
        assert (error["param"], error["message"]) == (param, f"'{param}' is too long")


class TestCrossEncoder:
    @pytest.mark.parametrize(("fields", "scores"), [({}, [1 / (1 + np.e), 0.5]), ({"use_activation": False}, [-1, 0])])
    def test_a_score_is_the_activated_logit_of_the_pair(self, tmp_path: Path, fields: Any, scores: list[float]) -> None:
        with gate_of(tmp_path, CROSS_ENCODER) as gate:
            response = gate.post(SCORE | fields, "/score")
            for submit in [gate.begin() for _ in range(2)]:
                assert submit.options.pooling == m.Pooling.CLS
                give(gate, submit, [{"a": -1, "b": 0}[submit.prompt.pair]])  # type: ignore[union-attr, index]
            assert [one["score"] for one in response.result().json()["data"]] == pytest.approx(scores)

    def test_the_second_text_is_submitted_again_as_such(self, tmp_path: Path) -> None:
        """If a stage dies, the prompt is submitted again as ids: its second text still begins where it began."""
        with gate_of(tmp_path, CROSS_ENCODER) as gate:
            response = gate.post(SCORE | {"text_2": "a"}, "/score")
            submit = gate.submit()
            gate.accept(submit, segment_start=2)
            gate.rig.load()
            gate.rig.restart("schedule.0")
            again = gate.submit()
            assert isinstance(again.prompt, m.IdsPrompt)
            assert (again.attempt, again.options.segment_start) == (2, 2)
            gate.accept(again, segment_start=2)
            give(gate, again, [0.0])
            assert response.result().json()["data"][0]["score"] == 0.5

    def test_texts_in_error_messages(self, tmp_path: Path) -> None:
        with gate_of(tmp_path, CROSS_ENCODER) as gate:
            response = gate.post(SCORE, "/score")
            first, second = gate.begin(), gate.submit()
            gate.reject(second, m.Failure(400, "'prompt' is too long", "prompt"))
            gate.delta(first, num_ids=0, finish=m.Finish.ABORT)
            assert response.result().json()["error"]["param"] == "text_2[1]"


@pytest.mark.parametrize("character", ["a", "\x01", '"', "é"])
def test_what_a_reply_repeats_counts_as_json_has_it(character: str) -> None:
    """Characters that JSON escapes take six times their size. A reply is there twice while it is sent."""
    documents = [character * 10_000, character * 500]
    for parse in (parse_rerank, parse_cohere_rerank):
        reranked = parsed(parse, RERANK | {"documents": documents, "return_documents": True}, limits_of(EMBEDDER))
        assert open_bytes.reply_bytes(reranked) >= 2 * len(msgspec.json.encode(documents))
