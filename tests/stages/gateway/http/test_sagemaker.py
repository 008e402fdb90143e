"""Routes for SageMaker, /ping and /invocations, and vLLM's /tokenizer_info and /server_info."""

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.settings import GatewaySettings, Settings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin import handlers
from pipeline.stages.gateway.admin.server_info import server_info
from tests.stages.gateway.gate import CHAT, COMPLETION, FACTS, MODEL, Gate
from tests.stages.gateway.http.access.test_guard import RIGHT, locked


def test_ping_shows_whether_requests_are_taken(tmp_path: Path) -> None:
    with Gate(tmp_path, start=False) as gate:
        for method in ("GET", "POST"):
            response = gate.client.request(method, "/ping")
            assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")


def test_ping_has_no_body_and_needs_no_key(tmp_path: Path) -> None:
    with locked(tmp_path) as gate:
        response = gate.client.get("/ping")
        assert (response.status_code, response.content) == (200, b"")
        assert gate.client.post("/ping").status_code == 401
        assert gate.client.post("/ping", headers=RIGHT).status_code == 200


def test_ping_is_at_the_admin_port_if_there_is_one(tmp_path: Path) -> None:
    with locked(tmp_path, admin=True) as gate:
        admin = gate.admin  # type: ignore[attr-defined]
        assert gate.client.get(f"{admin}/ping").status_code == 200
        assert gate.client.get("/ping").status_code == 401
        assert gate.client.get("/ping", headers=RIGHT).status_code == 405


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("body", "kind"), [(CHAT, "chat.completion"), (COMPLETION, "text_completion")])
def test_invocations_are_run_by_their_fields(gate: Gate, body: dict[str, Any], kind: str, is_stream: bool) -> None:
    without_model = {name: value for name, value in body.items() if name != "model"}
    for sent in (body, without_model, body | {"model": None}):
        future = gate.post(sent | {"stream": is_stream, "max_tokens": 7}, "/invocations")
        submit = gate.serve("Hello")
        assert submit.options.max_tokens == 7
        text = future.result().text
        first = json.loads(text.split("\n\n")[0].removeprefix("data: "))
        assert first["object"].startswith(kind) and first["model"] == MODEL and "Hello" in text
        assert text.endswith("[DONE]\n\n") == is_stream


def test_an_invocation_for_embeddings(gate: Gate) -> None:
    future = gate.post({"messages": None, "prompt": None, "input": "Hi"}, "/invocations")
    gate.delta(gate.begin(), "", token_outputs=np.ones(8, "<f4").tobytes(), finish=m.Finish.LENGTH)
    assert len(future.result().json()["data"][0]["embedding"]) == 8


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "'messages' (a chat), 'prompt' (completions) and 'input' (embeddings)"),
        ({"model": MODEL, "text": "x"}, "must have one of"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "temperature": 9}, "'temperature' must be a number >= 0 and <= 2"),
        ({"input": "x", "model": "other"}, "'other' does not exist"),
        (b"[1]", "the body must be an object"),
        (b"{", "not valid JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
    ],
)
def test_bad_invocations(gate: Gate, body: Any, words: str) -> None:
    response = gate.post(body, "/invocations").result()
    assert 400 <= response.status_code < 500 and words in response.json()["error"]["message"]


def test_server_info_has_the_settings_without_the_file_of_keys(tmp_path: Path) -> None:
    with Gate(tmp_path, api_keys_file="/run/secrets/keys", max_open_sequences=77) as gate:
        text = gate.client.get("/server_info").json()
        info = gate.client.get("/server_info", params={"config_format": "json"}).json()
        bad = gate.client.get("/server_info", params={"config_format": "yaml"})
    assert info["vllm_config"]["gateway"]["max_open_sequences"] == 77
    assert info["quantization"] == "none"
    assert tomllib.loads(text["vllm_config"])["gateway"]["max_open_sequences"] == 77
    assert info["vllm_config"]["gateway"]["api_keys_file"] == "hidden"
    assert "/run/secrets" not in text["vllm_config"]
    assert text["version"] == info["version"]
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "config_format")


@pytest.mark.parametrize(
    ("name", "path", "num"),
    [("server_info", "/server_info?config_format=", 2), ("tokenizer_info", "/tokenizer_info?x=", 1)],
)
def test_what_stays_the_same_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, path: str, num: int
) -> None:
    """The settings as text take 9 ms, and 32 requests begin in one turn of the loop."""
    built: list[object] = []
    build = getattr(handlers, name)

    def counted(*args: Any) -> Any:
        built.append(args)
        return build(*args)

    monkeypatch.setattr(handlers, name, counted)
    with Gate(tmp_path) as gate:
        for form in ("text", "json") * 4:
            assert gate.client.get(path + form).status_code == 200
    assert len(built) == num


def test_server_info_has_no_names_of_files_with_private_keys() -> None:
    gateway = GatewaySettings(ssl_certfile="/run/secrets/both.pem", ssl_keyfile="/run/secrets/key.pem")
    text = server_info(Settings(gateway=gateway), "text", FACTS).vllm_config
    found = tomllib.loads(text)["gateway"]
    assert (found["ssl_certfile"], found["ssl_keyfile"], found["ssl_ca_certs"]) == ("hidden", "hidden", "")
    assert "/run/secrets" not in text


def test_tokenizer_info(tmp_path: Path) -> None:
    added = [{"id": 0, "content": "</s>", "special": True}, {"id": 5, "content": "<tool_call>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    with Gate(tmp_path) as gate:
        info = gate.client.get("/tokenizer_info").json()
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "</s>",
        "added_tokens_decoder": {
            "0": {"content": "</s>", "special": True},
            "5": {"content": "<tool_call>", "special": False},
        },
        "chat_template": "{{ messages }}",
    }
