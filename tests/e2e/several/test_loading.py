"""Models are loaded and unloaded while the server runs: by requests, by routes, by time, and by each other's needs."""

import hashlib
import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest

from pipeline import Client, SamplingParams
from tests.e2e.server import Server
from tests.e2e.several.asking import GREEDY, ask, completion, error_of, events_of, states, statuses, until
from tests.e2e.several.conftest import config

KEY, OTHER_KEY, SLOW_KEY = "sk-all", "sk-vectors", "sk-slow"


@pytest.fixture(scope="module")
def small(folders: Path) -> Iterator[Server]:
    """A server with room for two of its three models, of which one is pinned."""
    tables = f"""
[models.chat]
model = "{folders}/llama"
pinned = true
[models.other]
model = "{folders}/llama"
[models.vectors]
model = "{folders}/bert"
[models.huge]
model = "{folders}/llama"
load_at_start = false
[models.huge.execute]
kv_cache_bytes = "450MiB"
[models.late]
model = "{folders}/wrong.gguf"
load_at_start = false
[models.wrong]
model = "{folders}/nothing"
load_at_start = false
"""
    top = "[gateway]\nsse_keep_alive_s = 0.1\n[supervisor]\ndrain_timeout_s = 0.5"
    (folders / "wrong.gguf").write_bytes(b"GGUF")
    with Server(config=config(folders, "small", "450MiB", tables, top)) as server:
        yield server


def post(server: Server, path: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(f"{server.url}{path}", method="POST"), timeout=60):
        """It answers when it is done."""


def embed(server: Server, **fields: Any) -> Any:
    return ask(server, "/v1/embeddings", {"model": "vectors", "input": "Hello"} | fields)


def only(server: Server, *names: str) -> None:
    """Have these models loaded, and no others."""
    for name, state in states(server).items():
        if state == "loaded" and name not in names:
            ask(server, "/models/unload", {"model": name})
            until(lambda name=name: states(server)[name] == "unloaded")  # type: ignore[misc]
    for name in names:
        ask(server, "/models/load", {"model": name})
    until(lambda: all(states(server)[name] == "loaded" for name in names))


def test_models_that_fit_are_loaded_at_the_start_in_order_and_the_log_says_why_not(small: Server) -> None:
    # The gateway hears of a change a moment after the log.
    found = until(lambda: (one := states(small))["vectors"] != "loading" and one)
    assert (found["chat"], found["other"], found["vectors"]) == ("loaded", "loaded", "unloaded")
    line = small.wait_for_line("does not fit now", 10)
    assert "model=vectors" in line and "needs=192MiB" in line and "free=" in line


def test_a_request_loads_its_model_and_the_idle_one_leaves_for_it(small: Server) -> None:
    only(small, "chat", "other")
    assert embed(small)["model"] == "vectors"
    found = states(small)
    assert (found["chat"], found["other"], found["vectors"]) == ("loaded", "unloaded", "loaded")
    text = completion(small, "other")["choices"][0]["text"]
    assert text == completion(small, "chat")["choices"][0]["text"]
    assert states(small)["vectors"] == "unloaded", "the pinned one stays, though it was used before the other"


def test_a_request_waits_for_a_busy_model_and_its_position_is_shown(small: Server) -> None:
    only(small, "chat", "other")
    with Client(small.zmq, model="other") as client:
        stream = client.generate("Hello", SamplingParams(max_tokens=200, **GREEDY))
        next(iter(stream))  # it goes on when its client takes the rest
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(embed(small)))
        waiting.start()
        status = until(lambda: (one := statuses(small)["vectors"]).get("position") and one)
        assert status["position"] == 1 and status["waits_for"] == ["other"]
        assert ask(small, "/health")["status"] == "ok"
        assert "".join(one.text for one in stream)
        waiting.join()
    assert found[0]["model"] == "vectors" and states(small)["other"] == "unloaded"


def test_a_stream_has_keep_alives_while_its_model_is_loaded(small: Server) -> None:
    only(small, "chat")
    body = {"model": "other", "prompt": "Hello", "max_tokens": 4, "stream": True} | GREEDY
    lines = events_of(small, "/v1/completions", body)
    assert lines[0] == ": the model is loading" and lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    text = "".join(one["choices"][0]["text"] for one in chunks)
    assert text == completion(small, "chat", 4)["choices"][0]["text"]


def test_ollamas_client_takes_a_stream_that_waits_for_its_model(small: Server) -> None:
    expected = completion(small, "chat", 4)["choices"][0]["text"]
    options = {"num_predict": 4, "temperature": 0}
    only(small, "chat")
    with ollama.Client(host=small.url, timeout=60) as client:
        parts = list(client.generate("other", "Hello", raw=True, options=options, stream=True))
        assert parts[0].response == "" and parts[0].model == "other" and parts[-1].done_reason == "length"
        assert "".join(part.response for part in parts) == expected
    only(small, "chat")
    body = {"model": "other:latest", "prompt": "Hello", "raw": True, "options": options}
    first, *_, last = map(json.loads, events_of(small, "/api/generate", body))
    assert (first["model"], first["response"], first["done"]) == ("other:latest", "", False)
    assert first["status"] == "the model is loading" and last["done"]


def test_a_stream_that_waits_ends_with_an_error_if_its_model_fails(small: Server) -> None:
    until(lambda: states(small)["late"] != "loading")
    lines = events_of(small, "/v1/completions", {"model": "late", "prompt": "Hello", "stream": True})
    assert lines[0].startswith(": the model") and "could not be loaded" in lines[-2]
    assert lines[-1] == "data: [DONE]"


def test_a_zeromq_client_has_its_model_loaded_and_does_not_keep_it(small: Server) -> None:
    only(small, "chat")
    with Client(small.zmq, model="other", timeout_s=60) as client:
        assert client.info.model == "other" and states(small)["other"] == "loaded"
        only(small, "chat")
        text = "".join(one.text for one in client.generate("Hello", SamplingParams(max_tokens=4, **GREEDY)))
        assert text == completion(small, "other", 4)["choices"][0]["text"]
        only(small, "chat")
        assert states(small)["other"] == "unloaded", "a connection without requests loads nothing"


def test_a_zeromq_stream_goes_on_when_its_model_was_unloaded_under_it(small: Server) -> None:
    only(small, "chat", "other")
    expected = completion(small, "chat", 200)["choices"][0]["text"]
    with Client(small.zmq, model="other", timeout_s=60) as client:
        stream = iter(client.generate("Hello", SamplingParams(max_tokens=200, **GREEDY)))
        text = next(stream).text  # the server waits for credit
        ask(small, "/models/unload", {"model": "other"})
        small.wait_for_line("unloaded model=other", 30)
        text += "".join(one.text for one in stream)
    assert text == expected


def test_a_model_that_can_never_fit_is_refused_with_the_reason(small: Server) -> None:
    status, body = error_of(small, "/v1/completions", {"model": "huge", "prompt": "x"})
    assert status == 503 and "memory_bytes is 450MiB, of which pinned models have" in body["error"]["message"]
    assert statuses(small)["huge"]["failed"]
    assert completion(small, "chat")["choices"], "the others serve"


def test_a_model_that_can_not_be_prepared_fails_alone(small: Server) -> None:
    status, body = error_of(small, "/v1/completions", {"model": "wrong", "prompt": "x"})
    assert status == 503 and "nothing" in body["error"]["message"]
    assert states(small)["wrong"] == "failed" and states(small)["chat"] == "loaded"


def test_llama_cpps_routes_load_and_unload(small: Server) -> None:
    only(small, "chat", "other")
    assert ask(small, "/models/unload", {"model": "other"}) == {"success": True}
    until(lambda: states(small)["other"] == "unloaded")
    status, body = error_of(small, "/models/unload", {"model": "other"})
    assert status == 400 and body["error"]["code"] == "model_not_loaded"
    assert ask(small, "/models/load", {"model": "other"}) == {"success": True}
    until(lambda: {one["id"]: one for one in ask(small, "/models")["data"]}["other"]["status"]["value"] == "loaded")
    assert error_of(small, "/models/load", {"model": "nope"})[0] == 404


def test_ollamas_keep_alive_unloads_at_once_or_later_or_never(small: Server) -> None:
    only(small, "chat", "other")
    generate = {"model": "other:latest", "prompt": "Hello", "stream": False}
    ask(small, "/api/generate", generate | {"keep_alive": -1})
    assert "expires" not in statuses(small)["other"]
    ask(small, "/api/generate", generate | {"keep_alive": "1h"})
    until(lambda: "expires" in statuses(small)["other"])
    ask(small, "/api/generate", generate | {"keep_alive": "100ms"})
    until(lambda: states(small)["other"] == "unloaded")
    reply = ask(small, "/api/generate", {"model": "other", "keep_alive": 0})
    assert reply["done_reason"] == "unload" and states(small)["other"] == "unloaded", "it was not loaded for that"
    assert ask(small, "/api/generate", {"model": "other", "stream": False})["done_reason"] == "load"
    assert states(small)["other"] == "loaded"
    assert ask(small, "/api/chat", {"model": "other", "keep_alive": 0, "stream": False})["done_reason"] == "unload"
    until(lambda: states(small)["other"] == "unloaded")
    assert [one["name"] for one in ask(small, "/api/ps")["models"]] == ["chat:latest"]


def test_lm_studios_ttl_unloads_a_model_that_is_idle(small: Server) -> None:
    only(small, "chat", "other")
    completion(small, "other", ttl=0.1)
    until(lambda: states(small)["other"] == "unloaded")
    completion(small, "chat", ttl=0.1)
    assert "expires" not in statuses(small)["chat"], "a pinned model stays"


@pytest.fixture(scope="module")
def keyed(folders: Path) -> Iterator[Server]:
    """A server with API keys, one of which may use one model; none is loaded at the start."""
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER_KEY, SLOW_KEY)]
    top = f"""
load_at_start = false
idle_unload_s = 1
[[keys]]
name = "all"
digest = "{digests[0]}"
[[keys]]
name = "vectors"
digest = "{digests[1]}"
models = ["vectors"]
[[keys]]
name = "slow"
digest = "{digests[2]}"
rpm = 1
"""
    with Server(config=config(folders, "keyed", top=top)) as server:
        yield server


def test_a_key_sees_and_uses_its_models_only(keyed: Server) -> None:
    body = {"model": "vectors", "input": "Hello"}
    assert ask(keyed, "/v1/embeddings", body, OTHER_KEY)["model"] == "vectors"
    assert [one["id"] for one in ask(keyed, "/v1/models", key=OTHER_KEY)["data"]] == ["vectors"]
    assert [one["name"] for one in ask(keyed, "/api/tags", key=OTHER_KEY)["models"]] == ["vectors:latest"]
    status, found = error_of(keyed, "/v1/completions", {"model": "chat", "prompt": "x"}, OTHER_KEY)
    assert status == 404 and "'vectors'" in found["error"]["message"] and "other" not in found["error"]["message"]
    assert error_of(keyed, "/models/load", {"model": "chat"}, OTHER_KEY)[0] == 404
    assert len(ask(keyed, "/v1/models", key=KEY)["data"]) == 3


def test_models_are_loaded_when_they_are_wanted_and_leave_when_they_are_not(keyed: Server) -> None:
    def state(name: str) -> str:
        return next(one["status"]["value"] for one in ask(keyed, "/v1/models", key=KEY)["data"] if one["id"] == name)

    assert state("other") == "unloaded", "load_at_start is off"
    body = {"model": "other", "prompt": "Hello", "max_tokens": 4}
    assert ask(keyed, "/v1/completions", body, KEY)["model"] == "other"
    assert state("other") == "loaded"
    until(lambda: state("other") == "unloaded")


def test_a_key_that_has_used_its_limit_loads_no_model(keyed: Server) -> None:
    def state() -> str:
        return next(one["status"]["value"] for one in ask(keyed, "/v1/models", key=KEY)["data"] if one["id"] == "other")

    until(lambda: state() == "unloaded")
    ask(keyed, "/v1/embeddings", {"model": "vectors", "input": "Hello"}, SLOW_KEY)
    status, found = error_of(keyed, "/v1/completions", {"model": "other", "prompt": "x"}, SLOW_KEY)
    assert status == 429 and found["error"]["code"] == "rate_limit_exceeded"
    for path in ("/models/load", "/api/show"):
        assert error_of(keyed, path, {"model": "other"}, SLOW_KEY)[0] == 429
    assert state() == "unloaded", "others have the memory"


def test_a_response_that_is_not_stored_loads_no_model(folders: Path) -> None:
    """Any web page can send a GET request."""
    with Server(config=config(folders, "no-responses", top="load_at_start = false")) as server:
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(server, "/v1/responses/resp_1")
        assert raised.value.code == 404 and b"not found" in raised.value.read()
        assert set(states(server).values()) == {"unloaded"}


def test_a_time_that_no_float_can_hold_is_for_ever(keyed: Server) -> None:
    assert ask(keyed, "/v1/embeddings", {"model": "vectors", "input": "Hello", "ttl": 10**400}, KEY)["data"]


def test_a_model_sleeps_alone(folders: Path) -> None:
    top = "load_at_start = false\n[gateway]\nenable_sleep_mode = true"
    with Server(config=config(folders, "asleep", top=top)) as server:
        text = completion(server, "other")["choices"][0]["text"]
        ask(server, "/models/load", {"model": "chat"})
        assert completion(server, "chat")["choices"][0]["text"] == text
        post(server, "/sleep?model=other")
        until(lambda: states(server)["other"] == "sleeping")
        assert completion(server, "chat")["choices"][0]["text"] == text
        post(server, "/wake_up?model=other")
        until(lambda: states(server)["other"] == "loaded")
        assert completion(server, "other")["choices"][0]["text"] == text


def test_a_signal_lets_open_streams_end_and_refuses_others(folders: Path) -> None:
    with Server(config=config(folders, "ending", top="load_at_start = false")) as server:
        assert completion(server, "other", 4)["choices"]
        with Client(server.zmq, model="other") as client:
            stream = iter(client.generate("Hello", SamplingParams(max_tokens=200, **GREEDY)))
            text = next(stream).text  # it goes on when its client takes the rest
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_line("supervisor.0 draining", 10)
            status, body = error_of(server, "/v1/completions", {"model": "chat", "prompt": "x"})
            assert status == 503 and body["error"]["code"] == "draining"
            text += "".join(one.text for one in stream)
        assert len(text) > 1 and server.stop() == 0
    assert "unloaded model=other" in server.log()
