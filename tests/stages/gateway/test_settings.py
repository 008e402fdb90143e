"""Each key of [gateway] and [limits], as far as a gateway reads it, changes what clients are answered."""

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

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("find", "now", "add")]
SEEN = m.Failure(418, "seen")
"""What ingest answers if the test has seen enough."""
SCHEMA = {"type": "object", "description": "x" * 1500}


def chat_of(gate: Gate, **fields: Any) -> httpx.Response:
    return gate.client.post("/v1/chat/completions", json=CHAT | fields)


def completion_of(gate: Gate, **fields: Any) -> httpx.Response:
    return gate.client.post("/v1/completions", json=COMPLETION | fields)


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status, and the field that is named."""
    return response.status_code, response.json()["error"]["param"]


def is_let_through(gate: Gate, path: str, body: dict[str, Any]) -> bool:
    """Whether a request comes to ingest; it is answered then."""
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
def test_a_request_may_have_so_much_and_no_more(
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
def test_max_prompt_logprobs_bounds_what_one_reply_tells(tmp_path: Path, most: int, status: int) -> None:
    """Each of its four tokens counts."""
    with Gate(tmp_path, limits=LimitSettings(max_prompt_logprobs=most)) as gate:
        answer = gate.complete(COMPLETION | {"prompt": [1, 2, 3, 4], "prompt_logprobs": 0})
        submit = gate.submit()
        gate.accept(submit, 4)
        if status == 200:
            gate.finish(submit)
        assert answer.result().status_code == status


def nested(depth: int) -> str:
    """JSON of so many levels."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(("max_json_depth", "fits", "over"), [(16, 16, 17), (200, 200, 201)])
def test_max_json_depth_bounds_a_body(tmp_path: Path, max_json_depth: int, fits: int, over: int) -> None:
    """A body that fits is read: what it lacks is the model."""
    with Gate(tmp_path, limits=LimitSettings(max_json_depth=max_json_depth)) as gate:
        for depth, code in ((fits, None), (over, "invalid_json")):
            body = '{"x": ' + nested(depth - 1) + "}"
            error = gate.client.post("/v1/chat/completions", content=body).json()["error"]
            assert (error["code"] == "invalid_json") == (code is not None), error
        assert f"the limit is {max_json_depth} levels" in error["message"]


@pytest.mark.parametrize("max_json_depth", [16, 200])
def test_max_json_depth_bounds_what_comes_over_zeromq(tmp_path: Path, max_json_depth: int) -> None:
    limits = LimitSettings(max_json_depth=max_json_depth)
    with Gate(tmp_path, limits=limits) as gate, RawPeer(gate) as peer:
        for number, depth in enumerate((max_json_depth, max_json_depth + 1)):
            kwargs = '{"x": ' + nested(depth - 1) + "}"
            prompt = p.ChatPrompt([p.ChatMessage("user", "hi")], chat_template_kwargs=kwargs)
            peer.say(p.Generate(number, "", prompt, p.Params(), 1))
        submit = gate.submit()
        failed = peer.hear(p.Failed)
        assert (failed.request_id, failed.failure.status) == (1, 400)
        assert f"the limit is {max_json_depth} levels" in failed.failure.message
        gate.finish(submit)
        gate.rig.load()


@pytest.mark.parametrize("max_header_bytes", [1024, 20_000])
def test_max_header_bytes_bounds_headers_and_addresses(tmp_path: Path, max_header_bytes: int) -> None:
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


def test_admin_host_is_a_name_of_the_server_itself(tmp_path: Path) -> None:
    with Gate(tmp_path, admin_host="admin.internal") as gate:
        assert [host_status(gate, host) for host in ("admin.internal", "other.internal")] == [200, 403]


@pytest.mark.parametrize(("policy", "status"), [("fcfs", 400), ("priority", 200)])
def test_priorities_are_taken_if_the_policy_is_by_priority(tmp_path: Path, policy: Any, status: int) -> None:
    with Gate(tmp_path, policy=policy) as gate:
        answer = gate.complete(COMPLETION | {"priority": 3})
        if status == 200:
            assert gate.serve().options.priority == 3
        assert answer.result().status_code == status


def test_served_model_name_is_the_name_that_requests_give(tmp_path: Path) -> None:
    with Gate(tmp_path, served_model_name="mine") as gate:
        assert gate.client.get("/v1/models").json()["data"][0]["id"] == "mine"
        assert completion_of(gate).status_code == 404
        assert is_let_through(gate, "/v1/completions", COMPLETION | {"model": "mine"})


def test_a_request_for_more_sequences_than_may_be_open_is_refused_for_good(tmp_path: Path) -> None:
    """Not with 503, which would say that it may be sent again."""
    with Gate(tmp_path, max_open_sequences=3) as gate:
        status, param = error_of(completion_of(gate, n=4))
        assert (status, param) == (400, "n")
        with RawPeer(gate) as peer:
            assert peer.welcome.max_open_requests == 3


def test_what_the_model_takes_is_known_from_the_start(tmp_path: Path) -> None:
    """Requests are held to the executor's facts: ids, their number, and the size of an embedding."""
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


def test_tool_format_says_how_calls_are_read(tmp_path: Path) -> None:
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
