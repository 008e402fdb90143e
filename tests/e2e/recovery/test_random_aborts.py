"""Clients leave at random moments: before their prompts are read, during prefill and decode, amid tool calls, beams and
several samples, while the server sleeps and wakes, over HTTP in each dialect and over ZeroMQ. Nothing of their requests
is left, and the next ones get what they would have got alone.

With PIPELINE_ALL_CASES=1 there are 1,200 requests.
"""

import json
import random
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.client import protocol as p
from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.slices import part_of
from tests.stages.gateway.peers import RawPeer, until
from tests.zmq_requests import generate

SEED = 1
MOST_AT_ONCE = 12
MAX_WAIT_S = 0.15
"""A client that gets nothing leaves after a random time within this."""
NUM_BURSTS = part_of(100, 6)
MESSAGES = [{"role": "user", "content": "one two three " * 9}]
TOOL = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "one two " * 30, "n": 3, "logprobs": 3} | LONG),
    "prompts": ("/v1/completions", {"prompt": ["one", "two " * 40, "three"], "echo": True, "logprobs": 1} | LONG),
    "best_of": ("/v1/completions", {"prompt": "one two", "best_of": 3, "n": 1} | LONG),
    "beams": ("/v1/completions", {"prompt": "one two", "n": 3, "use_beam_search": True} | LONG),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 1} | LONG),
    "tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}),
    "schema": (
        "/v1/chat/completions",
        {
            "messages": MESSAGES,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 60}),
    "response": ("/v1/responses", {"input": "one two", "max_output_tokens": 60, "instructions": "be " * 30}),
    "background": ("/v1/responses", {"input": "one two", "max_output_tokens": 60, "background": True}),
    "ollama": ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 60}}),
    "embeddings": ("/v1/embeddings", {"input": ["one two " * 20, "three", "four " * 50]}),
    "tokens": ("/tokenize", {"prompt": "one two " * 2000, "return_token_strs": True}),
}
NOT_STREAMED = ("beams", "embeddings", "tokens")
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("/v1/completions", {"prompt": "one two " * 30, "temperature": 0, "max_tokens": 20}),
    "seeded": ("/v1/completions", {"prompt": "two", "temperature": 1, "seed": 3, "n": 2, "max_tokens": 20}),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 1, "seed": 5, "max_tokens": 20}),
    "beams": ("/v1/completions", {"prompt": "one two", "n": 3, "use_beam_search": True, "max_tokens": 10}),
}
ZMQ: list[dict[str, Any]] = [
    {"prompt": "one two " * 30, "max_tokens": 60, "ignore_eos": True, "n": 3, "logprobs": 2},
    {"prompt": "one", "max_tokens": 60, "best_of": 2},
    {"prompt": "one two " * 30, "pooling": "mean"},
    {"prompt": "one two", "max_tokens": 60, "prompt_logprobs": 1},
]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with Server(
        f"model={tiny_model}",
        f"cache_dir={link_kernels(tiny_model.parent / 'cache')}",
        "execute.num_threads=1",
        "execute.kv_cache_bytes=256KiB",  # so that sequences are preempted, swapped out and in
        "schedule.max_num_seqs=8",
        "schedule.max_num_batched_tokens=32",
        "chat.tool_call_parser=hermes",
        "gateway.enable_sleep_mode=true",
    ) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


def post(client: httpx.Client, kind: tuple[str, dict[str, Any]]) -> Any:
    path, body = kind
    reply = client.post(path, json={"model": "tiny"} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def texts(client: httpx.Client) -> dict[str, list[str]]:
    """What requests get alone."""
    return {
        name: [one["message"]["content"] if "message" in one else one["text"] for one in post(client, kind)["choices"]]
        for name, kind in ALONE.items()
    }


def begin(server: Server, dice: random.Random) -> socket.socket:
    """A connection that has sent a request, or a part of one."""
    name = dice.choice(list(KINDS))
    path, body = KINDS[name]
    is_stream = dice.random() < 0.6 and name not in NOT_STREAMED
    content = json.dumps({"model": "tiny", "stream": is_stream} | body if is_stream else {"model": "tiny"} | body)
    host, port = server.url.removeprefix("http://").rsplit(":", 1)
    connection = socket.create_connection((host, int(port)), timeout=60.0)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    data = head.encode() + content.encode()
    connection.sendall(data[: dice.randrange(1, len(data))] if dice.random() < 0.1 else data)
    return connection


def leave(connection: socket.socket, dice: random.Random) -> None:
    """Leave at once, after a random time, or behind a part of the reply; closed, or reset."""
    connection.settimeout(dice.choice([1e-6, dice.random() * MAX_WAIT_S, MAX_WAIT_S]))
    try:
        for _ in range(dice.randrange(40)):
            if not connection.recv(dice.choice([1, 200, 4000])):
                break
    except TimeoutError:
        pass
    if dice.random() < 0.5:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def over_zeromq(server: Server, dice: random.Random) -> None:
    """Several requests of one connection, some of which the client aborts, until it leaves."""
    with RawPeer(server.zmq) as peer:
        for number in range(1, 4):
            fields = dict(dice.choice(ZMQ))
            peer.send(generate(number, fields.pop("prompt"), credits=dice.choice([0, 1, 100]), **fields))
        for _ in range(dice.randrange(12)):
            if not peer.socket.poll(int(1000 * MAX_WAIT_S)):
                break
            message = peer.receive()
            assert not isinstance(message, p.Error), message
            if isinstance(message, p.Failed):
                assert message.failure.status < 500, message
            if dice.random() < 0.2:
                peer.send(p.Abort(dice.randrange(1, 4)))


def assert_nothing_is_left(server: Server, client: httpx.Client) -> None:
    """All counts are back at 0, in each stage."""

    def is_over() -> bool:
        load = client.get("/load").json()
        return not any(load[name] for name in ("server_load", "open_sequences", "open_tokens", "open_bytes"))

    until(is_over, "the gateway forgets them", 60.0)
    health = server.until_idle()
    assert health["swapped"] == 0 and health["swap_blocks"]["free"] == health["swap_blocks"]["total"]
    assert health["status"] == "ok"
    stats = client.get("/metrics").text
    for name in ("pipeline_open_requests", "pipeline_open_sequences", "pipeline_requests_preempted"):
        values = re.findall(rf"(?m)^{name}(?:{{.*?}})? (.+)$", stats)
        assert values and not any(map(float, values)), (name, values)


def burst(server: Server, dice: random.Random) -> None:
    connections = [begin(server, dice) for _ in range(MOST_AT_ONCE)]
    over_zeromq(server, dice)
    for connection in dice.sample(connections, len(connections)):
        leave(connection, dice)


def test_nothing_is_left_of_them(server: Server, client: httpx.Client) -> None:
    alone, pids = texts(client), {name: server.stage(name).pid for name in ("gateway", "ingest", "schedule")}
    for number in range(NUM_BURSTS):
        dice = random.Random(f"{SEED}:{number}")
        burst(server, dice)
        assert_nothing_is_left(server, client)
        assert texts(client) == alone, f"after the burst {number}"
    assert {name: server.stage(name).pid for name in pids} == pids
    assert server.health()["status"] == "ok"


def test_nor_of_those_that_leave_while_the_server_sleeps(server: Server, client: httpx.Client) -> None:
    alone = texts(client)
    for number in range(part_of(8, 2)):
        dice = random.Random(f"{SEED}:asleep:{number}")
        connections = [begin(server, dice) for _ in range(MOST_AT_ONCE)]
        assert client.post("/sleep?level=1").status_code == 200
        connections += [begin(server, dice) for _ in range(MOST_AT_ONCE)]
        for connection in connections[::2]:
            leave(connection, dice)
        assert client.post("/wake_up").status_code == 200
        for connection in connections[1::2]:
            leave(connection, dice)
        assert_nothing_is_left(server, client)
        assert texts(client) == alone
