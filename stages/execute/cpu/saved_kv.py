"""What an executor leaves to its successor while the server sleeps: the KV blocks, states and partial poolings that
schedule names, in memory or a file that the supervisor owns.

    8 bytes            the length of the header
    header             `SavedHeader`
    ...                up to the next page
    blocks             [num_blocks, bytes of a block]: those of `SavedHeader.blocks`, in this order
    slots              [num_slots, bytes of a slot]

The successor copies each block and slot to where it was, before it is ready. So schedule's tables stay as they are.
"""

import mmap
import os
import struct
import time

import msgspec
import numpy as np

from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime import messages as m
from pipeline.shm.available import available_bytes
from pipeline.shm.segment import NO_ROOM
from pipeline.stages.execute.cpu.program import Program
from pipeline.stages.execute.kv import SwapArray
from pipeline.stages.execute.pooling.pool import Pool
from pipeline.stages.execute.rows import Take

LENGTH = struct.Struct("<Q")


def has_saved(fd: int) -> bool:
    """Whether the executor before has saved its KV cache in this memory; not if there is none (-1)."""
    return fd >= 0 and os.fstat(fd).st_size > 0


class SavedHeader(msgspec.Struct, array_like=True, frozen=True):
    """What the memory holds."""

    blocks: bytes
    """int32: the ids of the blocks"""
    slots: bytes
    """int32: the ids of the slots"""
    block_bytes: int
    slot_bytes: int
    pooled: dict[int, tuple[list[int], bytes]]
    """As `Pool.partial`."""


class SavedKV:
    """Saves and loads the KV cache of one rank. Owned by the runner."""

    def __init__(self, fd: int, program: Program, facts: m.ExecuteFacts, pool: Pool) -> None:
        """`fd` is the memory; -1: there is none, and nothing can be saved."""
        self._fd, self._program, self._facts, self._pool = fd, program, facts, pool
        self._block_bytes, self._slot_bytes = facts.block_bytes, facts.slot_bytes

    def save(self, message: m.SaveKV, take: Take) -> m.KVSaved:
        """Write what the message names. No step may be in flight. If there is no room, the answer says so, and nothing
        has changed."""
        began_s = time.monotonic()
        blocks, slots = take(message.blocks, np.int32), take(message.slots, np.int32)
        try:
            num_bytes = self._save(blocks, slots)
        except (UserError, MemoryError, OSError) as error:
            self.clear()
            return m.KVSaved(message.number, 0, time.monotonic() - began_s, str(error))
        return m.KVSaved(message.number, num_bytes, time.monotonic() - began_s)

    def clear(self) -> None:
        """Free the memory."""
        if self._fd >= 0:
            os.ftruncate(self._fd, 0)

    def load(self) -> int:
        """Copy everything back that the executor before has saved. Returns the number of bytes; 0 if it has saved
        nothing. Raises UserError if it does not fit this executor."""
        size = 0 if self._fd < 0 else os.fstat(self._fd).st_size
        if not size:
            return 0
        with self._mapped(size) as memory:
            (length,) = LENGTH.unpack_from(memory)
            header = msgspec.msgpack.decode(memory[LENGTH.size : LENGTH.size + length], type=SavedHeader)
            sizes = header.block_bytes, header.slot_bytes
            if sizes != (self._block_bytes, self._slot_bytes):
                raise UserError(
                    f"the executor before has saved blocks and states of {sizes[0]} and {sizes[1]} bytes, those of "
                    f"this one have {self._block_bytes} and {self._slot_bytes}: start a new server"
                )
            blocks, slots = (np.frombuffer(ids, np.int32) for ids in (header.blocks, header.slots))
            self._copy(memory, self._begin(length), blocks, slots, out=False)
        self._pool.put_back(header.pooled)
        return size

    def _save(self, blocks: IntArray, slots: IntArray) -> int:
        if self._fd < 0:
            raise UserError("this executor has no memory to save its KV cache in")
        header = SavedHeader(
            blocks.tobytes(), slots.tobytes(), self._block_bytes, self._slot_bytes, self._pool.partial()
        )
        packed = msgspec.msgpack.encode(header)
        begin = self._begin(len(packed))
        size = begin + len(blocks) * self._block_bytes + len(slots) * self._slot_bytes
        self._reserve(size)
        with self._mapped(size) as memory:
            memory[: LENGTH.size + len(packed)] = LENGTH.pack(len(packed)) + packed
            self._copy(memory, begin, blocks, slots, out=True)
        return size

    def _reserve(self, size: int) -> None:
        """Make room for so many bytes. Raises UserError if there is too little."""
        status = os.fstatvfs(self._fd)
        is_memory = not status.f_blocks  # a memfd's file system has no size
        free = available_bytes() if is_memory else status.f_bavail * status.f_frsize
        where, key = (
            ("memory", "execute.swap_dir to a folder")
            if is_memory
            else ("disk", "execute.swap_dir to a folder elsewhere")
        )
        problem = UserError(
            f"the open requests' KV cache takes {size_words(size, up=True)}, but only "
            f"{size_words(free)} of {where} are free: free some, or set {key}"
        )
        if size > free:
            raise problem
        os.ftruncate(self._fd, 0)
        try:
            os.posix_fallocate(self._fd, 0, size)
        except OSError as error:
            raise (problem if error.errno in NO_ROOM else error) from error

    def _mapped(self, size: int) -> mmap.mmap:
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        return mmap.mmap(self._fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def _begin(self, header_bytes: int) -> int:
        """Where the blocks begin."""
        return -(-(LENGTH.size + header_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE

    def _copy(self, memory: mmap.mmap, begin: int, blocks: IntArray, slots: IntArray, *, out: bool) -> None:
        """Copy blocks and slots to the memory, or from there."""
        array: SwapArray = np.frombuffer(memory, np.uint8)
        end = begin + len(blocks) * self._block_bytes
        if len(blocks):
            saved = self._facts.num_blocks + np.arange(len(blocks), dtype=np.int32)
            sources, targets = (blocks, saved) if out else (saved, blocks)
            self._program.copy_blocks(sources, targets, array[begin:end].reshape(len(blocks), self._block_bytes))
        if len(slots):
            saved = self._facts.num_state_slots + np.arange(len(slots), dtype=np.int32)
            sources, targets = (slots, saved) if out else (saved, slots)
            self._program.copy_states(array[end:].reshape(len(slots), self._slot_bytes), sources, targets)
