"""Clients send nothing to a Unix socket on which another user serves."""

import asyncio
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import zmq

from pipeline import AsyncClient, AsyncLLM, Client, ForeignServer
from pipeline.client import protocol as p
from pipeline.errors import ServerFailed, UserError
from pipeline.runtime.security import peer_credentials
from pipeline.supervisor.admin import admin_server
from pipeline.supervisor.admin.admin_client import Admin

PATIENCE_S = 30.0
FOREIGN_UID = 65534
SERVER = """
import os, sys, zmq
if os.geteuid() == 0:
    os.setuid(int(sys.argv[2]))
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    router.setsockopt(zmq.LINGER, 0)
    router.bind(sys.argv[1])
    print("listening", flush=True)
    sys.stdin.read()
    print("heard something" if router.poll(200) else "heard nothing", flush=True)
"""
"""Accepts every client. The kernel reports the user that it had when it began to listen."""

Serve = Callable[[str], Callable[[], str]]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves at an address as another user. Calling the result stops it and returns whether it received anything."""
    if os.geteuid() != 0:  # only root can act as another user
        monkeypatch.setattr(peer_credentials, "uid_of_peer", lambda fd: FOREIGN_UID)
    running: list[subprocess.Popen[str]] = []

    def serve(address: str) -> Callable[[], str]:
        command = [sys.executable, "-c", SERVER, address, str(FOREIGN_UID)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        return lambda: process.communicate(timeout=PATIENCE_S)[0].strip()

    yield serve
    for process in running:
        process.kill()
        process.communicate()


def error_pattern(address: str) -> str:
    return rf"The server at {address} runs as user \S.* \(uid {FOREIGN_UID}\), not as you \(uid {os.geteuid()}\)"


def test_a_client_sends_no_hello_to_another_user_s_server(foreign: Serve) -> None:
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/zmq"
    stop_server = foreign(address)
    with pytest.raises(ForeignServer, match=error_pattern(address)):
        Client(address, timeout_s=PATIENCE_S, api_key="secret")
    assert stop_server() == "heard nothing"


async def test_an_llm_that_attaches_to_another_user_s_server_raises_an_error(foreign: Serve) -> None:
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/zmq"
    stop_server = foreign(address)
    llm = AsyncLLM.attach(address, timeout_s=PATIENCE_S)
    with pytest.raises(ServerFailed, match=error_pattern(address)):
        await llm.ready()
    await llm.close()
    assert await asyncio.to_thread(stop_server) == "heard nothing"


def test_a_command_sends_another_user_s_server_nothing(foreign: Serve) -> None:
    name = f"1-{secrets.token_hex(4)}"
    stop_server = foreign(admin_server.address_of(name))
    with Admin(name) as client, pytest.raises(UserError, match=error_pattern(admin_server.address_of(name))):
        client.stats()
    assert stop_server() == "heard nothing"


async def test_the_next_server_at_an_address_is_checked_too(foreign: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of a client's connection ends before its welcome, and another user takes its address."""
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/zmq"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours = context.socket(zmq.ROUTER)
    ours.setsockopt(zmq.LINGER, 0)
    ours.bind(address)
    if os.geteuid() != 0:
        uids = iter([os.geteuid()])
        monkeypatch.setattr(peer_credentials, "uid_of_peer", lambda fd: next(uids, FOREIGN_UID))
    connecting = asyncio.ensure_future(AsyncClient.connect(address, timeout_s=PATIENCE_S, api_key=None))
    assert await asyncio.to_thread(ours.poll, int(PATIENCE_S * 1000)), "hello arrives"
    assert isinstance(msgspec.msgpack.decode(ours.recv_multipart()[1], type=p.ClientMessage), p.Hello)
    ours.close()
    context.term()
    stop_server = await asyncio.to_thread(foreign, address)
    with pytest.raises(ForeignServer, match=error_pattern(address)):
        await connecting
    assert await asyncio.to_thread(stop_server) == "heard nothing"


def test_a_server_that_starts_later_is_checked(foreign: Serve) -> None:
    """A waiting client checks every connection."""
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/zmq"

    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(Client, address, timeout_s=PATIENCE_S)
        stop_server = foreign(address)
        with pytest.raises(ForeignServer):
            connecting.result(PATIENCE_S)
    assert stop_server() == "heard nothing"
