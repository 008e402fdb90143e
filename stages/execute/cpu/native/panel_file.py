"""Keeps a model's packed matrices in a file beside its prepared weights: later starts map them, and pack nothing.

    absent ──pack, then write in the background──► complete ──other weights, layout or orders of rows──► replaced

The file has no name (O_TMPFILE) until all of its bytes are on disk, so a process that is killed leaves nothing behind.
Servers of the same model share its pages in memory.

    panels of a matrix │ zeros up to a page │ … │ `Contents` as JSON │ its length: u64 │ MAGIC

Pieces of 4 MiB are written at once: file systems that support it (ext4 since Linux 6.16, XFS) then keep them as huge
pages, which mapping doesn't change. Where the file has small pages, reading weights would take a fifth longer: then the
file is copied into huge pages instead.
"""

import ctypes
import errno
import hashlib
import logging
import os
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.kernels.cpu import native, native_library
from pipeline.kernels.step_inputs import IntArray
from pipeline.own_files import OpenFolder
from pipeline.runtime.files.regular_files import open_regular
from pipeline.runtime.model.model_folder import PANELS
from pipeline.stages.execute.ranks.context import ALONE, RankContext
from pipeline.stages.execute.weights import TensorFile

MIN_BYTES = 64 * 1024**2
"""Smaller weights are packed in less time than a start varies by."""
PIECE_BYTES = 4 * 1024**2
PAGE = 4096
MAX_CONTENTS_BYTES = 64 * 1024**2
MAGIC = b"panels\r\n"
TAIL = struct.Struct("<Q8s")
CLOSE_S = 2.0
"""How long to wait at the end for the thread that writes."""


class Panel(msgspec.Struct, frozen=True):
    """A packed matrix in the file."""

    key: str
    offset: int
    num_bytes: int


class Contents(msgspec.Struct, frozen=True):
    """What a file holds."""

    layout: int
    """`native.PANEL_LAYOUT`"""
    weights: str
    """Fingerprints of the files that were packed, see `TensorFile.fingerprint`."""
    panels: list[Panel]


@dataclass(frozen=True, slots=True)
class PanelLocation:
    """Where the packed matrices of some weight files are kept."""

    path: Path
    weights: str

    @classmethod
    def of(cls, folder: Path, files: Sequence[TensorFile], context: RankContext = ALONE) -> "PanelLocation | None":
        """The place for the weight files of a prepared folder, of several ranks for the part of one; None if packing
        takes no time worth a file."""
        if sum(file.num_bytes for file in files) < MIN_BYTES:
            return None
        name = PANELS
        if context.num_stages > 1:
            name += f".pp{context.stage}of{context.num_stages}"
        if context.num_ranks > 1:
            name += f".{context.rank}of{context.num_ranks}"
        return cls(folder / name, "|".join(file.fingerprint() for file in files))


def key_of(packed: native.PackedMatrix, names: Sequence[str], order: IntArray) -> str | None:
    """Identifies a packed matrix: rows `order` of these tensors. None if one of them is not from a file."""
    if not all(names):
        return None
    digest = hashlib.blake2b("|".join(names).encode() + order.tobytes(), digest_size=16)
    return f"{packed.format} {packed.columns} {packed.depth} {digest.hexdigest()}"


class PanelStore:
    """The packed matrices of one model: those of the file, and new ones, for which `save` writes another file."""

    def __init__(self, library: ctypes.CDLL, thread_pool: native_library.ThreadPool, location: PanelLocation) -> None:
        self._library, self._location = library, location
        self._address, self._mapped_bytes = 0, 0
        self._copy: native.ByteArray | None = None
        self._found: dict[str, Panel] = {}
        self._used: list[tuple[str, int, int]] = []
        """Key, address and bytes of each matrix, in the order of the program."""
        self._is_new = False
        self._stopped = ctypes.c_int(0)
        self._writer: threading.Thread | None = None
        with suppress(OSError, ValueError, struct.error):  # absent, or damaged: it is written again
            self._open(thread_pool)

    def _open(self, thread_pool: native_library.ThreadPool) -> None:
        """Map the file. Raises OSError, ValueError or struct.error if it can't be used."""
        fd = open_regular(self._location.path)
        try:
            end = os.fstat(fd).st_size - TAIL.size
            if end < 0:
                raise ValueError("it is too short")
            length, magic = TAIL.unpack(os.pread(fd, TAIL.size, end))
            if magic != MAGIC or length > min(end, MAX_CONTENTS_BYTES):
                raise ValueError("it has no contents")
            begin = end - length
            contents = msgspec.json.decode(os.pread(fd, length, begin), type=Contents)
            if contents.layout != native.PANEL_LAYOUT or contents.weights != self._location.weights:
                raise ValueError("it has other weights")
            if any(p.offset < 0 or p.num_bytes < 0 or p.offset + p.num_bytes > begin for p in contents.panels):
                raise ValueError("its panels are not in it")
            self._load(thread_pool, fd, begin)
        finally:
            os.close(fd)
        self._found = {panel.key: panel for panel in contents.panels}

    def _load(self, thread_pool: native_library.ThreadPool, fd: int, num_bytes: int) -> None:
        """Map or copy the file's panels. Raises OSError."""
        address = self._library.map_file(thread_pool.handle, fd, num_bytes) if num_bytes else None
        if address is None:
            raise OSError("it can't be mapped")
        if num_bytes < native.HUGE_PAGE or not _can_be_huge() or 2 * _huge_bytes(address) > num_bytes:
            self._address, self._mapped_bytes = address, num_bytes
            return
        self._library.unmap_file(address, num_bytes)
        copy = thread_pool.allocate(num_bytes)
        if not self._library.copy_file(thread_pool.handle, fd, copy.ctypes.data, num_bytes):
            raise OSError("it can't be read")
        self._copy, self._address = copy, copy.ctypes.data

    def find(self, key: str, num_bytes: int) -> int | None:
        """The address of a matrix in the mapped file, or None."""
        panel = self._found.get(key)
        if panel is None or panel.num_bytes != num_bytes:
            return None
        address = self._address + panel.offset
        self._used.append((key, address, num_bytes))
        return address

    def add(self, key: str, address: int, num_bytes: int) -> None:
        """A matrix that was packed because the file lacks it."""
        self._used.append((key, address, num_bytes))
        self._is_new = True

    def save(self, memory: Sequence[Any]) -> None:
        """Write a file in the background unless it is there. `memory` keeps the added matrices alive."""
        if self._is_new:
            self._writer = threading.Thread(target=self._write, args=(list(memory),), name="panels", daemon=True)
            self._writer.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the file is written, or can't be. Returns False at the timeout."""
        if self._writer is not None:
            self._writer.join(timeout_s)
        return self._writer is None or not self._writer.is_alive()

    def close(self) -> None:
        """Stop writing, and unmap the file: no program may use it."""
        self._stopped.value = 1
        if self.wait(CLOSE_S) and self._mapped_bytes:
            self._library.unmap_file(self._address, self._mapped_bytes)
        self._address, self._mapped_bytes, self._copy = 0, 0, None

    def _write(self, memory: list[Any]) -> None:
        """`memory` is only kept alive."""
        log = logging.getLogger("pipeline")
        path = self._location.path
        try:
            extents, _tail = self._extents()  # `_tail` is kept alive
            total = int(extents[:, 1].sum())
            with OpenFolder(path.parent) as folder:
                self._keep_in(folder, extents, total)
            log.info("stored packed weights", extra={"fields": {"file": str(path), "mb": round(total / 1e6)}})
        except FileExistsError:
            pass  # another server of this model was faster
        except OSError as error:
            if error.errno != errno.ECANCELED:
                log.info("packed weights not kept", extra={"fields": {"file": str(path), "reason": error.strerror}})

    def _keep_in(self, folder: OpenFolder, extents: "np.ndarray[Any, np.dtype[np.uint64]]", total: int) -> None:
        """Raises OSError."""
        room = os.fstatvfs(folder.fd)
        if room.f_bavail * room.f_frsize < 2 * total:
            raise OSError(errno.ENOSPC, f"it takes {total / 1e6:.0f} MB, more than half of the disk's free space")
        fd = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o644, dir_fd=folder.fd)
        try:
            if error := _write_file(self._library, fd, extents, self._stopped):
                raise OSError(error, os.strerror(error))
            name = self._location.path.name
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder.fd)
            # With the descriptor of a folder this is linkat, which follows the link to the file.
            os.link(f"/proc/self/fd/{fd}", name, src_dir_fd=folder.fd, dst_dir_fd=folder.fd, follow_symlinks=True)
        finally:
            os.close(fd)

    def _extents(self) -> "tuple[np.ndarray[Any, np.dtype[np.uint64]], native.ByteArray]":
        """The file's bytes in order: address (0 for zeros) and bytes of each part, and the last part, which must live
        until they are written."""
        parts: list[tuple[int, int]] = []
        panels: list[Panel] = []
        end = 0
        for key, address, num_bytes in self._used:
            panels.append(Panel(key, end, num_bytes))
            padded = -(-num_bytes // PAGE) * PAGE
            parts += [(address, num_bytes), (0, padded - num_bytes)]
            end += padded
        text = msgspec.json.encode(Contents(native.PANEL_LAYOUT, self._location.weights, panels))
        tail = np.frombuffer(text + TAIL.pack(len(text), MAGIC), np.uint8)
        parts.append((tail.ctypes.data, len(tail)))
        return np.array(parts, np.uint64), tail


def _write_file(
    library: ctypes.CDLL, fd: int, extents: "np.ndarray[Any, np.dtype[np.uint64]]", stopped: ctypes.c_int
) -> int:
    """Write the parts of a file, and wait until they are on disk. Returns 0, or errno; ECANCELED if it was stopped."""
    return int(library.write_file(fd, extents.ctypes.data, len(extents), PIECE_BYTES, ctypes.byref(stopped)))


def _can_be_huge() -> bool:
    """Whether anonymous memory may have huge pages."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _huge_bytes(address: int) -> int:
    """Bytes that the file mapped at an address has in huge pages; 0 if the system doesn't tell."""
    try:
        with Path("/proc/self/smaps").open() as lines:
            for line in lines:
                if line.startswith(f"{address:x}-"):
                    break
            for line in lines:
                if line.startswith("FilePmdMapped:"):
                    return int(line.split()[1]) * 1024
                if line.startswith("VmFlags:"):
                    break
    except (OSError, ValueError):
        pass
    return 0
