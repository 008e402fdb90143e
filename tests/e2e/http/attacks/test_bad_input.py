"""Every bad input gets a clear 4xx in OpenAI's shape, and the server keeps serving."""

import http.client
import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from tests.compiled import link_kernels
from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"model": MODEL, "prompt": "Hi"}


def post(server: Server, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


CASES: list[tuple[str, str, bytes | dict[str, Any], int, str | None]] = [
    ("unknown model", "chat/completions", CHAT | {"model": "gpt-9"}, 404, "model"),
    ("no messages", "chat/completions", CHAT | {"messages": []}, 400, "messages"),
    ("messages of a wrong type", "chat/completions", CHAT | {"messages": "Hi"}, 400, "messages"),
    ("a role of a wrong type", "chat/completions", CHAT | {"messages": [{"role": 1, "content": ""}]}, 400, None),
    ("missing messages", "chat/completions", {"model": MODEL}, 400, "messages"),
    ("missing prompt", "completions", {"model": MODEL}, 400, "prompt"),
    ("temperature too high", "completions", TEXT | {"temperature": 2.5}, 400, "temperature"),
    ("temperature below zero", "completions", TEXT | {"temperature": -0.1}, 400, "temperature"),
    ("temperature as text", "completions", TEXT | {"temperature": "warm"}, 400, "temperature"),
    ("temperature not a number", "completions", b'{"model":"m","prompt":"x","temperature":NaN}', 400, "temperature"),
    ("temperature infinite", "completions", b'{"model":"m","prompt":"x","temperature":1e999}', 400, "temperature"),
    ("top_p zero", "completions", TEXT | {"top_p": 0}, 400, "top_p"),
    ("top_p above one", "completions", TEXT | {"top_p": 1.01}, 400, "top_p"),
    ("top_k too low", "completions", TEXT | {"top_k": -2}, 400, "top_k"),
    ("min_p above one", "completions", TEXT | {"min_p": 1.5}, 400, "min_p"),
    ("n zero", "completions", TEXT | {"n": 0}, 400, "n"),
    ("n huge", "completions", TEXT | {"n": 10**9}, 400, "n"),
    ("max_tokens zero", "completions", TEXT | {"max_tokens": 0}, 400, "max_tokens"),
    ("max_tokens a fraction", "completions", TEXT | {"max_tokens": 1.5}, 400, "max_tokens"),
    ("max_tokens beyond the model", "completions", TEXT | {"max_tokens": 10**6}, 400, "max_tokens"),
    ("seed beyond 64 bits", "completions", TEXT | {"seed": 2**70}, 400, "seed"),
    ("an empty stop string", "completions", TEXT | {"stop": ""}, 400, "stop"),
    ("stop of a wrong type", "completions", TEXT | {"stop": 5}, 400, "stop"),
    ("too many stop strings", "completions", TEXT | {"stop": ["x"] * 1000}, 400, "stop"),
    ("stop ids beyond the vocabulary", "completions", TEXT | {"stop_token_ids": [10**8]}, 400, "stop_token_ids[0]"),
    ("prompt ids beyond the vocabulary", "completions", TEXT | {"prompt": [1, 10**6]}, 400, "prompt[1]"),
    ("negative prompt ids", "completions", TEXT | {"prompt": [-1]}, 400, "prompt[0]"),
    ("an empty prompt", "completions", TEXT | {"prompt": ""}, 400, "prompt"),
    ("an empty list of prompts", "completions", TEXT | {"prompt": []}, 400, "prompt"),
    ("a prompt too long", "completions", TEXT | {"prompt": "word " * 9000}, 400, "prompt"),
    ("messages too long", "chat/completions", CHAT | {"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
    ("stream of a wrong type", "completions", TEXT | {"stream": "yes"}, 400, "stream"),
    ("stream_options without stream", "completions", TEXT | {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("tools of an unknown type", "chat/completions", CHAT | {"tools": [{"type": "code", "function": {"name": "a"}}]}, 400, "tools[0].type"),
    ("an image", "chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, None),
    ("broken JSON", "completions", b'{"model": "m", "prompt": ', 400, None),
    ("JSON that is no object", "completions", b"[1, 2]", 400, None),
    ("an empty body", "completions", b"", 400, None),
    ("not UTF-8", "completions", b'{"model": "m", "prompt": "\xff\xfe"}', 400, None),
    ("JSON a thousand levels deep", "completions", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, None),
    ("a body too big", "completions", TEXT | {"prompt": "x" * (5 * 1024**2)}, 413, None),
]  # fmt: skip


@pytest.mark.parametrize(("what", "path", "body", "status", "param"), CASES, ids=[case[0] for case in CASES])
def test_bad_input_gets_a_clear_error(
    server: Server, what: str, path: str, body: bytes | dict[str, Any], status: int, param: str | None
) -> None:
    got, reply = post(server, f"/v1/{path}", body)
    assert got == status, reply
    error = reply["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/models/gpt-9", 404)])
def test_unknown_routes_and_models_are_not_found(server: Server, path: str, status: int) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    assert (response.status, "message" in json.loads(response.read())["error"]) == (status, True)
    connection.close()


def test_unusual_but_valid_text_is_served(server: Server) -> None:
    strange = ["\x00", "\u202e\u0301", "<|im_start|><|im_end|>", "{{ 7*7 }}{% raw %}", "🧑‍🚀" * 20, " " * 50, "\\ud800"]
    for text in strange:
        body = CHAT | {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
        status, reply = post(server, "/v1/chat/completions", body)
        assert status == 200, reply


def test_the_server_is_healthy_afterwards(server: Server) -> None:
    health = server.until_idle()
    assert health["status"] == "ok"
    assert all(process.is_running() for process in server.seen.values())


def test_a_prompt_on_which_the_tokenizer_panics_gets_a_clear_error(tmp_path: Path) -> None:
    """The checkpoint's split pattern panics on 35 bytes. The processes keep running."""
    from tests.stages.ingest.models import PANICS
    from tests.stages.prepare.checkpoints import save_folder, tiny_llama

    folder = save_folder(
        tmp_path / "tiny", tiny_llama(), tokenizer_config={"chat_template": "{{ messages[0].content }}"}
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    split = pre_tokenizers.Split(Regex("(a+)+$"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.save(str(folder / "tokenizer.json"))
    sets = (
        f"model={folder}",
        f"cache_dir={link_kernels(tmp_path / 'cache')}",
        "served_model_name=tiny",
        "gateway.zmq=off",
    )
    small = ("execute.kv_cache_bytes=16MiB", "execute.num_threads=1")
    text: dict[str, Any] = {"model": "tiny", "prompt": PANICS, "max_tokens": 2, "ignore_eos": True}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/tokenize", text, "prompt"),
        ("/v1/completions", text, "prompt"),
        ("/v1/completions", text | {"prompt": "b" * 100_000 + PANICS, "truncate_prompt_tokens": 4}, "prompt"),
        ("/v1/completions", text | {"prompt": "Hi", "bad_words": [PANICS]}, "bad_words"),
        ("/v1/embeddings", {"model": "tiny", "input": PANICS}, "input"),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": PANICS}]}, "messages"),
    ]
    with Server(*sets, *small) as server:
        for path, body, param in cases:
            status, reply = post(server, path, body)
            assert status == 400, reply
            assert reply["error"]["param"] == param
            assert "tokenized: Onig: Regex search error: retry-limit-in-match over" in reply["error"]["message"]
            status, reply = post(server, "/v1/completions", text | {"prompt": "Hi"})
            assert (status, reply["usage"]["completion_tokens"]) == (200, 2)
        assert server.until_idle()["status"] == "ok"
        assert all(process.is_running() for process in server.seen.values())
