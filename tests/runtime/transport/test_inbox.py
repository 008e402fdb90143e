"""Inboxes and outboxes: bounds, incarnations and foreign users."""

import os
import resource
import subprocess
import sys
import time
from typing import Any

import msgspec
import pytest
import zmq

from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import INBOX_BOUND, MessageDecoder
from tests.runtime.transport.channels import PATIENCE_S, receive, until


def test_messages_of_one_sender_arrive_in_order(channels):
    inbox = channels.inbox()
    outbox = channels.outbox()
    for nonce in range(3000):
        assert outbox.send(m.Ping(nonce))
    assert receive(inbox, 3000) == [m.Ping(nonce) for nonce in range(3000)]
    assert (outbox.num_sent, inbox.num_received, inbox.last_sender) == (3000, 3000, "peer.0")


def test_messages_that_are_sent_together_arrive_in_order_with_the_others(channels):
    inbox = channels.inbox()
    outbox = channels.outbox(bound=10)
    sent = [m.Ping(nonce) for nonce in range(100)]
    assert outbox.send(sent[0]) and outbox.send_all(sent[1:70]) and outbox.send_all([])
    assert outbox.send(sent[70]) and outbox.send_all(sent[71:]), "each is one message of the edge's bound"
    assert receive(inbox, 100) == sent
    assert (outbox.num_sent, inbox.num_received) == (100, 100)


def test_a_full_edge_refuses_all_that_is_sent_together(channels):
    outbox = channels.outbox(bound=2)
    assert outbox.send_all([m.Ping(0), m.Ping(1)]) and outbox.send(m.Ping(2))
    assert not outbox.send_all([m.Ping(3), m.Ping(4)])
    assert (outbox.num_sent, outbox.num_refused) == (3, 1)
    inbox = channels.inbox()
    assert receive(inbox, 3) == [m.Ping(0), m.Ping(1), m.Ping(2)]
    until(lambda: outbox.send_all([m.Ping(3), m.Ping(4)]))
    assert receive(inbox, 2) == [m.Ping(3), m.Ping(4)]


def test_an_outbox_can_send_before_the_peer_listens(channels):
    outbox = channels.outbox()
    assert outbox.send(m.Ping(1))
    inbox = channels.inbox()
    assert receive(inbox, 1) == [m.Ping(1)]


def test_a_full_edge_without_a_receiver_refuses_without_blocking(channels):
    outbox = channels.outbox(bound=10)
    begin = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    results = [outbox.send(m.Ping(nonce)) for nonce in range(1000)]
    num_waits = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw - begin
    assert num_waits < 100, "this thread yielded the CPU on each refusal"
    assert results == [True] * 10 + [False] * 990
    assert outbox.num_refused == 990


def test_a_receiver_that_hangs_fills_the_edge_and_no_accepted_message_is_lost(channels):
    """Its I/O thread keeps reading; without a bound on that side, it would accept messages forever."""
    inbox = channels.inbox()
    outbox = channels.outbox(bound=10)
    options = m.GenerationOptions(stop=["x" * 10_000])
    opening = m.Open(1, 2, 0, 0, 0, b"", msgspec.Raw(msgspec.msgpack.encode(options)))
    num_sent = 0
    refused_since = time.monotonic()
    while time.monotonic() - refused_since < 0.3:
        if outbox.send(opening):
            num_sent += 1
            refused_since = time.monotonic()
        else:
            time.sleep(0.001)
        assert num_sent < 10 * INBOX_BOUND, "the edge has no bound"
    assert len(receive(inbox, num_sent)) == num_sent
    assert not inbox.wait(0.1)
    until(lambda: outbox.send(opening))


def test_room_that_the_peer_has_made_is_noticed_at_once(channels, monkeypatch):
    """libzmq looks for it once in a while, and refuses messages meanwhile."""

    class LookingSeldom:
        """A socket that notices room only when it is asked for events."""

        def __init__(self, socket: Any) -> None:
            self._socket, self._has_looked = socket, False

        def get(self, option: int) -> Any:
            self._has_looked = True
            return self._socket.get(option)

        def send_multipart(self, parts: Any, flags: int) -> None:
            if not self._has_looked:
                raise zmq.Again
            self._has_looked = False
            self._socket.send_multipart(parts, flags)

        def close(self) -> None:
            self._socket.close()

    inbox, outbox = channels.inbox(), channels.outbox(bound=10)
    monkeypatch.setattr(outbox, "_socket", LookingSeldom(outbox._socket))
    assert all(outbox.send(m.Ping(nonce)) for nonce in range(5))
    assert receive(inbox, 5) == [m.Ping(nonce) for nonce in range(5)]
    assert outbox.num_refused == 0


def test_messages_of_a_successor_wait_until_its_predecessor_is_known_to_be_dead(channels):
    inbox = channels.inbox()
    old, new = channels.outbox(incarnation=1), channels.outbox(incarnation=2)
    newest = channels.outbox(incarnation=3)
    other = channels.outbox(sender="other.0", incarnation=1)
    assert old.send(m.Ping(1))
    assert receive(inbox, 1) == [m.Ping(1)]
    assert newest.send(m.Ping(30))
    assert new.send(m.Ping(20))
    assert new.send(m.Ping(21))
    assert other.send(m.Ping(9))
    assert receive(inbox, 1) == [m.Ping(9)]
    until(lambda: not inbox.wait_all(0.01) and inbox.num_early == 3)
    inbox.replaced("peer.0", 2)
    assert receive(inbox, 2) == [m.Ping(20), m.Ping(21)]
    assert old.send(m.Ping(2))
    assert new.send(m.Ping(22))
    assert receive(inbox, 1) == [m.Ping(22)]
    until(lambda: not inbox.wait_all(0.01) and inbox.num_stale == 1)
    inbox.replaced("peer.0", 3)
    assert receive(inbox, 1) == [m.Ping(30)]


def test_messages_of_a_process_that_replaces_none_yet_can_be_read_and_dropped(channels):
    inbox = channels.inbox()
    old, new = channels.outbox(incarnation=1), channels.outbox(incarnation=2)
    assert old.send(m.Ping(1)) and receive(inbox, 1) == [m.Ping(1)]
    assert new.send(m.Ping(20))
    until(lambda: not inbox.wait_all(0.01) and inbox.early_of("peer.0") == [m.Ping(20)])
    assert old.send(m.Ping(2)) and receive(inbox, 1) == [m.Ping(2)], "the process before is still heard"
    inbox.drop_early("peer.0")
    assert inbox.early_of("peer.0") == []
    inbox.replaced("peer.0", 3)
    assert not inbox.wait_all(0.01)


def test_an_outbox_that_reconnects_sends_to_the_new_address_only(channels):
    address = channels.address + "-2"
    first, second = channels.inbox(), channels.inbox(address)
    outbox = channels.outbox()
    assert outbox.send(m.Ping(1))
    assert receive(first, 1) == [m.Ping(1)]
    outbox.reconnect(address)
    for nonce in range(100):
        assert outbox.send(m.Ping(nonce))
    assert receive(second, 100) == [m.Ping(nonce) for nonce in range(100)]
    assert not first.has_message()


def test_a_message_of_another_type_is_an_error(channels):
    inbox = channels.inbox()
    channels.outbox().send(m.Drained())
    assert inbox.wait(PATIENCE_S)
    with pytest.raises(msgspec.DecodeError, match="drained"):
        inbox.receive()


CONNECT_AS_USER = """
import os, sys, zmq
from zmq.utils.monitor import recv_monitor_message
os.setuid(int(sys.argv[4]))
context = zmq.Context()
socket = context.socket(zmq.PUSH)
monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
socket.setsockopt(zmq.LINGER, 0)
socket.connect(sys.argv[1])
socket.send_multipart((bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])), zmq.NOBLOCK)
while True:
    assert monitor.poll(20000), "nothing happened"
    event = recv_monitor_message(monitor)["event"]
    if event == zmq.EVENT_DISCONNECTED:
        print("refused")
        socket.close(linger=0)
        break
    if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
        print("accepted")
        break
socket.close(linger=5000)
context.destroy(linger=5000)
"""


def connect_as(address: str, user: int) -> str:
    head = msgspec.msgpack.encode(m.Envelope("peer.0", 1)).hex()
    body = msgspec.msgpack.encode(m.Ping(666)).hex()
    # It changes its user after the imports, as another user may not be able to read this interpreter's folders.
    done = subprocess.run(
        [sys.executable, "-c", CONNECT_AS_USER, address, head, body, str(user)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_this_user_is_accepted(channels):
    inbox = channels.inbox()
    assert connect_as(channels.address, os.geteuid()) == "accepted"
    assert receive(inbox, 1) == [m.Ping(666)]


def test_other_users_are_rejected(channels, monkeypatch):
    """Without root, the roles are reversed: an inbox that expects another user rejects this one."""
    user = 65534
    if os.geteuid() != 0:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    inbox = channels.inbox()
    assert connect_as(channels.address, user) == "refused"
    assert not inbox.wait(0.1)


def test_two_inboxes_cannot_have_one_address(channels):
    channels.inbox()
    with pytest.raises(zmq.ZMQError, match="Address already in use"):
        channels.inbox()


@pytest.mark.parametrize("data", [b"", b"\xa1\xff", b"\x91" * 5000, b"\xc1", b"\x92\xa1\xff\x00"])
def test_a_decoder_raises_only_decode_errors(data):
    for what in (str, list[Any], m.DetokenizeInbox):
        if what is msgspec.Raw and data in (b"\xa1\xff", b"\x92\xa1\xff\x00"):
            assert MessageDecoder[Any](what).decode(data) == data  # undecoded, so not validated
            continue
        with pytest.raises(msgspec.DecodeError):
            MessageDecoder[Any](what).decode(data)
