"""Memory order between processes that share memory, from plain Python.

Most structures in shared memory are published by a system call: a message on a socket, or an eventfd. The kernel takes
and releases a lock for it in both processes, which orders their accesses on every machine. A plain store that another
process polls has no such call. x86-64 keeps the order of stores, and loads before stores, by itself. ARM does not:

    structure                   first                       must come before               ordered by
    arena (arena.py)            writes of a slab            the message that names it      socket, or eventfd of a ring
                                reads of a slab             the message that releases it   likewise
    ring (ring.py)              writes of a message         the eventfd                    eventfd
                                reads of a message          the store of the position      Fence
                                the load of the position    writes of the next messages    Fence
                                writes of a quiet message   the number of messages         Fence
                                the load of this number     reads of the message           Fence
    grammar masks               writes of masks             the store of the word          Fence
    (stages/execute)            the load of the word        reads of masks                 Fence; acquire in sampler.h
                                reads of masks              the order for the next ones    socket
"""

import platform
from threading import Lock

MACHINES = ("x86_64", "aarch64")
"""Machines, as of `uname -m`, on which a `Fence` is known to order memory."""


def is_known(machine: str = "") -> bool:
    """Whether a `Fence` is known to order memory on a machine, by default this one. Where it is not, processes must not
    poll each other's memory."""
    return (machine or platform.machine()) in MACHINES


class Fence:
    """A full barrier: for other processes, all memory accesses before a call come before all accesses after it. Each
    thread has its own.

    It releases a lock and then takes it. On aarch64 those are a store-release and a load-acquire, in the C libraries
    and in CPython. That CPU keeps them in order, with everything before the one and everything after the other
    ("barrier-ordered-before", Arm Architecture Reference Manual, B2.3). On x86-64 they are locked instructions, which
    order everything.
    """

    def __init__(self) -> None:
        lock = Lock()
        lock.acquire()
        self._release, self._take = lock.release, lock.acquire

    def __call__(self) -> None:
        self._release()
        self._take()
