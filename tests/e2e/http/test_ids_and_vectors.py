"""Logprobs and embeddings equal those of transformers for the same weights and ids, in float32."""

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tests.e2e.server import Server
from tests.stages.gateway.gate import events_of

CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 2e-4}
PROMPT = "The quick brown fox, 漢字 🙂"
NUM_TOP = 5


@pytest.fixture(scope="module")
def url(tiny_model: Path) -> Iterator[str]:
    sets = (
        *(f"model={tiny_model}", f"cache_dir={tiny_model.parent / 'cache'}", "served_model_name=tiny"),
        *("execute.dtype=float32", "execute.num_threads=1", "execute.kernels=torch", "execute.kv_cache_bytes=16MiB"),
        "schedule.max_num_batched_tokens=16",  # so that a prompt is computed in chunks
    )
    with Server(*sets) as server:
        yield server.url


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


@torch.inference_mode()
def log_softmax(reference: Any, ids: list[int]) -> "np.ndarray[Any, Any]":
    """Logprobs after each id, [len(ids), vocab]"""
    logits = reference(torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1).numpy()


@torch.inference_mode()
def hidden(reference: Any, ids: list[int]) -> "np.ndarray[Any, Any]":
    """Hidden states after the last norm, [len(ids), hidden_size]"""
    return reference.model(torch.tensor([ids])).last_hidden_state[0].numpy()


def post(url: str, path: str, **body: Any) -> Any:
    response = httpx.post(url + path, json={"model": "tiny"} | body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def bytes_of(name: str) -> bytes:
    """The bytes of a token of a completion."""
    escaped = name.removeprefix("bytes:").encode()
    if not name.startswith("bytes:"):
        return escaped
    return re.sub(rb"\\x([0-9a-f]{2})", lambda match: bytes.fromhex(match[1].decode()), escaped)


def test_logprobs_of_a_prompt_and_an_output_are_the_model_s(url: str, reference: Any, tokenizer: Tokenizer) -> None:
    fields = {"echo": True, "logprobs": NUM_TOP, "prompt_logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    (choice,) = post(url, "/v1/completions", prompt=PROMPT, max_tokens=12, seed=3, temperature=1.5, **fields)["choices"]
    prompt_ids, ids = choice["prompt_token_ids"], choice["token_ids"]
    assert prompt_ids == tokenizer.encode(PROMPT).ids and len(ids) == 12
    everything = prompt_ids + ids
    expected = log_softmax(reference, everything)[:-1]
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert np.allclose(logprobs["token_logprobs"][1:], expected[np.arange(len(expected)), everything[1:]], **CLOSE)
    for top, token, own, row in zip(
        logprobs["top_logprobs"][1:], logprobs["tokens"][1:], logprobs["token_logprobs"][1:], expected, strict=True
    ):
        most_likely = np.sort(row)[-NUM_TOP:]
        assert token in top and np.isclose(max(top.values()), most_likely[-1], **CLOSE)
        for score in top.values():  # fewer, if two of them have the same text
            assert np.isclose(score, [*most_likely, own], **CLOSE).any()
    for entry, token_id, row in zip(choice["prompt_logprobs"][1:], prompt_ids[1:], expected[:-12], strict=False):
        assert np.isclose(entry[str(token_id)]["logprob"], row[token_id], **CLOSE)
        for key, one in entry.items():
            assert one["rank"] in (None, 1 + int((row > row[int(key)]).sum()))
    prompt = b"".join(map(bytes_of, logprobs["tokens"][: len(prompt_ids)]))
    assert prompt == PROMPT.encode()
    for offset, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
        if not token.startswith("bytes:"):
            assert choice["text"][offset:].startswith(token)


def test_streamed_logprobs_equal_those_of_a_whole_reply(url: str, reference: Any) -> None:
    fields = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 24,
        "seed": 5,
        "temperature": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "n": 2,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    whole = post(url, "/v1/chat/completions", **fields)
    body = json.dumps({"model": "tiny", "stream": True} | fields)
    response = httpx.post(f"{url}/v1/chat/completions", content=body, timeout=60)
    streamed: dict[int, dict[str, Any]] = {i: {"text": "", "content": [], "ids": []} for i in range(2)}
    for event in events_of(response.text):
        (choice,) = event["choices"]
        mine = streamed[choice["index"]]
        mine["text"] += choice["delta"].get("content", "")
        mine["content"] += (choice["logprobs"] or {"content": []})["content"]
        mine["ids"] += choice.get("token_ids", [])
    for choice in whole["choices"]:
        mine = streamed[choice["index"]]
        assert mine["text"] == choice["message"]["content"]
        assert mine["ids"] == choice["token_ids"]
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in mine["content"]] == [one["token"] for one in content]
        scores = [one["logprob"] for one in content]
        assert np.allclose([one["logprob"] for one in mine["content"]], scores, **CLOSE)
        everything = whole["prompt_token_ids"] + choice["token_ids"]
        rows = log_softmax(reference, everything)[len(whole["prompt_token_ids"]) - 1 : -1]
        assert np.allclose(scores, rows[np.arange(24), choice["token_ids"]], **CLOSE)
        data = b"".join(bytes(one["bytes"]) for one in content)
        assert data.decode(errors="replace").replace("\ufffd", "") == choice["message"]["content"].replace("\ufffd", "")


def test_a_prompt_alone_has_the_same_logprobs_as_before_an_output(url: str) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    alone = post(url, "/v1/completions", max_tokens=0, **fields)
    (choice,) = alone["choices"]
    before = post(url, "/v1/completions", max_tokens=4, **fields)["choices"][0]["logprobs"]
    num = len(choice["logprobs"]["tokens"])
    assert (choice["text"], choice["finish_reason"], alone["usage"]["completion_tokens"]) == (PROMPT, "length", 0)
    assert choice["logprobs"]["tokens"] == before["tokens"][:num]
    assert np.allclose(choice["logprobs"]["token_logprobs"][1:], before["token_logprobs"][1:num], **CLOSE)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_model_s(url: str, reference: Any, tokenizer: Tokenizer, pooling: str) -> None:
    texts = [PROMPT, "x", "The quick brown fox " * 5]
    whole = post(url, "/v1/embeddings", input=texts, pooling=pooling)
    cut = post(url, "/v1/embeddings", input=texts, pooling=pooling, dimensions=7, encoding_format="base64")
    for i, text in enumerate(texts):
        states = hidden(reference, tokenizer.encode(text).ids)
        vector = states[-1] if pooling == "last" else states.mean(0)
        assert np.allclose(whole["data"][i]["embedding"], vector / np.linalg.norm(vector), **CLOSE)
        short = np.frombuffer(base64.b64decode(cut["data"][i]["embedding"]), "<f4")
        assert np.allclose(short, vector[:7] / np.linalg.norm(vector[:7]), **CLOSE)
    assert whole["usage"]["prompt_tokens"] == sum(len(tokenizer.encode(text).ids) for text in texts)


def test_openai_s_client_reads_embeddings(url: str) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        vectors = [one.embedding for one in client.embeddings.create(model="tiny", input=["a", "b"], dimensions=9).data]
        assert np.allclose(np.linalg.norm(vectors, axis=1), 1, **CLOSE) and len(vectors[0]) == 9
        messages: Any = [{"role": "user", "content": "Hi"}]
        fields: Any = {"model": "tiny", "logprobs": True, "top_logprobs": 2, "max_tokens": 3, "seed": 1}
        choice = client.chat.completions.create(messages=messages, **fields).choices[0]
        assert choice.logprobs is not None and choice.logprobs.content is not None
        parts = [
            part
            for chunk in client.chat.completions.create(messages=messages, stream=True, **fields)
            if chunk.choices[0].logprobs is not None
            for part in chunk.choices[0].logprobs.content or []
        ]
        assert [one.token for one in parts] == [one.token for one in choice.logprobs.content]
        assert all(len(one.top_logprobs) == 2 for one in parts)


def test_a_rendered_chat_generates_the_same_as_the_chat(url: str) -> None:
    fields = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "seed": 7, "logprobs": True}
    chat = post(url, "/v1/chat/completions", return_token_ids=True, **fields)
    rendered = post(url, "/v1/chat/completions/render", **fields)
    assert rendered["token_ids"] == chat["prompt_token_ids"]
    assert rendered["prompt"] == "user: Hi\nassistant:"
    generated = httpx.post(f"{url}/inference/v1/generate", json=rendered, timeout=60).json()
    assert generated["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    names = [one["token"] for one in generated["choices"][0]["logprobs"]["content"]]
    assert names == [f"token_id:{token_id}" for token_id in chat["choices"][0]["token_ids"]]
