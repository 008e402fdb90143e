"""Named API keys at every listener of a gateway: limits, models, what they have used, and keys that change."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.client import protocol as p
from pipeline.config.settings import KeySettings
from pipeline.http_server.access.cors import EXPOSED
from pipeline.http_server.access.key_accounts import Account, RateLimited
from pipeline.http_server.apis.anthropic import AnthropicFamily
from pipeline.http_server.apis.openai import duration, error_json
from pipeline.http_server.apis.table import FAMILIES, OPENAI
from pipeline.http_server.bodies.large_body_lock import LARGE_BYTES
from pipeline.metrics.stats import KeyUsage
from pipeline.runtime import messages as m
from pipeline.runtime.security import key_usage
from pipeline.runtime.security.api_keys import ApiKey, Keys
from pipeline.runtime.security.key_book import KeyBook
from pipeline.runtime.security.key_usage import UsageMemory
from pipeline.stages.gateway.http.routes import ROUTES
from pipeline.stages.gateway.zmq import parsing
from tests.stages.gateway.gate import COMPLETION, MODEL, Gate
from tests.stages.gateway.http.access.test_guard import free_port
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import generate

ALICE, BOB = "alice-0123456789abcdef", "bob-0123456789abcdef"
ADAPTER = m.Adapter("helper", "id-1", "/adapters/helper")


def table(name: str, key: str, **more: Any) -> KeySettings:
    return KeySettings(name=name, digest=hashlib.sha256(key.encode()).hexdigest(), **more)


def keys_of(*tables: KeySettings) -> Keys:
    keys, _ = KeyBook().read("", tables)
    assert keys is not None
    return keys


class KeyedGate:
    """A gateway with named keys."""

    def __init__(self, folder: Path, keys: Keys, **gateway: Any) -> None:
        self.gate = Gate(folder, **gateway)
        self.keys = keys
        self.keys_fd, self.usage_fd = keys.share(), key_usage.create()
        self.gate.rig.launch = msgspec.structs.replace(
            self.gate.rig.launch, keys_fd=self.keys_fd, usage_fd=self.usage_fd, adapters=[ADAPTER]
        )

    def post(self, key: str, body: Any = COMPLETION, path: str = "/v1/completions", **headers: str) -> Any:
        headers |= {"Authorization": f"Bearer {key}"}
        return self.gate.do(self.gate.client.post, path, json=body, headers=headers)

    def get(self, key: str, path: str) -> Any:
        return self.gate.client.get(path, headers={"Authorization": f"Bearer {key}"})

    def serve(self, key: str, body: Any = COMPLETION, path: str = "/v1/completions") -> Any:
        """A request that gets two tokens for a prompt of three."""
        response = self.post(key, body, path)
        self.gate.serve()
        return response.result()

    def used(self, name: str) -> KeyUsage:
        slots = {one.name: one.slot for one in self.keys.all}
        (found,) = UsageMemory(self.usage_fd).usage({name: slots[name]})
        return found

    def replace(self, keys: Keys) -> None:
        """As the supervisor at `pipeline reload`."""
        keys.write(self.keys_fd)
        self.gate.rig.send(m.RereadKeys(5))
        assert self.gate.rig.receive("supervisor", m.Answer).nonce == 5


@contextmanager
def keyed(folder: Path, *tables: KeySettings, **gateway: Any) -> Iterator[KeyedGate]:
    one = KeyedGate(folder, keys_of(*tables), **gateway)
    try:
        with one.gate:
            yield one
    finally:
        os.close(one.keys_fd)
        os.close(one.usage_fd)


# ---------------------------------------------------------------------------------------------------------- accounts


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@contextmanager
def memory() -> Iterator[UsageMemory]:
    fd = key_usage.create()
    yield UsageMemory(fd, 0)
    os.close(fd)


def test_a_minute_has_rpm_requests(clock: Clock) -> None:
    with memory() as shared:
        account = Account(ApiKey("alice", 0, rpm=2), shared, clock)
        account.arrive()
        clock.now_s += 20
        account.arrive()
        for _ in range(3):  # what is refused does not count
            with pytest.raises(
                RateLimited, match=r"on requests per min \(RPM\): Limit 2, Used 2, Requested 1.*in 40s"
            ) as e:
                account.arrive()
        assert (e.value.status, e.value.code, e.value.headers) == (429, "rate_limit_exceeded", {"Retry-After": "40"})
        assert msgspec.json.decode(error_json(e.value))["error"]["type"] == "requests"
        assert OPENAI.limit_headers(account.uses()) == {
            "x-ratelimit-limit-requests": "2",
            "x-ratelimit-remaining-requests": "0",
            "x-ratelimit-reset-requests": "1m0s",
        }
        clock.now_s += 40
        account.arrive()


def test_a_minute_has_tpm_tokens(clock: Clock) -> None:
    with memory() as shared:
        account = Account(ApiKey("alice", 0, tpm=100), shared, clock)
        account.arrive()
        taken_s = account.take_tokens(60)
        with pytest.raises(RateLimited, match=r"on tokens per min \(TPM\): Limit 100, Used 60, Requested 41"):
            account.take_tokens(41)
        account.take_tokens(40)
        with pytest.raises(RateLimited, match="Limit 100, Used 100"):
            account.arrive()  # before its body is read
        with pytest.raises(RateLimited, match=r"Request too large for 'alice'.* Limit 100, Requested 101") as e:
            account.take_tokens(101)
        assert e.value.headers == {}, "no wait helps"
        clock.now_s += 2
        account.correct_tokens(taken_s, -15)  # the prompt was shorter than its estimate
        assert AnthropicFamily().limit_headers(account.uses()) | {"anthropic-ratelimit-tokens-reset": ""} == {
            "anthropic-ratelimit-tokens-limit": "100",
            "anthropic-ratelimit-tokens-remaining": "15",
            "anthropic-ratelimit-tokens-reset": "",
        }


# --------------------------------------------------------------------------------------------------------- listeners


def test_requests_above_the_limit_get_429_in_the_form_of_their_api(tmp_path: Path) -> None:
    with keyed(tmp_path, table("alice", ALICE, rpm=1, tpm=5000), table("bob", BOB)) as one:
        found = one.serve(ALICE)
        assert found.status_code == 200
        assert found.headers["x-ratelimit-limit-requests"] == "1"
        assert found.headers["x-ratelimit-remaining-requests"] == "0"
        assert found.headers["x-ratelimit-limit-tokens"] == "5000"
        refused = one.post(ALICE).result()
        error = refused.json()["error"]
        assert (refused.status_code, error["type"], error["code"]) == (429, "requests", "rate_limit_exceeded")
        assert 0 < int(refused.headers["retry-after"]) <= 60
        assert ALICE not in refused.text and "'alice'" in refused.text
        message = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        anthropic = one.post(ALICE, message, "/v1/messages").result()
        assert (anthropic.status_code, anthropic.json()["error"]["type"]) == (429, "rate_limit_error")
        assert anthropic.headers["anthropic-ratelimit-requests-remaining"] == "0"
        ollama = one.post(ALICE, {"model": MODEL, "messages": []}, "/api/chat").result()
        assert ollama.status_code == 429 and "Rate limit reached" in ollama.json()["error"]
        assert one.post(ALICE, Expect="100-continue").result().status_code == 429
        assert one.get(ALICE, "/v1/models").status_code == 200, "it opens no request"
        other = one.serve(BOB)
        assert other.status_code == 200 and "x-ratelimit-limit-requests" not in other.headers
        assert one.used("alice").num_rate_limited == 4


def test_zeromq_has_the_same_limits_and_models(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        keyed(tmp_path, table("alice", ALICE, rpm=2, models=("helper",)), zmq=address) as one,
        RawPeer(address, hello=False) as peer,
    ):
        peer.send(p.Hello(2, 2, "a test", ALICE))
        peer.receive(p.Welcome)
        peer.send(generate(1, "Hi", credits=100, model=MODEL))
        assert peer.receive(p.Failed).failure.code == "model_not_found"
        peer.send(generate(2, "Hi", credits=100, model="helper"))
        one.gate.serve()
        while not isinstance(peer.receive(), p.Finished):
            pass
        peer.send(generate(3, "Hi", credits=100, model="helper"))
        failure = peer.receive(p.Failed).failure
        assert (failure.status, failure.code) == (429, "rate_limit_exceeded") and failure.retry_after_s
        used = one.used("alice")
        assert (used.num_requests, used.num_rate_limited, used.num_invalid) == (1, 1, 1)


def test_a_large_message_of_a_key_over_its_limit_is_not_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its id and its name are read: the rest may be a million objects."""
    sizes: list[int] = []
    decode = parsing._request_of
    monkeypatch.setattr(parsing, "_request_of", lambda data, caps: sizes.append(len(data)) or decode(data, caps))
    address, text = f"tcp://127.0.0.1:{free_port()}", "a" * (LARGE_BYTES + 1)
    with (
        keyed(tmp_path, table("alice", ALICE, rpm=1), zmq=address) as one,
        RawPeer(address, hello=False) as peer,
    ):
        peer.send(p.Hello(2, 2, "a test", ALICE))
        peer.receive(p.Welcome)
        peer.generate(1, text)
        one.gate.submit()
        assert max(sizes) > LARGE_BYTES, "the first one is decoded"
        sizes.clear()
        peer.generate(2, text)
        failed = peer.receive(p.Failed)
        assert (failed.request_id, failed.failure.status) == (2, 429)
        peer.send(msgspec.msgpack.encode(["ping", 5, text]))  # other messages are handled
        assert peer.receive(p.Pong).nonce == 5
        assert sizes == []
        used = one.used("alice")
        assert (used.num_requests, used.num_rate_limited) == (1, 1)
        peer.generate(1, text)
        assert peer.receive(p.Error).failure.code == "duplicate_id", "as of a message that is decoded"


def test_what_a_key_uses_is_counted(tmp_path: Path) -> None:
    with keyed(tmp_path, table("alice", ALICE), table("bob", BOB)) as one:
        one.serve(ALICE)
        assert one.post(ALICE, COMPLETION | {"temperature": -1}).result().status_code == 400
        stream = one.post(ALICE, COMPLETION | {"stream": True})
        submit = one.gate.begin()
        one.gate.delta(submit, "Hello")
        one.gate.rig.until(lambda _: one.used("alice").num_output_tokens > 1)  # a heartbeat counts open requests
        one.gate.finish(submit, "!")
        assert stream.result().status_code == 200
        one.gate.rig.until(lambda load: load.num_open_requests == 0)
        used = one.used("alice")
        assert (used.num_requests, used.num_invalid) == (2, 1)
        assert used.num_prompt_tokens > 0 and used.num_output_tokens > 1
        assert one.used("bob") == KeyUsage("bob")


def test_the_tokens_of_running_requests_count_in_the_minute(tmp_path: Path) -> None:
    with keyed(tmp_path, table("alice", ALICE, tpm=8)) as one:
        stream = one.post(ALICE, COMPLETION | {"stream": True, "prompt": "Hi"})
        submit = one.gate.begin()
        for _ in range(9):
            one.gate.delta(submit, "Hello")
        one.gate.rig.until(lambda _: one.used("alice").num_output_tokens >= 9)
        refused = one.post(ALICE).result()
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "tokens")
        one.gate.finish(submit, "!")
        assert stream.result().status_code == 200, "what runs is not cut"


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/embeddings": {"input": "Hi"},
    "/score": {"text_1": "Hi", "text_2": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": "Hi"},
    "/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/v2/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/classify": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
    "/v2/embed": {"texts": ["Hi"]},
    "/v1/embed": {"texts": ["Hi"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/invocations": {"prompt": "Hi"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {}},
    "/v1/completions/render": {"prompt": "Hi"},
    "/v1/chat/completions/render": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"prompt": "Hi"},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {},
}


def test_every_route_refuses_models_that_the_key_may_not_use(tmp_path: Path) -> None:
    assert {route.path for route in ROUTES if route.opens_request} <= BODIES.keys(), "a new route needs a body here"
    with keyed(tmp_path, table("alice", ALICE, models=("helper", "later")), table("bob", BOB)) as one:
        for path, body in BODIES.items():
            for model in (MODEL, "unknown"):
                found = one.post(ALICE, body | {"model": model}, path).result()
                assert found.status_code == 404, f"{path}: {found.text}"
                assert "helper" not in found.text
        assert one.post(ALICE, {"prompt": "Hi"}).result().status_code == 404, "the default is the model itself"
        assert one.serve(ALICE, COMPLETION | {"model": "helper"}).status_code == 200
        ids = {key: [card["id"] for card in one.get(key, "/v1/models").json()["data"]] for key in (ALICE, BOB)}
        assert ids == {ALICE: ["helper"], BOB: [MODEL, "helper"]}
        nums = {key: len(one.get(key, "/api/tags").json()["models"]) for key in (ALICE, BOB)}
        assert nums == {ALICE: 0, BOB: 1}
        assert one.get(ALICE, f"/v1/models/{MODEL}").status_code == 404
        assert one.get(ALICE, "/v1/models/helper").status_code == 200
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "other", "lora_path": "/x"}
            assert one.post(ALICE, body, path).result().status_code == 404


def test_replaced_keys_are_used_at_once(tmp_path: Path) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with (
        keyed(tmp_path, table("alice", ALICE), table("bob", BOB, rpm=1), zmq=address) as one,
        RawPeer(address, hello=False) as peer,
    ):
        peer.send(p.Hello(2, 2, "a test", ALICE))
        peer.receive(p.Welcome)
        running = one.post(ALICE)
        submit = one.gate.begin()
        one.serve(BOB)
        assert one.post(BOB).result().status_code == 429
        one.replace(Keys(one.keys._packed.secret, one.keys._packed.digests[1:], [ApiKey("bob", 1, rpm=5)]))
        assert one.post(ALICE).result().status_code == 401
        assert peer.receive(p.Error).failure.status == 401
        assert one.serve(BOB).headers["x-ratelimit-remaining-requests"] == "3"
        one.gate.finish(submit, "Hello")
        assert running.result().status_code == 200, "what runs goes on"


def test_headers_of_limits_can_be_read_by_pages() -> None:
    with memory() as shared:
        account = Account(ApiKey("alice", 0, rpm=2, tpm=2), shared)
        for family in FAMILIES:
            assert len(family.limit_headers(account.uses())) == 6
            assert set(family.limit_headers(account.uses())) <= set(EXPOSED.split(", "))


def test_durations_are_written_as_openai_does() -> None:
    found = [duration(seconds) for seconds in (0, 0.0061, 1, 1.23, 59.9, 60, 61.5)]
    assert found == ["0ms", "7ms", "1s", "1.3s", "59.9s", "1m0s", "1m1s"]
