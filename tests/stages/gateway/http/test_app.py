"""Responses that are not streamed, and other routes."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.shm.arrays import ShmRef
from pipeline.version import VERSION
from tests.stages.gateway.gate import CHAT, COMPLETION, FACTS, MODEL, NONE_CACHED, Gate, events_of


class TestChat:
    def test_a_chat_returns_one_response(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.submit()
        gate.accept(submit, num_ids=5)
        gate.delta(submit, "Hello", num_ids=2)
        gate.delta(submit, " there", num_ids=2, finish=m.Finish.STOP, stop_reason="!")
        result = response.result()
        assert result.status_code == 200
        body = result.json()
        assert body.pop("id").startswith("chatcmpl-")
        assert body.pop("created") > 1e9
        assert body == {
            "object": "chat.completion",
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Hello there", "refusal": None},
                    "logprobs": None,
                    "finish_reason": "stop",
                    "stop_reason": "!",
                    "token_ids": None,
                }
            ],
            "usage": {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, **NONE_CACHED},
            "system_fingerprint": None,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
            "metrics": None,
        }
        assert gate.closed() == (submit.request_id, 1)
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_a_chat_is_submitted_with_all_of_its_options(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"n": 2, "seed": 7, "max_tokens": 9, "stop": "x", "temperature": 0})
        submit = gate.begin()
        assert submit.prompt == m.ChatPrompt([m.ChatMessage("user", "Hi")])
        assert (submit.attempt, submit.gateway) == (1, 0)
        assert 0 <= submit.request_id < 2**63
        assert submit.arrival_s > 1e9
        assert submit.options == m.GenerationOptions(n=2, max_tokens=9, temperature=0.0, seed=7, stop=["x"])
        for index in (1, 0):
            gate.finish(submit, f"choice {index}", index)
        choices = response.result().json()["choices"]
        assert [(c["index"], c["message"]["content"]) for c in choices] == [(0, "choice 0"), (1, "choice 1")]

    def test_a_chat_without_a_seed_gets_a_random_one(self, gate: Gate) -> None:
        seeds = set()
        for _ in range(3):
            response = gate.post(CHAT)
            seeds.add(gate.serve().options.seed)
            assert response.result().status_code == 200
        assert len(seeds) == 3

    @pytest.mark.parametrize(
        ("finish", "word"), [(m.Finish.STOP, "stop"), (m.Finish.LENGTH, "length"), (m.Finish.ABORT, "abort")]
    )
    def test_a_response_has_a_finish_reason(self, gate: Gate, finish: m.Finish, word: str) -> None:
        response = gate.post(CHAT)
        gate.finish(gate.begin(), "x", finish=finish)
        assert response.result().json()["choices"][0]["finish_reason"] == word

    def test_a_failed_request_is_a_server_error(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.submit()
        gate.finish(submit, finish=m.Finish.ERROR)
        result = response.result()
        assert (result.status_code, result.json()["error"]["type"]) == (500, "server_error")
        assert gate.closed() == (submit.request_id, 1)

    def test_contradictory_options_are_a_client_error(self, gate: Gate) -> None:
        """A client that gets 500 tries again."""
        why = f"{m.NOTHING_LEFT}'allowed_token_ids' and 'min_tokens' leave none behind 0 tokens"
        response = gate.post(CHAT)
        gate.delta(gate.submit(), num_ids=0, finish=m.Finish.ERROR, error=why)
        result = response.result()
        error = {"message": why, "type": "invalid_request_error", "param": None, "code": "nothing_left"}
        assert (result.status_code, result.json()["error"]) == (400, error)
        response = gate.post(CHAT)
        gate.delta(gate.submit(), num_ids=0, finish=m.Finish.ERROR, error="grammars are not available")
        assert response.result().status_code == 500

    @pytest.mark.parametrize(
        ("path", "body", "param"),
        [
            ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}}, "response_format"),
            ("/v1/completions", COMPLETION | {"guided_regex": "a+"}, "guided_regex"),
            (
                "/inference/v1/generate",
                {"token_ids": [1], "sampling_params": {"guided_regex": "a+"}},
                "sampling_params.guided_regex",
            ),
        ],
    )
    def test_a_grammar_that_fails_midway_is_a_client_error(
        self, gate: Gate, path: str, body: dict[str, Any], param: str
    ) -> None:
        why = f"{m.GRAMMAR_FAILED}: it took longer than 1 s"
        expected = {"message": why, "type": "invalid_request_error", "param": param, "code": "invalid_grammar"}
        for fields in ({}, {"stream": True}):
            response = gate.post(body | fields, path)
            submit = gate.begin()
            gate.delta(submit, "{")
            gate.delta(submit, num_ids=0, finish=m.Finish.ERROR, error=why)
            result = response.result()
            error = events_of(result.text)[-1]["error"] if result.status_code == 200 else result.json()["error"]
            assert error == expected
            assert fields or result.status_code == 400

    @pytest.mark.parametrize(
        "given", [None, "application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
    )
    def test_media_types_of_json_are_accepted(self, gate: Gate, given: str | None) -> None:
        headers = {} if given is None else {"Content-Type": given}
        response = gate.do(gate.client.post, "/v1/chat/completions", content=json.dumps(CHAT), headers=headers)
        gate.serve()
        assert response.result().status_code == 200


class TestCompletion:
    def test_a_completion_has_a_choice_for_each_sequence_of_each_prompt(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "n": 2, "seed": 5})
        first, second = gate.submit(), gate.submit()
        assert [s.prompt for s in (first, second)] == [m.TextPrompt("a"), m.TextPrompt("b")]
        assert first.options.seed == second.options.seed == 5
        gate.accept(first, 2)
        gate.accept(second, 3)
        for submit, name in ((second, "b"), (first, "a")):
            for index in range(2):
                gate.finish(submit, f"{name}{index}", index)
        body = response.result().json()
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "a0"), (1, "a1"), (2, "b0"), (3, "b1")]
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9, **NONE_CACHED}
        assert {gate.closed()[0], gate.closed()[0]} == {first.request_id, second.request_id}

    def test_without_a_seed_each_prompt_gets_its_own(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "a", "a"]})
        assert len({gate.serve().options.seed for _ in range(3)}) == 3
        assert response.result().status_code == 200

    def test_a_rejected_prompt_aborts_the_others(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"]})
        first, second = gate.submit(), gate.submit()
        gate.accept(first)
        gate.reject(second, m.Failure(400, "the prompt is too long", "prompt", "context_length_exceeded"))
        result = response.result()
        assert result.status_code == 400
        assert result.json() == {
            "error": {
                "message": "the prompt is too long",
                "type": "invalid_request_error",
                "param": "prompt[1]",
                "code": "context_length_exceeded",
            }
        }
        for stage in ("ingest", "schedule"):
            assert gate.rig.receive(stage, m.Abort) == m.Abort(first.request_id, 1)
        gate.rig.until(lambda load: load.num_open_requests == 1)
        gate.finish(first, finish=m.Finish.ABORT)
        gate.rig.until(lambda load: load.num_open_requests == 0)

    def test_token_ids_are_submitted_unchanged(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": [1, 2, 3]})
        submit = gate.serve()
        assert submit.prompt == m.IdsPrompt(
            (1).to_bytes(4, "little") + (2).to_bytes(4, "little") + (3).to_bytes(4, "little")
        )
        assert response.result().status_code == 200


class TestPromptIdsInSharedMemory:
    def test_ids_in_shared_memory_are_counted_and_released(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.submit()
        arena = gate.rig.arena("ingest.0")
        ref = arena.put(bytes(4 * 2000), readers=("gateway.0",))
        assert isinstance(ref, ShmRef)
        gate.rig.send(m.Accepted(submit.request_id, 1, ref), "ingest.0")
        assert gate.rig.receive("ingest", m.Release) == m.Release([ref.offset], [ref.generation], "gateway.0")
        gate.finish(submit)
        assert response.result().json()["usage"]["prompt_tokens"] == 2000

    def test_ids_of_an_unknown_request_are_only_released(self, gate: Gate) -> None:
        ref = gate.rig.arena("ingest.0").put(bytes(8000), readers=("gateway.0",))
        gate.rig.send(m.Accepted(5, 1, ref), "ingest.0")
        gate.rig.receive("ingest", m.Release)
        gate.rig.load()
        assert gate.rig.nothing("schedule", 0)
        assert gate.rig.nothing("ingest", 0)


class TestResultsBeforeAcceptance:
    """Results and acceptances come over two channels, in either order."""

    @pytest.mark.parametrize("body", [CHAT, CHAT | {"stream": True, "stream_options": {"include_usage": True}}])
    def test_the_response_waits_for_the_prompts_length(self, gate: Gate, body: Any) -> None:
        response = gate.post(body)
        submit = gate.submit()
        gate.finish(submit, "Hello")
        assert gate.rig.load().num_open_requests == 1
        assert gate.rig.nothing("schedule", 0)
        gate.accept(submit, num_ids=5)
        assert gate.closed() == (submit.request_id, 1)
        assert '"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6,' in response.result().text
        gate.rig.until(lambda load: load.num_open_requests == 0)

    @pytest.mark.parametrize("finish", [m.Finish.STOP, m.Finish.ERROR])
    def test_a_request_that_failed_or_was_disconnected_does_not_wait(self, gate: Gate, finish: m.Finish) -> None:
        with gate.raw(CHAT) as connection:
            submit = gate.submit()
            gate.finish(submit, "x", finish=finish)
            gate.rig.load()
            if finish == m.Finish.ERROR:
                assert connection.recv(1000).startswith(b"HTTP/1.1 500")
        assert gate.closed() == (submit.request_id, 1)
        gate.rig.until(lambda load: load.num_open_requests == 0)
        # A late acceptance aborts nothing: schedule has already forgotten the request.
        gate.accept(submit)
        gate.rig.load()
        assert gate.rig.nothing("schedule", 0)

    def test_the_death_of_a_stage_before_the_acceptance_is_an_error(self, gate: Gate) -> None:
        responses = [gate.post(CHAT), gate.post(CHAT | {"stream": True})]
        for _ in responses:
            gate.finish(gate.submit(), "Hello")
        gate.rig.send(m.StageDied("ingest.0", "exit code 1"))
        gate.rig.receive("supervisor", m.Drained)
        assert all("stage ingest.0 died" in response.result().text for response in responses)


class TestModels:
    def test_models_are_listed(self, gate: Gate) -> None:
        body = gate.client.get("/v1/models").json()
        (model,) = body["data"]
        assert (body["object"], model["id"], model["object"]) == ("list", MODEL, "model")
        assert model["max_model_len"] == FACTS.max_model_len
        assert model["quantization"] == "none"
        assert model["tasks"] == ["generate", "embed"]
        assert model["default_sampling_params"] == {}
        assert gate.client.get(f"/v1/models/{MODEL}").json() == model

    def test_unknown_models_are_404(self, gate: Gate) -> None:
        result = gate.client.get("/v1/models/meta/llama")
        assert (result.status_code, result.json()["error"]["code"]) == (404, "model_not_found")


def test_expect_100_continue_is_answered(gate: Gate) -> None:
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nExpect: 100-Continue\r\nContent-Length: 2\r\n\r\n"
        )
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"{}")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400 ")


def test_the_version_is_returned(gate: Gate) -> None:
    assert gate.client.get("/version").json() == {"version": VERSION}


class TestCredits:
    @pytest.fixture
    def gate(self, tmp_path: Path) -> Iterator[Gate]:
        with Gate(tmp_path, max_open_sequences=3) as gate:
            yield gate

    def test_credits_count_sequences_and_are_returned(self, gate: Gate) -> None:
        first = gate.post(CHAT | {"n": 2})
        submit = gate.begin()
        refused = gate.post(CHAT | {"n": 2}).result()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        after_s = int(refused.headers["Retry-After"])
        assert after_s >= 1
        assert refused.json()["error"]["message"] == (
            "the server is overloaded: 1 of 3 sequences are free, and this request needs "
            f"2: n, or best_of, for each prompt; try again in {after_s} s"
        )
        other = gate.post(CHAT)
        gate.serve()
        assert other.result().status_code == 200
        for index in range(2):
            gate.finish(submit, index=index)
        assert first.result().status_code == 200
        gate.rig.until(lambda load: load.num_open_requests == 0)
        last = gate.post(CHAT | {"n": 3})
        gate.serve()
        assert last.result().status_code == 200

    def test_a_request_above_all_credits_is_a_client_error(self, gate: Gate) -> None:
        assert gate.post(CHAT | {"n": 4}).result().json()["error"]["param"] == "n"
        assert gate.complete(COMPLETION | {"prompt": ["a", "b"], "n": 2}).result().json()["error"]["param"] == "prompt"

    def test_an_aborted_request_holds_its_credits_until_it_is_closed(self, gate: Gate) -> None:
        with gate.raw(CHAT | {"n": 3}):
            submit = gate.submit()
        gate.rig.receive("schedule", m.Abort)
        assert gate.post(CHAT).result().status_code == 503
        for index in range(3):
            gate.finish(submit, index=index, finish=m.Finish.ABORT)
        gate.rig.until(lambda load: load.num_open_requests == 0)
        served = gate.post(CHAT)
        gate.serve()
        assert served.result().status_code == 200
