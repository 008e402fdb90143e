"""All HTTP listeners of the project, each made by the code that makes it for users, with and without API keys.

Another listener must be added to `LISTENERS`. tests/http_server/test_matrix.py fails if HTTP is accepted elsewhere.
"""

import argparse
import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from pipeline.cli.commands import deploy as deploy_command
from pipeline.config.settings import GatewaySettings, Settings
from pipeline.deploy import run
from pipeline.deploy.health_checks import FixedReplicas
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.deploy.ray import replicas as ray_replicas
from pipeline.deploy.ray import serve as ray_serve
from pipeline.http_server.rules import ListenerRules
from pipeline.runtime import messages as m
from pipeline.runtime.messages.models import Models, StopProcess
from pipeline.runtime.security.api_keys import SERVER_VARIABLE, Keys
from pipeline.stages.gateway.models.stage import ModelGateways
from pipeline.supervisor.shared.shared_keys import SharedKeys
from tests.deploy.fake_replica import PATIENCE_S, FakeReplica
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.http.access.test_guard import locked

KEY = "sk-the-key-of-the-matrix"
ALLOWED_ORIGIN = "https://allowed.example.com"
GATEWAY = {"allowed_origins": (ALLOWED_ORIGIN,)}
Handle = Callable[[Any], Awaitable[web.StreamResponse]]


class Listener(msgspec.Struct, frozen=True):
    name: str
    has_keys: bool
    """Clients need one of the keys."""
    has_status: bool
    """It serves /health and so on."""
    is_admin: bool
    handle: Handle
    """What the listener calls for a request: its rules, around a handler that answers 299."""
    address: tuple[str, int]


GATEWAYS = ("gateway", "gateway with admin", "admin", "models", "models with admin", "models' admin")
LISTENERS = (*GATEWAYS, "ingress", "ingress on ray")


async def reached(_: web.BaseRequest) -> web.StreamResponse:
    """Instead of the routes."""
    return web.Response(status=299)


@asynccontextmanager
async def listener(
    name: str, folder: Path, patch: pytest.MonkeyPatch, *, keys: bool, **gateway: Any
) -> AsyncIterator[Listener]:
    """A running listener."""
    handles: list[Handle] = []
    wrap = ListenerRules.wrap

    def capture(self: ListenerRules, handle: Handle) -> Handle:
        handles.append(wrap(self, reached))
        return wrap(self, handle)

    patch.setattr(ListenerRules, "wrap", capture)
    gateway = GATEWAY | gateway
    if name in ("gateway", "gateway with admin", "admin"):
        has_admin = name != "gateway"
        with gate_of(folder, keys, has_admin, gateway) as gate:
            is_admin = name == "admin"
            port = int(gate.admin.rsplit(":")[-1]) if is_admin else gate.address[1]
            yield Listener(
                name, keys and not is_admin, is_admin or not has_admin, is_admin, handles[is_admin], ("127.0.0.1", port)
            )
        return
    if name.startswith("models"):
        has_admin, is_admin = name != "models", name == "models' admin"
        async with several(keys, has_admin, gateway) as addresses:
            while len(handles) < 1 + has_admin:
                await asyncio.sleep(0)
            yield Listener(
                name, keys and not is_admin, is_admin or not has_admin, is_admin, handles[is_admin], addresses[is_admin]
            )
        return
    replica = await FakeReplica().start()
    start = relayed_by_ray if name == "ingress on ray" else relayed
    ingress = await start(replica, patch, Keys.of([KEY]) if keys else None, gateway)
    try:
        port = int(ingress.url.rsplit(":")[-1])
        yield Listener(name, keys, True, False, handles[0], ("127.0.0.1", port))
    finally:
        await ingress.close()
        await replica.stop()


@asynccontextmanager
async def several(keys: bool, has_admin: bool, gateway: dict[str, Any]) -> AsyncIterator[list[tuple[str, int]]]:
    """The gateway of several models, of which none is loaded. Yields the addresses of its listeners."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(1 + has_admin)]
    addresses = [one.getsockname() for one in sockets]
    supervisor, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shared = SharedKeys(Keys.of([KEY]) if keys else None)
    launch = m.Launch(
        stage="gateway",
        replica=0,
        rank=0,
        incarnation=1,
        entry="",
        settings=Settings(gateway=GatewaySettings(port=0, zmq="off", **gateway)),
        model_dir="",
        address="",
        peers=[],
        segments=[],
        death_fd=-1,
        listen_fd=sockets[0].detach(),
        admin_fd=sockets[1].detach() if has_admin else -1,
        keys_fd=shared.fd,
        usage_fd=shared.usage_fd,
        models_fd=ours.detach(),
    )
    serving = asyncio.create_task(ModelGateways(launch).serve())
    supervisor.send(msgspec.msgpack.encode(Models([], is_ready=True)))
    try:
        yield addresses
    finally:
        supervisor.send(msgspec.msgpack.encode(StopProcess()))
        await asyncio.wait_for(serving, PATIENCE_S)
        supervisor.close()
        shared.close()


def gate_of(folder: Path, keys: bool, has_admin: bool, gateway: dict[str, Any]) -> Any:
    if keys or has_admin:
        return locked(folder, (KEY,) if keys else (), has_admin, **gateway)
    return Gate(folder, **gateway)


async def relayed(replica: FakeReplica, patch: pytest.MonkeyPatch, keys: Keys | None, gateway: dict[str, Any]) -> Any:
    """The ingress of `pipeline deploy --servers`, from the command's options."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as local:
        local.setattr(run, "serve", lambda *args: found.append(args) or 0)
        if keys is not None:
            local.setenv(SERVER_VARIABLE, KEY)
        parser = argparse.ArgumentParser()
        deploy_command.add(parser.add_subparsers())
        tables = [
            f"gateway.allowed_origins={ALLOWED_ORIGIN}",
            *(f"gateway.{k}={v}" for k, v in gateway.items() if v and k not in GATEWAY),
        ]
        options = [part for one in tables for part in ("--set", one)]
        args = parser.parse_args(["deploy", "--servers", f"http://{replica.name}", "--port", "0", *options])
        assert args.run(args) == 0
    addresses, settings, given, _ = found[0]
    assert (given is None) == (keys is None)
    return await _started(FixedReplicas(addresses, probe_s=0.05), settings, given)


async def _started(replicas: FixedReplicas, settings: IngressSettings, keys: Keys | None) -> Ingress:
    ingress = Ingress(replicas, settings, keys)
    await ingress.start()
    await replicas.start(PATIENCE_S)
    return ingress


async def relayed_by_ray(
    replica: FakeReplica, patch: pytest.MonkeyPatch, keys: Keys | None, gateway: dict[str, Any]
) -> Any:
    """The ingress of `pipeline deploy --replicas`, as its actor makes it."""
    patch.setattr(ray_replicas, "RayReplicas", lambda _: FixedReplicas([replica.address], probe_s=0.05))
    settings = Settings(gateway=GatewaySettings(port=0, **gateway))
    actor = object.__new__(ray_serve.IngressActor)
    given = msgspec.msgpack.encode(IngressSettings(gateway=settings.gateway, limits=settings.limits))
    await actor.__init__(None, given, PATIENCE_S, b"" if keys is None else keys.packed())  # type: ignore[misc]
    return actor._ingress
