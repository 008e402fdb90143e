"""Two API keys of one server: no key sees another's prompts in the prefix cache or aborts another's requests."""

from typing import Any

import httpx
import pytest

from tests.e2e.server import Server

KEYS = ("sk-of-the-first-client-01", "sk-of-the-second-client-02")
MODEL = "SmolLM2-135M-Instruct"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 20


def client(server: Server, key: str) -> httpx.Client:
    return httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def num_cached(client: httpx.Client, **fields: Any) -> int:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def abort(client: httpx.Client, name: str) -> dict[str, int]:
    counts: dict[str, int] = client.post("/abort_requests", json={"request_ids": [name]}).json()
    return counts


@pytest.mark.usefixtures("smollm2_dir")
def test_a_key_neither_finds_nor_aborts_another_key_s_requests() -> None:
    with (
        Server("gateway.replicas=2", environ={"PIPELINE_API_KEYS": ",".join(KEYS)}) as server,
        client(server, KEYS[0]) as first,
        client(server, KEYS[1]) as second,
    ):
        assert [num_cached(one) for one in (first, second)] == [0, 0]
        assert min(num_cached(one) for one in (first, second)) > 100
        assert num_cached(first, cache_salt="a") == num_cached(second, cache_salt="a") == 0

        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with first.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: ")
            assert abort(second, "mine") == abort(second, "cmpl-mine") == {"num_aborted": 0, "num_unknown": 1}
            with client(server, KEYS[0]) as again:  # perhaps at the other gateway
                assert abort(again, "mine") == {"num_aborted": 1, "num_unknown": 0}
            assert any('"finish_reason":"abort"' in line for line in events)


@pytest.mark.usefixtures("smollm2_dir")
def test_keys_can_share_the_prefix_cache() -> None:
    environ = {"PIPELINE_API_KEYS": ",".join(KEYS)}
    with (
        Server("gateway.share_prefix_cache=true", environ=environ) as server,
        client(server, KEYS[0]) as first,
        client(server, KEYS[1]) as second,
    ):
        assert num_cached(first) == 0
        assert num_cached(second) > 100
