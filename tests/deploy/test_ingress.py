"""What the ingress takes from the settings of a server: certificates, origins and hosts."""

import ssl
from typing import Any

import pytest

from pipeline.runtime.api_keys import Keys
from tests.deploy.fake_replica import FakeReplica, deployed
from tests.deploy.test_relay import BODY, tokens_of
from tests.runtime.test_tls import CA, CERT, KEY

ORIGIN = "https://chat.example.com"
API_KEY = "sk-the-key-of-the-ingress"


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
