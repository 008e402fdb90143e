"""Each key of [gateway] and [limits] that a gateway reads changes its replies."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.client import protocol as p
from pipeline.config.settings import ChatSettings, LimitSettings
from pipeline.runtime import messages as m
from tests.stages.gateway.gate import CHAT, COMPLETION, FACTS, Gate
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import chat, generate

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("find", "now", "add")]
SEEN = m.Failure(418, "seen")
"""Ingest's reply when the test has all it needs."""
SCHEMA = {"type": "object", "description": "x" * 1500}


def chat_of(gate: Gate, **fields: Any) -> httpx.Response:
    return gate.client.post("/v1/chat/completions", json=CHAT | fields)


def completion_of(gate: Gate, **fields: Any) -> httpx.Response:
    return gate.client.post("/v1/completions", json=COMPLETION | fields)


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and named field."""
    return response.status_code, response.json()["error"]["param"]


def is_accepted(gate: Gate, path: str, body: dict[str, Any]) -> bool:
    """Whether a request succeeds once the test has served it."""
    response = gate.post(body, path)
    gate.serve()
    return bool(response.result().status_code == 200)


@pytest.mark.parametrize(
    ("key", "most", "path", "param", "fits", "over"),
    [
        ("max_n", 2, "completions", "n", 2, 3),
        ("max_best_of", 3, "completions", "best_of", 3, 4),
        ("max_logprobs", 4, "completions", "logprobs", 4, 5),
        ("max_stop_strings", 2, "completions", "stop", ["a", "b"], ["a", "b", "c"]),
        ("max_stop_token_ids", 2, "completions", "stop_token_ids", [5, 6], [5, 6, 7]),
        ("max_logit_bias", 2, "completions", "logit_bias", {"5": 1, "6": 1}, {"5": 1, "6": 1, "7": 1}),
        ("max_bad_words", 2, "completions", "bad_words", ["a", "b"], ["a", "b", "c"]),
        ("max_prompt_bytes", 1024, "completions", "prompt", "x" * 1024, "x" * 1025),
        ("max_tools", 2, "chat/completions", "tools", TOOLS[:2], TOOLS),
    ],
)
def test_limits_on_request_fields_are_enforced(
    tmp_path: Path, key: str, most: int, path: str, param: str, fits: Any, over: Any
) -> None:
    limits = LimitSettings(**{key: most})
    body = CHAT if path.startswith("chat") else COMPLETION
    with Gate(tmp_path, limits=limits, chat=ChatSettings(tool_call_parser="hermes")) as gate:
        refused = gate.client.post(f"/v1/{path}", json=body | {param: over})
        assert error_of(refused) == (400, param)
        answer = gate.post(body | {param: fits}, f"/v1/{path}")
        gate.reject(gate.submit(), SEEN)
        assert answer.result().status_code == SEEN.status


@pytest.mark.parametrize(("most", "status"), [(1024, 400), (4096, 418)])
def test_max_grammar_bytes_bounds_a_schema(tmp_path: Path, most: int, status: int) -> None:
    with Gate(tmp_path, limits=LimitSettings(max_grammar_bytes=most)) as gate:
        answer = gate.complete(COMPLETION | {"structured_outputs": {"json": SCHEMA}})
        if status == 418:
            gate.reject(gate.submit(), SEEN)
        assert answer.result().status_code == status


@pytest.mark.parametrize(("most", "status"), [(3, 400), (4, 200)])
def test_max_prompt_logprobs_bounds_one_reply(tmp_path: Path, most: int, status: int) -> None:
    """Each of the four prompt tokens counts."""
    with Gate(tmp_path, limits=LimitSettings(max_prompt_logprobs=most)) as gate:
        answer = gate.complete(COMPLETION | {"prompt": [1, 2, 3, 4], "prompt_logprobs": 0})
        submit = gate.submit()
        gate.accept(submit, 4)
        if status == 200:
            gate.finish(submit)
        assert answer.result().status_code == status


def nested(depth: int) -> str:
    """JSON nested to this depth."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(("max_json_depth", "fits", "over"), [(16, 16, 17), (200, 200, 201)])
def test_max_json_depth_bounds_a_body(tmp_path: Path, max_json_depth: int, fits: int, over: int) -> None:
    """A body within the limit is parsed and fails because it has no model."""
    with Gate(tmp_path, limits=LimitSettings(max_json_depth=max_json_depth)) as gate:
        for depth, code in ((fits, None), (over, "invalid_json")):
            body = '{"x": ' + nested(depth - 1) + "}"
            error = gate.client.post("/v1/chat/completions", content=body).json()["error"]
            assert (error["code"] == "invalid_json") == (code is not None), error
        assert f"the limit is {max_json_depth} levels" in error["message"]


@pytest.mark.parametrize("max_json_depth", [16, 200])
def test_max_json_depth_bounds_zeromq_messages(tmp_path: Path, max_json_depth: int) -> None:
    limits = LimitSettings(max_json_depth=max_json_depth)
    with Gate(tmp_path, limits=limits) as gate, RawPeer(gate) as peer:
        for number, depth in enumerate((max_json_depth, max_json_depth + 1)):
            kwargs = '{"x": ' + nested(depth - 1) + "}"
            prompt = chat([p.MessageParam("user", "hi")], chat_template_kwargs=kwargs)
            peer.send(generate(number, prompt, credits=1))
        submit = gate.submit()
        failed = peer.receive(p.Failed)
        assert (failed.request_id, failed.failure.status) == (1, 400)
        assert f"the limit is {max_json_depth} levels" in failed.failure.message
        gate.finish(submit)
        gate.rig.load()


@pytest.mark.parametrize("max_header_bytes", [1024, 20_000])
def test_max_header_bytes_bounds_headers_and_urls(tmp_path: Path, max_header_bytes: int) -> None:
    with Gate(tmp_path, limits=LimitSettings(max_header_bytes=max_header_bytes)) as gate:
        for num_bytes, statuses in ((max_header_bytes - 100, {200, 404}), (max_header_bytes + 100, {431})):
            with httpx.Client(base_url=gate.url, timeout=30) as client:
                assert client.get("/version", headers={"X-A": "a" * num_bytes}).status_code in statuses
            with httpx.Client(base_url=gate.url, timeout=30) as client:
                assert client.get(f"/{'a' * num_bytes}").status_code in statuses


def host_status(gate: Gate, host: str) -> int:
    with socket.create_connection(gate.address, timeout=30) as connection:
        connection.sendall(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        reply = b"".join(iter(lambda: connection.recv(65536), b""))
    return int(reply.split()[1])


def test_admin_host_is_an_allowed_host(tmp_path: Path) -> None:
    with Gate(tmp_path, admin_host="admin.internal") as gate:
        assert [host_status(gate, host) for host in ("admin.internal", "other.internal")] == [200, 403]


@pytest.mark.parametrize(("policy", "status"), [("fcfs", 400), ("priority", 200)])
def test_priorities_are_accepted_with_the_priority_policy(tmp_path: Path, policy: Any, status: int) -> None:
    with Gate(tmp_path, policy=policy) as gate:
        answer = gate.complete(COMPLETION | {"priority": 3})
        if status == 200:
            assert gate.serve().options.priority == 3
        assert answer.result().status_code == status


def test_served_model_name_is_the_model_of_requests(tmp_path: Path) -> None:
    with Gate(tmp_path, served_model_name="mine") as gate:
        assert gate.client.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert completion_of(gate).status_code == 404
        assert is_accepted(gate, "/v1/completions", COMPLETION | {"model": "mine"})


def test_a_request_above_max_open_sequences_is_a_client_error(tmp_path: Path) -> None:
    """Not 503, which would invite a retry."""
    with Gate(tmp_path, max_open_sequences=3) as gate:
        status, param = error_of(completion_of(gate, n=4))
        assert (status, param) == (400, "n")
        with RawPeer(gate) as peer:
            assert peer.welcome.max_open_requests == 3


def test_requests_are_checked_against_the_models_limits(tmp_path: Path) -> None:
    """The executor reports the vocabulary, the maximum length and the embedding size."""
    with Gate(tmp_path) as gate:
        num = FACTS.max_model_len + 1
        assert error_of(completion_of(gate, prompt=[1] * num)) == (400, "prompt")
        assert error_of(completion_of(gate, truncate_prompt_tokens=num)) == (400, "truncate_prompt_tokens")
        body = {"model": "tiny", "input": "Hi", "dimensions": FACTS.hidden_size + 1}
        assert error_of(gate.client.post("/v1/embeddings", json=body)) == (400, "dimensions")
        assert error_of(completion_of(gate, logit_bias={str(FACTS.vocab_size): 1})) == (
            400,
            f"logit_bias.{FACTS.vocab_size}",
        )


def test_tool_call_parser_selects_the_format_of_calls(tmp_path: Path) -> None:
    texts = {
        "hermes": '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "find", "parameters": {}}',
        "mistral": '[TOOL_CALLS] [{"name": "find", "arguments": {}}]',
    }
    for name in ("hermes", "llama3", "mistral"):
        with Gate(tmp_path, chat=ChatSettings(tool_call_parser=name)) as gate:
            for other, text in texts.items():
                answer = gate.post(CHAT | {"tools": TOOLS})
                gate.serve(text)
                message = answer.result().json()["choices"][0]["message"]
                assert bool(message.get("tool_calls")) == (name == other), (name, json.dumps(message))
