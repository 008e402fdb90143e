"""What the processes of this host and those of other hosts need to reach each other: keys and listening sockets."""

import socket

import msgspec

from pipeline.config.settings import Settings
from pipeline.config.values import port_range
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.topology import SCHEDULE, SUPERVISOR
from pipeline.runtime.transport import curve
from pipeline.runtime.transport.curve import ClientKeys, CurveKeys

LOCAL_RECEIVERS = (SUPERVISOR, SCHEDULE)
"""Processes of this host to which those of other hosts send."""


class TcpChannels:
    """Keys of all processes, and the listening sockets of those on this host.

    The processes of this host have one key pair, because they share its memory anyway. Each process on another host has
    its own: the port stays the same when it is replaced, and what was sent to the one before does not reach its
    successor, because libzmq encrypts it for another key.
    """

    def __init__(self, settings: Settings) -> None:
        """Raises UserError if this machine can't listen at `transport.host`."""
        self._settings = settings
        self._is_on = topology.num_hosts(settings) > 0
        self._own = curve.new_keys() if self._is_on else CurveKeys("", "")
        self._keys: dict[str, CurveKeys] = {}
        """Of the processes on other hosts."""
        self._agents: dict[str, str] = {}
        """Public keys of the agents, by name."""
        self._addresses: dict[str, str] = {}
        """Where the processes on other hosts listen."""
        self._listeners: dict[str, socket.socket] = {}
        for name in LOCAL_RECEIVERS if self._is_on else ():
            self.listen(name)

    def listen(self, name: str) -> socket.socket | None:
        """Open a listening socket for a process of this host, if others send to it. Returns the one before. Raises
        UserError."""
        if not self._is_on or name not in LOCAL_RECEIVERS:
            return None
        before = self._listeners.get(name)
        transport = self._settings.transport
        self._listeners[name] = curve.listen(transport.host, port_range.parse(transport.ports), "transport.host")
        return before

    def restore(self, name: str, listener: socket.socket | None) -> None:
        """Use this listening socket again, and close the one that `listen` opened."""
        if listener is not None:
            self._listeners[name].close()
            self._listeners[name] = listener

    def set_address(self, name: str, address: str) -> None:
        """A process on another host is going to listen there."""
        self._addresses[name] = address

    def renew(self, name: str) -> str:
        """Make keys for the next process of this name, on another host. Returns its address; empty if no host is found
        yet."""
        self._keys[name] = curve.new_keys()
        return self._addresses.get(name, "")

    def add_agent(self, name: str, public_key: str) -> ClientKeys:
        """An agent has this key. Returns the keys for sending to it."""
        self._agents[name] = public_key
        return ClientKeys(public_key, self._own)

    def keys_to(self, name: str) -> ClientKeys | None:
        """The keys with which a process of this host sends to another one; None if it is on this host too."""
        keys = self._keys.get(name)
        return None if keys is None else ClientKeys(keys.public_key, self._own)

    def reached_by(self, sender: str, peer: m.PeerInbox) -> m.PeerInbox:
        """The inbox of a peer as a process reaches it."""
        if not peer.address:
            return peer
        if peer.name in self._keys:
            return msgspec.structs.replace(peer, public_key=self._keys[peer.name].public_key)
        if topology.is_remote(self._settings, sender):
            address = curve.address_of(self._listeners[peer.name])
            return msgspec.structs.replace(peer, address=address, public_key=self._own.public_key)
        return peer

    def of_process(self, name: str) -> m.Tcp | None:
        """What a process needs to talk to those on other hosts; None if it does not."""
        if topology.is_remote(self._settings, name):
            keys = self._keys.get(name) or CurveKeys(*self._new(name))
            allowed = dict.fromkeys(LOCAL_RECEIVERS, self._own.public_key)
            return m.Tcp(keys.public_key, keys.secret_key, allowed, self._addresses.get(name, ""))
        if name not in self._listeners:
            return None
        listener = self._listeners[name]
        keys_of = {peer: keys.public_key for peer, keys in self._keys.items()} | self._agents
        if name != SUPERVISOR:
            keys_of = {peer: key for peer, key in keys_of.items() if topology.stage_of(peer) == "execute"}
        return m.Tcp(*self._own, keys_of, curve.address_of(listener), listener.fileno())

    def _new(self, name: str) -> CurveKeys:
        self._keys[name] = curve.new_keys()
        return self._keys[name]

    def close(self) -> None:
        for listener in self._listeners.values():
            listener.close()
