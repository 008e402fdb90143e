"""What the ingress takes from the settings of a server: certificates, origins and hosts."""

import asyncio
import hashlib
import json
import ssl
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import ConfigError
from pipeline.config.settings import AccessLogSettings, KeySettings
from pipeline.deploy.run import KeyReader
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.security.key_book import KeyBook
from tests.deploy.fake_replica import FakeReplica, deployed
from tests.deploy.proxy.streams import BODY, tokens_of
from tests.runtime.security.test_tls import CA, CERT, KEY

ORIGIN = "https://chat.example.com"
API_KEY = "sk-the-key-of-the-ingress"
OTHER_KEY = "sk-another-key-of-the-ingress"


async def test_it_speaks_https_and_its_own_pages_use_it():
    context = ssl.create_default_context(cafile=str(CA))
    files = {"ssl_certfile": str(CERT), "ssl_keyfile": str(KEY)}
    async with deployed(FakeReplica(), gateway=files) as (ingress, client):
        assert ingress.url.startswith("https://")
        headers = {"Origin": ingress.url}
        async with client.post("/v1/completions", json=BODY, ssl=context, headers=headers) as response:
            assert tokens_of(await response.text()) == list(range(20))


@pytest.mark.parametrize("keys", [None, Keys.of([API_KEY])], ids=["no keys", "keys"])
async def test_pages_of_allowed_origins_may_read_its_replies(keys: Keys | None):
    replica = FakeReplica()
    asked = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    async with deployed(replica, keys=keys, gateway={"allowed_origins": (ORIGIN,)}) as (_, client):
        async with client.options("/v1/completions", headers=asked) as preflight:
            assert preflight.status == 204 and preflight.headers.getall("Access-Control-Allow-Origin") == [ORIGIN]
        async with client.options("/v1/completions", headers=asked | {"Origin": "https://other.com"}) as refused:
            assert refused.status == 403
        assert not replica.seen, "preflights need no replica, nor a key"
        for body in (BODY, {"prompt": "x"}):
            headers = {"Origin": ORIGIN, "Authorization": f"Bearer {API_KEY}"}
            async with client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.headers.getall("Access-Control-Allow-Origin") == [ORIGIN]
                await response.read()


@pytest.mark.parametrize("path", ["/health", "/metrics", "/live", "/v1/models"])
async def test_a_host_name_must_be_allowed_at_every_path(path: str):
    async with deployed(FakeReplica(), gateway={"allowed_hosts": ("pipeline.svc",)}) as (_, client):
        for host, status in (("pipeline.svc", 200), ("attacker.example.com", 403)):
            async with client.get(path, headers={"Host": host}) as response:
                assert response.status == status
                if status == 403:
                    assert (await response.json())["error"]["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("/v1/completions", {"error": {"code": "shutting_down"}}),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error"}}),
        ("/api/chat", {"error": "the ingress is shutting down"}),
    ],
)
async def test_its_errors_have_the_shape_of_their_path(path: str, shape: dict[str, Any]):
    async with deployed(FakeReplica()) as (ingress, client):
        await ingress.drain()
        async with client.post(path, json=BODY, headers={"X-Request-Id": "mine"}) as response:
            assert response.status == 503 and response.headers["X-Request-Id"] == "mine"
            assert response.headers["Server"] == "pipeline" and response.headers["Retry-After"] == "1"
            body = await response.json()
            error = shape["error"]
            assert body["error"] == error if isinstance(error, str) else error.items() <= body["error"].items()


def named(*tables: KeySettings, book: KeyBook | None = None) -> Keys:
    keys, _ = (book or KeyBook()).read("", tables)
    assert keys is not None
    return keys


def table(name: str, key: str, **more: Any) -> KeySettings:
    return KeySettings(name=name, digest=hashlib.sha256(key.encode()).hexdigest(), **more)


async def test_the_requests_of_a_minute_hold_over_all_replicas():
    replicas = [FakeReplica(), FakeReplica()]
    keys = named(table("alice", API_KEY, rpm=3, tpm=5), table("bob", OTHER_KEY))
    async with deployed(*replicas, keys=keys) as (_, client):

        async def status(key: str) -> int:
            async with client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"}) as found:
                if key == API_KEY:
                    assert found.headers["x-ratelimit-limit-requests"] == "3"
                    assert "x-ratelimit-limit-tokens" not in found.headers, "that is each replica's own"
                await found.read()
                return found.status

        assert [await status(API_KEY) for _ in range(5)] == [200, 200, 200, 429, 429]
        assert sum("POST /v1/completions" in line for one in replicas for line, _, _ in one.seen) == 3
        assert await status(OTHER_KEY) == 200
        async with client.get("/v1/models", headers={"Authorization": f"Bearer {API_KEY}"}) as found:
            assert found.status != 429, "it opens no request"
        async with client.get("/metrics") as found:
            text = await found.text()
        assert 'pipeline_ingress_rate_limited_total{key="alice"} 2' in text
        assert 'pipeline_ingress_rate_limited_total{key="bob"} 0' in text


async def test_keys_are_read_again_at_a_signal():
    book = KeyBook()
    keys = named(table("alice", API_KEY), book=book)
    found: list[Any] = [
        named(table("alice", API_KEY, rpm=1), table("bob", OTHER_KEY), book=book),
        ConfigError(["keys[0].file: x can't be read"]),
        None,
    ]

    def read_again() -> Keys | None:
        one = found.pop(0)
        if isinstance(one, ConfigError):
            raise one
        return one

    async with deployed(FakeReplica(), keys=keys) as (ingress, client):
        reader = KeyReader(ingress, keys, read_again)

        async def statuses() -> list[int]:
            some = []
            for key in (API_KEY, OTHER_KEY):
                async with client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}) as response:
                    some.append(response.status)
            return some

        assert (await statuses())[1] == 401
        for num_left in (2, 1, 0):
            reader.signalled()
            while len(found) > num_left or not reader.is_done:
                await asyncio.sleep(0)
            assert 401 not in await statuses(), "what can't be read changes nothing"


async def test_its_access_log_has_the_names_of_keys(tmp_path: Path):
    path = tmp_path / "access.log"
    keys = named(table("alice", API_KEY))
    async with deployed(FakeReplica(), keys=keys, access_log=AccessLogSettings(file=str(path))) as (_, client):
        async with client.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {API_KEY}"}) as found:
            await found.read()
        async with client.get("/v1/models") as found:
            assert found.status == 401
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(one.get("key"), one["path"], one["status"]) for one in lines] == [
        ("alice", "/v1/completions", 200),
        (None, "/v1/models", 401),
    ]
