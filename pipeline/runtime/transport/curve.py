"""Inboxes and outboxes over tcp, for peers on other hosts. They always use CURVE, ZeroMQ's encryption: each end proves
that it has the secret of its public key, and a receiver accepts only the keys of its peers.

An inbox keeps its Unix socket for the peers on its own host, and listens at tcp besides. Its
listening socket is opened before the process starts, so the peers that start with it know the address.
"""

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import zmq
from zmq.utils import z85

from pipeline.errors import UserError
from pipeline.runtime.messages.lifecycle import Tcp

ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_VERSION = b"1.0"
DOMAIN = b"pipeline"
BACKLOG = 128
REPORT_EVERY_S = 10.0
"""From one line in the log about a refused connection to the next."""


class CurveKeys(NamedTuple):
    """A key pair in Z85, 40 characters each. It is made in memory and never stored."""

    public_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"CurveKeys({self.public_key!r})"


class ClientKeys(NamedTuple):
    """The keys of a connection: the receiver's public one, and those of the sender."""

    server_key: str
    own: CurveKeys


def new_keys() -> CurveKeys:
    public_key, secret_key = zmq.curve_keypair()
    return CurveKeys(public_key.decode(), secret_key.decode())


def listen(host: str, ports: Sequence[int], key: str) -> socket.socket:
    """A socket that listens at `host`, on the first of `ports` that is free, or on any port if there are none. Raises
    UserError that names the setting `key` if there is no such address, or no free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    problem = "no port"
    for port in ports or (0,):
        try:
            sock.bind((host, port))
            sock.listen(BACKLOG)
        except (OSError, OverflowError) as error:
            problem = str(error)
            continue
        return sock
    sock.close()
    where = f"{host}, ports {ports[0]}-{ports[-1]}" if ports else host
    raise UserError(f"{key}: can't listen at {where}: {problem}")


def address_of(sock: socket.socket) -> str:
    """The address of a listening socket, as ZeroMQ writes it."""
    host, port = sock.getsockname()[:2]
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def use_ipv6(sock: "zmq.Socket[bytes]", address: str) -> None:
    if "[" in address:
        sock.setsockopt(zmq.IPV6, 1)


def bind(sock: "zmq.Socket[bytes]", tcp: Tcp) -> None:
    """Let a socket accept connections at tcp besides, with these keys. What it was bound to before stays as it was. The
    context must have an `Allowlist`."""
    sock.curve_server = True
    sock.curve_secretkey = tcp.secret_key.encode()
    sock.zap_domain = DOMAIN
    use_ipv6(sock, tcp.address)
    sock.setsockopt(zmq.USE_FD, tcp.listen_fd)
    sock.bind(tcp.address)


def use_keys(sock: "zmq.Socket[bytes]", address: str, keys: ClientKeys) -> None:
    """Prepare a socket that is going to connect to `address`."""
    sock.curve_serverkey = keys.server_key.encode()
    sock.curve_publickey, sock.curve_secretkey = keys.own.public_key.encode(), keys.own.secret_key.encode()
    use_ipv6(sock, address)


class Allowlist:
    """Decides who may connect to the tcp sockets of a context: processes with a listed key. A thread answers libzmq's
    questions (ZAP, ZeroMQ RFC 27), until the context is terminated."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", keys: Mapping[str, str]) -> None:
        """`keys` are the public keys, by the name of the process. Make it before a socket is bound."""
        self._keys = dict(keys)
        self.num_refused = 0
        self._reported_s = -REPORT_EVERY_S
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ZAP_ADDRESS)
        threading.Thread(target=self._run, name="zap", daemon=True).start()

    def allow(self, name: str, key: str) -> None:
        """A process of this name has this key. Its predecessor's key is accepted no more."""
        self._keys[name] = key

    def _run(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.ContextTerminated:
                self._socket.close()
                return
            self._socket.send_multipart(self._answer(frames))

    def _answer(self, frames: list[bytes]) -> list[bytes]:
        version, request_id, domain, address, _, mechanism, *credentials = frames
        is_known = (
            version == ZAP_VERSION
            and domain == DOMAIN
            and mechanism == b"CURVE"
            and len(credentials) == 1
            and z85.encode(credentials[0]).decode() in self._keys.values()
        )
        if not is_known:
            self._refused(address.decode(errors="replace"))
        code, text = (b"200", b"") if is_known else (b"400", b"unknown key")
        return [ZAP_VERSION, request_id, code, text, b"", b""]

    def _refused(self, address: str) -> None:
        self.num_refused += 1
        now_s = time.monotonic()
        if now_s >= self._reported_s + REPORT_EVERY_S:
            self._reported_s = now_s
            logging.getLogger("pipeline").warning(
                "refused a connection with an unknown key", extra={"fields": {"address": address}}
            )
