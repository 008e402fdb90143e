"""Channels over tcp: only processes with a listed key get through, and arrays travel in the messages."""

import os
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.transport import curve
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.curve import ClientKeys, CurveKeys
from pipeline.runtime.transport.inbox import Inbox, address_of
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox
from pipeline.shm.arrays import ShmRef

ARRIVES_S = 10.0


class Receiver:
    """An inbox at tcp and at a Unix socket, which allows one key."""

    def __init__(self) -> None:
        self.keys, self.allowed = curve.new_keys(), curve.new_keys()
        self.listener = curve.listen("127.0.0.1", (), "transport.host")
        self.address = curve.address_of(self.listener)
        self.local = address_of(f"test-{os.getpid()}", "schedule.0", id(self))
        self.context: Any = zmq.Context()
        self.senders: Any = zmq.Context()
        self.inbox = self.open(self.keys)
        self.outboxes: list[Outbox[Any]] = []

    def open(self, keys: CurveKeys) -> Inbox[m.ExecuteInbox]:
        allowed = {"schedule.0": self.allowed.public_key}
        tcp = m.Tcp(*keys, allowed, self.address, os.dup(self.listener.fileno()))
        return Inbox(self.context, self.local, m.ExecuteInbox, tcp=tcp)

    def restart(self) -> CurveKeys:
        """Replace the inbox by one with other keys at the same port. Returns them."""
        self.inbox.close()
        self.context.term()
        self.context = zmq.Context()
        keys = curve.new_keys()
        self.inbox = self.open(keys)
        return keys

    def sender(self, keys: ClientKeys | None, nonce: int) -> Outbox[Any]:
        """Sends a ping, with these keys over tcp, without over the Unix socket."""
        address = self.local if keys is None else self.address
        outbox: Outbox[Any] = Outbox(self.senders, address, m.Envelope(f"schedule.{nonce}", 1), 8, keys=keys)
        self.outboxes.append(outbox)
        assert outbox.send(m.Ping(nonce))
        return outbox

    def arrived(self, num: int) -> set[int]:
        """The nonces of so many pings."""
        nonces = set()
        while len(nonces) < num:
            assert self.inbox.wait(ARRIVES_S), f"only {nonces} came"
            nonces |= {message.nonce for message in self.inbox.receive_all() if isinstance(message, m.Ping)}
        return nonces

    def close(self) -> None:
        for outbox in self.outboxes:
            outbox.close()
        self.inbox.close()
        self.listener.close()
        self.context.term()
        self.senders.term()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    one = Receiver()
    yield one
    one.close()


def test_only_a_listed_key_gets_through(receiver: Receiver) -> None:
    allowlist = receiver.inbox.allowlist
    assert allowlist is not None
    receiver.sender(ClientKeys(receiver.keys.public_key, curve.new_keys()), 1)
    while not allowlist.num_refused:
        assert not receiver.inbox.wait(0.02), "a message of an unknown key arrived"
    receiver.sender(ClientKeys(curve.new_keys().public_key, receiver.allowed), 2)  # of another receiver
    receiver.sender(None, 3)
    receiver.sender(ClientKeys(receiver.keys.public_key, receiver.allowed), 4)
    assert receiver.arrived(2) == {3, 4}
    assert not receiver.inbox.wait(0.1)


def test_a_peer_without_encryption_gets_nowhere(receiver: Receiver) -> None:
    plain = receiver.senders.socket(zmq.PUSH)
    plain.setsockopt(zmq.LINGER, 0)
    served: Any = receiver.inbox._socket
    monitor = served.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    plain.connect(receiver.address)
    plain.send_multipart((b"\x92\xaaschedule.0\x01", b"\x92\xa4ping\x05"))
    has_failed = monitor.poll(ARRIVES_S * 1000)
    served.disable_monitor()
    monitor.close()
    plain.close()
    assert has_failed, "the handshake did not fail"
    assert not receiver.inbox.wait(0.1)
    with pytest.raises(AssertionError, match="without encryption"):
        Outbox(receiver.senders, receiver.address, m.Envelope("schedule.0", 1), 8)


def test_a_key_is_listed_later_and_replaces_that_of_the_process_before(receiver: Receiver) -> None:
    allowlist = receiver.inbox.allowlist
    assert allowlist is not None
    successor = curve.new_keys()
    allowlist.allow("schedule.0", successor.public_key)
    receiver.sender(ClientKeys(receiver.keys.public_key, receiver.allowed), 1)
    while not allowlist.num_refused:
        assert not receiver.inbox.wait(0.02), "the key of the process before is accepted"
    receiver.sender(ClientKeys(receiver.keys.public_key, successor), 2)
    assert receiver.arrived(1) == {2}


def test_a_successor_at_the_same_port_gets_nothing_that_was_sent_to_the_process_before(receiver: Receiver) -> None:
    outbox = receiver.sender(ClientKeys(receiver.keys.public_key, receiver.allowed), 1)
    assert receiver.arrived(1) == {1}
    keys = receiver.restart()
    assert outbox.send(m.Ping(2))
    receiver.sender(ClientKeys(keys.public_key, receiver.allowed), 3)
    assert receiver.arrived(1) == {3} and not receiver.inbox.wait(0.1)
    outbox.reconnect(receiver.address, keys=ClientKeys(keys.public_key, receiver.allowed))
    assert outbox.send(m.Ping(4)) and receiver.arrived(1) == {4}


def test_secrets_are_not_shown() -> None:
    keys = curve.new_keys()
    tcp = m.Tcp(*keys, {}, "tcp://127.0.0.1:1")
    assert keys.secret_key not in f"{keys!r} {keys} {tcp!r} {tcp}"
    assert keys.public_key in repr(keys) and keys.public_key in repr(tcp)


def test_an_address_of_another_machine_and_ports_in_use_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"transport\.host: can't listen at 203\.0\.113\.9"):
        curve.listen("203.0.113.9", (), "transport.host")
    taken = curve.listen("127.0.0.1", (), "transport.host")
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match=f"ports {port}-{port}"):
        curve.listen("127.0.0.1", (port,), "transport.ports")
    taken.close()
    with curve.listen("127.0.0.1", (port,), "transport.ports") as again:
        assert curve.address_of(again) == f"tcp://127.0.0.1:{port}"


def test_an_ipv6_address_works() -> None:
    try:
        listener = curve.listen("::1", (), "transport.host")
    except UserError:
        assert not socket.has_ipv6 or not _has_ipv6_loopback()
        return
    with listener:
        assert curve.address_of(listener).startswith("tcp://[::1]:") and curve.is_loopback("::1")


def _has_ipv6_loopback() -> bool:
    with socket.socket(socket.AF_INET6) as sock:
        return sock.connect_ex(("::1", 9)) not in (97, 99)


def test_arrays_for_a_process_on_another_host_travel_in_the_message() -> None:
    memories = Memories()
    memories.add("schedule.0", memoryview(bytearray(1 << 20)))
    arrays = Arrays(memories, "schedule.0")
    large = np.arange(5000, dtype=np.int32)
    assert isinstance(arrays.put(large, readers=("execute.0",)), ShmRef)
    arrays.remote = frozenset({"execute.0"})
    assert arrays.put(large, readers=("execute.0",)) == large.tobytes()
    assert isinstance(arrays.put(large, readers=("detokenize.0",)), ShmRef)
    assert arrays.arena is not None and arrays.arena.num_live == 2
