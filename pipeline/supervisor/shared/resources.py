"""What the stages share: inbox addresses, shared-memory segments, listening sockets, and the pipe that ends them."""

import mmap
import os
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.files.private_files import nameless_file
from pipeline.runtime.model import model_folder
from pipeline.runtime.security import api_keys
from pipeline.runtime.security.key_book import KeyBook
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import address_of
from pipeline.shm import segment
from pipeline.supervisor.crashes.black_boxes import BlackBoxes
from pipeline.supervisor.crashes.crash_counts import CrashCounts
from pipeline.supervisor.shared.shared_keys import SharedKeys
from pipeline.supervisor.shared.tcp_channels import TcpChannels

INCARNATION = 1
"""Of the supervisor, and of every stage's first process."""


class Channels(msgspec.Struct, frozen=True):
    """What belongs to one process of a stage: its inbox, its arena and its rings."""

    name: str
    incarnation: int
    address: str
    segment: m.Segment | None
    listener: socket.socket | None
    """At tcp; None if no process of another host sends to it."""
    rings: dict[tuple[str, str], tuple[int, int, int]]


class SharedResources:
    """Owns what the stages share, except the listening sockets, and describes it to each of them in its `Launch`."""

    def __init__(
        self,
        settings: Settings,
        listeners: Sequence[socket.socket],
        admin_listeners: Sequence[socket.socket],
        keys: api_keys.Keys | None,
        book: KeyBook | None = None,
        shared_keys: SharedKeys | None = None,
    ) -> None:
        """`listeners` has one socket for each gateway, in order; so has `admin_listeners`, unless it is empty. Their
        owner changes them with the number of gateways. `shared_keys` are those of several models, in place of `keys`
        and `book`."""
        self.settings = settings
        """The newest ones (`pipeline reload`)."""
        self.adapters: dict[str, m.Adapter] = {}
        """LoRA adapters that clients may use, by name."""
        self.tcp = TcpChannels(settings)
        self._listeners = listeners
        self._admin_listeners = admin_listeners
        self.server = f"{os.getpid()}-{secrets.token_hex(4)}"
        """Unique name of this server; part of every address."""
        self.incarnations: dict[str, int] = {}
        """Of the stages' processes, by name."""
        self._last_incarnations: dict[str, int] = {}
        """The highest ones that were given; those of processes that were never used count too."""
        self._removed: dict[str, int] = {}
        """Processes that are gone for good: their incarnations."""
        self.addresses = {SUPERVISOR: address_of(self.server, SUPERVISOR, INCARNATION)}
        """Inboxes, by the name of the process."""
        self.segments: dict[str, m.Segment] = {}
        self._rings: dict[tuple[str, str], tuple[int, int, int]] = {}
        """By sender and receiver: the descriptors of data, position and eventfd."""
        self.reservation: segment.Reservation | None = None
        """Swap space that is being reserved."""
        self._model: BinaryIO | None = None
        """Marks the model's folder as used."""
        self.keys = shared_keys or SharedKeys(keys, book)
        """Which clients need, and what each of them has used."""
        self._has_own_keys = shared_keys is None
        self.black_boxes = BlackBoxes(settings)
        self.crash_counts = CrashCounts()
        self._settings_of: dict[tuple[str, int], Settings] = {}
        """What each process was launched with, by name and incarnation."""
        self._settings_before: dict[str, Settings] = {}
        """What the process before the newest one of a stage was launched with."""
        self._rank_fds: list[int] = []
        """Memory that ranks of the executor share, which choose its size: for each stage of the pipeline that of its
        ranks, then that of all stages."""
        self._library_fds: dict[str, int] = {}
        """Memory for the kernels' library of each executor on this host."""
        self.saved_kv_fds: dict[str, int] = {}
        """Memory or a file for the KV cache of each executor on this host while the server sleeps."""
        self.has_saved_kv = False
        """Whether the executor has saved it, and its successor is to load it."""
        self.backends: dict[str, m.Backend] = {}
        """What each executor computes with."""
        self._death_read, self._death_write = os.pipe()

    @property
    def has_keys(self) -> bool:
        return self.keys.are_needed

    def reserve_swap(self, *, with_model: bool) -> None:
        """Begin to reserve swap space, if there is any. A thread does it while the stages start. Raises MemoryError."""
        num_bytes = topology.private_segments(self.settings, "execute").get(topology.SWAP, 0)
        if num_bytes:
            kv_bytes = kv_bytes_in_ram(self.settings) * self.settings.execute.num_ranks if with_model else 0
            self.reservation = segment.Reservation(topology.SWAP, num_bytes, topology.SWAP_KEY, kv_bytes)
            self.segments[topology.SWAP] = m.Segment(topology.SWAP, self.reservation.fd, num_bytes, True)

    def create_arenas(self) -> None:
        """Name every stage's inbox, and create the arenas and schedule's indices."""
        for name, size in topology.private_segments(self.settings, "schedule").items():
            self.segments[name] = m.Segment(name, segment.create_sparse(name, size), size, True)
        if self.settings.execute.num_ranks > 1 and not topology.is_remote(self.settings, topology.EXECUTE):
            self._rank_fds = self._new_rank_fds()
        for row in topology.TOPOLOGY:
            for name in topology.replicas_of(self.settings, row.name):
                self.incarnations[name] = INCARNATION
                if topology.is_remote(self.settings, name):
                    self.addresses[name] = self.tcp.renew(name)
                    continue
                self.addresses[name] = address_of(self.server, name, INCARNATION)
                if row.has_arena:
                    self._create_arena(name)

    def _new_rank_fds(self) -> list[int]:
        num = self.settings.execute.pipeline_parallel + 1
        return [segment.create_sparse("ranks", 0) for _ in range(num)]

    def _create_arena(self, name: str) -> None:
        size = topology.arena_bytes(self.settings, name.partition(".")[0])
        self.segments[name] = m.Segment(name, segment.create(name, size), size, False, self.incarnations[name])

    def create_rings(self) -> None:
        """Create the shared-memory rings between stages."""
        for sender, receiver in topology.rings(self.settings):
            self._create_ring(sender, receiver)

    def _create_ring(self, sender: str, receiver: str) -> None:
        sizes = (("data", topology.ring_bytes(self.settings)), ("position", mmap.PAGESIZE))
        data_fd, position_fd = (segment.create(f"{sender}-{receiver}-{part}", size) for part, size in sizes)
        self._rings[sender, receiver] = data_fd, position_fd, os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def add(self, name: str) -> None:
        """Make channels for a new process. Raises MemoryError or OSError."""
        self._removed.pop(name, None)
        self.incarnations[name] = self._last_incarnations[name] = self._last_incarnations.get(name, 0) + 1
        self.addresses[name] = address_of(self.server, name, self.incarnations[name])
        try:
            if topology.row(topology.stage_of(name)).has_arena:
                self._create_arena(name)
            for edge in topology.rings_among(self.incarnations):
                if name in edge:
                    self._create_ring(*edge)
        except (MemoryError, OSError):
            self.remove(name)
            raise

    def remove(self, name: str) -> None:
        """A process is gone for good: free its channels."""
        channels = self._channels_of(name)
        self.discard(channels)
        for edge in channels.rings:
            del self._rings[edge]
        self.segments.pop(name, None)
        self._removed[name] = self.incarnations.pop(name)
        # Receivers drop what comes from the next number too (Inbox.removed).
        self._last_incarnations[name] = max(self._last_incarnations.get(name, 0), self._removed[name]) + 1
        del self.addresses[name]
        self.black_boxes.free(name)
        self._settings_before.pop(name, None)
        for key in [key for key in self._settings_of if key[0] == name]:
            del self._settings_of[key]

    def renew(self, name: str) -> None:
        """Make channels for the successor of this process. Nothing of the dead process is used again: the others may
        still read what it wrote. Raises MemoryError."""
        self.discard(self.replace(name))

    def replace(self, name: str) -> Channels:
        """Make channels for the successor of this process. Returns those until now, which the caller gives to `discard`
        or `restore`. Raises MemoryError, or UserError if no port is free."""
        before = self._channels_of(name)
        self._settings_before[name] = self._settings_of.get((name, before.incarnation), self.settings)
        if name == topology.EXECUTE and self._rank_fds:
            # The ranks are renewed together, this one last, before any of them starts.
            for fd in self._rank_fds:
                os.close(fd)
            self._rank_fds = self._new_rank_fds()
        self.incarnations[name] = self._last_incarnations.get(name, before.incarnation) + 1
        self._last_incarnations[name] = self.incarnations[name]
        if topology.is_remote(self.settings, name):
            self.addresses[name] = self.tcp.renew(name)
            return before
        self.addresses[name] = address_of(self.server, name, self.incarnations[name])
        try:
            before = msgspec.structs.replace(before, listener=self.tcp.listen(name))
            if before.segment is not None:
                self._create_arena(name)
            for edge in before.rings:
                self._create_ring(*edge)
        except (MemoryError, UserError):
            self.restore(before)
            raise
        return before

    def set_address(self, name: str, address: str) -> None:
        """A process that runs on another host is going to listen there."""
        self.tcp.set_address(name, address)
        self.addresses[name] = address

    def restore(self, channels: Channels) -> None:
        """Use these channels again, and close those of the successor."""
        name = channels.name
        unused = self._channels_of(name)
        self.incarnations[name], self.addresses[name] = channels.incarnation, channels.address
        kept = {fd for fds in channels.rings.values() for fd in fds}
        if channels.segment is not None:
            kept.add(channels.segment.fd)
            self.segments[name] = channels.segment
        self._rings.update(channels.rings)
        self.tcp.restore(name, channels.listener)
        self._close(unused, kept)

    def discard(self, channels: Channels) -> None:
        """Close channels that are not used any more."""
        if channels.listener is not None:
            channels.listener.close()
        self._close(channels, set())

    def _channels_of(self, name: str) -> Channels:
        rings = {edge: fds for edge, fds in self._rings.items() if name in edge}
        return Channels(name, self.incarnations[name], self.addresses[name], self.segments.get(name), None, rings)

    def _close(self, channels: Channels, kept: set[int]) -> None:
        fds = {fd for ring in channels.rings.values() for fd in ring}
        if channels.segment is not None:
            fds.add(channels.segment.fd)
        for fd in fds - kept:
            os.close(fd)

    def restart_of(self, name: str, receiver: str, epoch: int) -> tuple[m.PeerRestarted, list[int]] | None:
        """What another process must know of the successor of `name`, of a new process, or of one that is gone, and the
        descriptors that it gets. None if the two have no edge."""
        row = topology.row(receiver.partition(".")[0])
        stage = name.partition(".")[0]
        is_remote = topology.is_remote(self.settings, name) or topology.is_remote(self.settings, receiver)
        sends, is_reader = stage in row.sends_to, stage in row.reads and not is_remote
        receives = receiver.partition(".")[0] in topology.row(stage).sends_to
        if not (sends or receives):
            return None
        if name in self._removed:
            peer = m.PeerInbox(name, "", topology.bound_of(self.settings))
            return m.PeerRestarted(epoch, peer, self._removed[name], [], is_removed=True), []
        fds: list[int] = []
        rings = []
        for ring in self._rings_between(receiver, name):
            fds += (ring.data_fd, ring.position_fd, ring.event_fd)
            fd_indices = {"data_fd": len(fds) - 3, "position_fd": len(fds) - 2, "event_fd": len(fds) - 1}
            rings.append(msgspec.structs.replace(ring, **fd_indices))
        arena = None
        if is_reader:
            arena = msgspec.structs.replace(self.segments[name], fd=len(fds))
            fds.append(self.segments[name].fd)
        peer = m.PeerInbox(name, self.addresses[name] if sends else "", topology.bound_of(self.settings))
        peer = self.tcp.reached_by(receiver, peer)
        return m.PeerRestarted(
            epoch,
            peer,
            self.incarnations[name],
            rings,
            arena,
            has_other_settings=self._has_other_settings(name),
            crash_counts=self.crash_counts.of(topology.stage_of(receiver)) if stage == "execute" else {},
            has_saved_kv=self.has_saved_kv and stage == "execute",
        ), fds

    def _has_other_settings(self, name: str) -> bool:
        """Whether a stage's settings have changed since the process before the newest one was launched."""
        stage = name.partition(".")[0]
        before = self._settings_before.get(name, self.settings)
        return bool(getattr(before, stage) != getattr(self.settings, stage))

    def _rings_between(self, name: str, peer: str) -> list[m.Ring]:
        """The rings between two processes, as the first one uses them."""
        edges = ((name, peer), (peer, name))
        return [
            m.Ring(peer, edge[0] == name, *fds, os.fstat(fds[0]).st_size)
            for edge in edges
            if (fds := self._rings.get(edge)) is not None
        ]

    def launch(
        self, stage: str, entry: str, peers: list[m.PeerInbox], replica: int = 0, incarnation: int = 0
    ) -> m.Launch:
        """The parameters of a stage's process. The folder of the model is not known yet. A process that has no inbox
        needs an `incarnation`. Of one on another host, the agent there makes the descriptors."""
        name = f"{stage}.{replica}"
        incarnation = incarnation or self.incarnations.get(name, INCARNATION)
        is_remote = topology.is_remote(self.settings, name)
        self._settings_of[name, incarnation] = self.settings
        has_ranks = stage == "execute" and bool(self._rank_fds)
        black_box = self.black_boxes.create(name, incarnation)
        return m.Launch(
            stage=stage,
            replica=replica,
            rank=replica if stage == "execute" else 0,
            incarnation=incarnation,
            entry=entry,
            settings=msgspec.structs.replace(self.settings, keys=()),  # the gateways have them from `keys_fd`
            model_dir="",
            address=self.addresses.get(name) or address_of(self.server, name, INCARNATION),  # prepare has none
            peers=[self.tcp.reached_by(name, peer) for peer in peers],
            segments=[] if is_remote else self._segments_of(stage, name),
            death_fd=-1 if is_remote else self._death_read,
            listen_fd=self._listeners[replica].fileno() if stage == "gateway" else -1,
            keys_fd=self.keys.fd if stage == "gateway" else -1,
            admin_fd=self._admin_listeners[replica].fileno() if stage == "gateway" and self._admin_listeners else -1,
            rings=[ring for peer in self.incarnations for ring in self._rings_between(name, peer)],
            incarnations=self._incarnations_for(name),
            black_box=None if is_remote else black_box,
            adapters=list(self.adapters.values()) if stage in ("gateway", "execute") else [],
            ranks_fd=self._rank_fds[replica // self.settings.execute.tensor_parallel] if has_ranks else -1,
            stages_fd=self._rank_fds[-1] if has_ranks else -1,
            tcp=self.tcp.of_process(name),
            library_fd=self._library_fd(name) if stage == "execute" and not is_remote else -1,
            usage_fd=self.keys.usage_fd if stage == "gateway" else -1,
            crash_counts=self.crash_counts.of(stage),
            saved_kv_fd=self._saved_kv_fd(name) if stage == "execute" and not is_remote else -1,
        )

    def _library_fd(self, name: str) -> int:
        if name not in self._library_fds:
            self._library_fds[name] = segment.create_sparse(f"library-{name}", 0)
        return self._library_fds[name]

    def _saved_kv_fd(self, name: str) -> int:
        if name not in self.saved_kv_fds:
            folder, what = self.settings.execute.swap_dir, f"saved-kv-{name}"
            self.saved_kv_fds[name] = nameless_file(Path(folder)) if folder else segment.create_sparse(what, 0)
        elif not self.has_saved_kv:
            os.ftruncate(self.saved_kv_fds[name], 0)  # an executor that died while it saved has left a part
        return self.saved_kv_fds[name]

    def _incarnations_for(self, name: str) -> dict[str, int]:
        """Those of the other processes. Late messages of processes that are gone count as old (Inbox.removed)."""
        gone = {peer: number + 1 for peer, number in self._removed.items()}
        return gone | {peer: number for peer, number in self.incarnations.items() if peer != name}

    def _segments_of(self, stage: str, name: str) -> list[m.Segment]:
        """The segments that a stage writes, and those that it reads."""
        row = next((row for row in topology.TOPOLOGY if row.name == stage), None)
        if row is None:
            return []
        own = [name] if row.has_arena else []
        private = list(topology.private_segments(self.settings, stage))
        others = [owner for read in row.reads for owner in topology.among(self.incarnations, read)]
        others = [owner for owner in others if owner in self.segments]  # those of other hosts have none
        shared = []
        for owner in (*own, *private, *others):
            one = self.segments[owner]
            writable = owner == name or owner in private
            shared.append(msgspec.structs.replace(one, writable=writable))
        return shared

    def hold_model(self, model_dir: str) -> None:
        """Mark the prepared model's folder as used until `close`."""
        self._model = model_folder.hold(Path(model_dir))

    def end_reservation(self) -> None:
        if self.reservation is not None:
            self.reservation.close()
            self.reservation = None

    def close(self) -> None:
        self.end_reservation()
        for shared in self.segments.values():
            os.close(shared.fd)
        for fds in self._rings.values():
            for fd in fds:
                os.close(fd)
        for fd in (*self._rank_fds, *self._library_fds.values(), *self.saved_kv_fds.values()):
            os.close(fd)
        if self._has_own_keys:
            self.keys.close()
        if self._model is not None:
            self._model.close()
        self.black_boxes.close()
        self.tcp.close()
        os.close(self._death_read)
        os.close(self._death_write)
