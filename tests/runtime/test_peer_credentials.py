"""Clients say nothing to a Unix socket at which another user serves."""

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
from pipeline.runtime import peer_credentials
from pipeline.supervisor import admin_server
from pipeline.supervisor.admin_client import Admin

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
"""Takes in anybody. The kernel reports who it was when it began to listen."""

Serve = Callable[[str], Callable[[], str]]


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Serves at an address as another user. What it returns ends that, and says whether anything was heard."""
    if os.geteuid() != 0:  # nobody else can be imitated for real
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


def words(address: str) -> str:
    return rf"The server at {address} runs as user \S.* \(uid {FOREIGN_UID}\), not as you \(uid {os.geteuid()}\)"


def test_a_client_says_no_hello_to_another_users_server(foreign: Serve) -> None:
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/door"
    heard = foreign(address)
    with pytest.raises(ForeignServer, match=words(address)):
        Client(address, timeout_s=PATIENCE_S, api_key="secret")
    assert heard() == "heard nothing"


async def test_an_llm_that_attaches_says_so(foreign: Serve) -> None:
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/door"
    heard = foreign(address)
    llm = AsyncLLM.attach(address, timeout_s=PATIENCE_S)
    with pytest.raises(ServerFailed, match=words(address)):
        await llm.ready()
    await llm.close()
    assert await asyncio.to_thread(heard) == "heard nothing"


def test_a_command_asks_another_users_server_nothing(foreign: Serve) -> None:
    name = f"1-{secrets.token_hex(4)}"
    heard = foreign(admin_server.address_of(name))
    with Admin(name) as client, pytest.raises(UserError, match=words(admin_server.address_of(name))):
        client.stats()
    assert heard() == "heard nothing"


async def test_the_next_server_at_an_address_is_looked_at_too(foreign: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that a client was connected to ends before it said welcome, and another user takes its name."""
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/door"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    ours = context.socket(zmq.ROUTER)
    ours.setsockopt(zmq.LINGER, 0)
    ours.bind(address)
    if os.geteuid() != 0:
        uids = iter([os.geteuid()])
        monkeypatch.setattr(peer_credentials, "uid_of_peer", lambda fd: next(uids, FOREIGN_UID))
    connecting = asyncio.ensure_future(AsyncClient.connect(address, timeout_s=PATIENCE_S, api_key=None))
    assert await asyncio.to_thread(ours.poll, int(PATIENCE_S * 1000)), "hello comes"
    assert isinstance(msgspec.msgpack.decode(ours.recv_multipart()[1], type=p.ClientMessage), p.Hello)
    ours.close()
    context.term()
    heard = await asyncio.to_thread(foreign, address)
    with pytest.raises(ForeignServer, match=words(address)):
        await connecting
    assert await asyncio.to_thread(heard) == "heard nothing"


def test_a_server_that_starts_later_is_found(foreign: Serve) -> None:
    """And so is the problem with it: a client that waits looks at every connection."""
    address = f"ipc://@pipeline/{secrets.token_hex(8)}/door"

    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(Client, address, timeout_s=PATIENCE_S)
        heard = foreign(address)
        with pytest.raises(ForeignServer):
            connecting.result(PATIENCE_S)
    assert heard() == "heard nothing"
