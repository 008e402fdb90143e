"""Several models behind one address: requests reach their models, and what happens to one leaves the others alone."""

import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline import Client, RequestError, SamplingParams
from tests.e2e.server import STAGES, Server
from tests.e2e.several.asking import GREEDY, ask, completion, error_of, states
from tests.e2e.several.conftest import config


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[Server]:
    with Server(config=config(folders, "all")) as server:
        server.wait_for_line("ready on http", 60)
        yield server


def process(server: Server, stage: str, model: str) -> psutil.Process:
    title = f"pipeline: {stage}.0 {model}"
    server.look()
    return next(one for one in server.seen.values() if one.is_running() and one.cmdline()[:1] == [title])


def test_the_list_has_all_models_with_their_states(server: Server) -> None:
    found = {one["id"]: one for one in ask(server, "/v1/models")["data"]}
    assert list(found) == ["chat", "other", "vectors"]
    assert {one["status"]["value"] for one in found.values()} == {"loaded"}
    assert found["chat"]["aliases"] == ["gpt-x"] and found["vectors"]["tasks"] == ["embed", "token_embed"]
    assert [one["name"] for one in ask(server, "/api/tags")["models"]] == [f"{name}:latest" for name in found]
    assert [one["name"] for one in ask(server, "/api/ps")["models"]] == [f"{name}:latest" for name in found]


def test_every_api_chooses_by_model(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert completion(server, "gpt-x")["choices"] == completion(server, "chat")["choices"]
    assert ask(server, "/v1/chat/completions", {"model": "chat"} | chat)["model"] == "chat"
    assert ask(server, "/v1/messages", {"model": "other"} | chat)["model"] == "other"
    assert ask(server, "/v1/responses", {"model": "chat", "input": "Hello", "max_output_tokens": 4})["model"] == "chat"
    assert ask(server, "/api/generate", {"model": "OTHER:latest", "prompt": "Hello", "stream": False})["done"]
    assert ask(server, "/tokenize", {"model": "vectors", "prompt": "Hello"})["max_model_len"] == 128
    vectors = ask(server, "/v1/embeddings", {"model": "vectors", "input": "Hello"})
    assert vectors["model"] == "vectors" and len(vectors["data"][0]["embedding"]) > 1
    assert ask(server, "/api/show", {"model": "vectors"})["capabilities"] == ["embedding"]


def test_a_stored_response_is_found_at_its_model(server: Server) -> None:
    body = {"model": "other", "input": "Hello", "max_output_tokens": 4}
    response_id = ask(server, "/v1/responses", body)["id"]
    assert ask(server, f"/v1/responses/{response_id}")["model"] == "other"


def test_unknown_models_are_404_and_the_error_names_those_that_there_are(server: Server) -> None:
    status, body = error_of(server, "/v1/completions", {"model": "nope", "prompt": "x"})
    assert status == 404 and body["error"]["code"] == "model_not_found"
    assert "'chat', 'other', 'vectors'" in body["error"]["message"]
    assert error_of(server, "/api/generate", {"model": "nope", "prompt": "x"})[0] == 404
    assert ask(server, "/api/show", {"name": "chat"})["capabilities"], "Ollama's older field"
    status, body = error_of(server, "/v1/completions", {"prompt": "x", "name": "chat"})
    assert status == 400 and body["error"]["param"] == "model"


def test_a_model_answers_for_what_it_can_do(server: Server) -> None:
    status, body = error_of(server, "/v1/completions", {"model": "vectors", "prompt": "x"})
    assert status == 400 and body["error"]["code"] == "unsupported_task"


def test_metrics_have_the_models_name(server: Server) -> None:
    completion(server, "chat")
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    samples = [line for line in lines if not line.startswith("#")]
    assert all('model_name="' in line for line in samples)
    assert 'pipeline_model_state{model_name="vectors",state="loaded"} 1' in samples
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family is there once"
    for name in ("chat", "other"):
        assert any(line.startswith(f'vllm:generation_tokens_total{{model_name="{name}"') for line in samples)


@pytest.mark.parametrize("stage", STAGES[1:])
def test_a_stage_of_one_model_that_is_killed_leaves_the_streams_of_the_other_alone(server: Server, stage: str) -> None:
    expected = completion(server, "chat", 200)["choices"]
    found: list[Any] = []
    streams = [threading.Thread(target=lambda: found.append(completion(server, "chat", 200))) for _ in range(4)]
    before = {name: process(server, name, "chat").pid for name in STAGES[1:]}
    for one in streams:
        one.start()
    killed = process(server, stage, "other")
    killed.kill()
    for one in streams:
        one.join()
    assert [one["choices"] for one in found] == [expected] * 4
    assert {name: process(server, name, "chat").pid for name in STAGES[1:]} == before
    assert completion(server, "other", 200)["choices"] == expected, "it is back, and serves the same"


def test_the_gateway_that_is_killed_is_back_with_all_models(server: Server) -> None:
    server.stage("gateway").kill()
    server.wait_for_line("supervisor.0@vectors gateway.0 is back", 30)
    server.wait_for_line("supervisor.0@chat gateway.0 is back", 30)
    assert server.until(lambda health: health["status"] == "ok")
    assert completion(server, "chat")["choices"]
    assert states(server) == dict.fromkeys(("chat", "other", "vectors"), "loaded")


def test_a_zeromq_connection_is_for_the_model_that_its_hello_names(server: Server) -> None:
    with Client(server.zmq, model="gpt-x") as chat, Client(server.zmq, model="vectors") as vectors:
        assert chat.info.model == "chat" and vectors.info.model == "vectors"
        text = "".join(one.text for one in chat.generate("Hello", SamplingParams(max_tokens=8, **GREEDY)))
        assert text == completion(server, "chat")["choices"][0]["text"]
    with Client(server.zmq) as first:
        assert first.info.model == "chat"
    with pytest.raises(RequestError, match="models are 'chat', 'other', 'vectors'"):
        Client(server.zmq, model="nope")
