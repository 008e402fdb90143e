"""Short time slices for the stages that pass tokens on beside an executor that computes on all cores.

From 6.12 on, Linux's scheduler (EEVDF) lets a thread ask for the length of its slices. With shorter ones than its
neighbours it gets the same share of a core, but gets it sooner when it wakes. Older kernels ignore the request.
"""

import ctypes
import os

SHORT_S = 0.0001
"""The shortest slice that the kernel grants. A token takes a stage about as long."""
SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Numbers of the system call, which the C library has no function for."""
SCHED_OTHER = 0


class SchedAttr(ctypes.Structure):
    """`struct sched_attr` of <linux/sched/types.h>, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def use_short_slices() -> None:
    """Ask for short slices for this thread and those that it starts. Does nothing where the kernel refuses, and for a
    thread that an operator has given another policy."""
    number = SCHED_SETATTR.get(os.uname().machine)
    if number is None or os.sched_getscheduler(0) != SCHED_OTHER:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = SchedAttr(ctypes.sizeof(SchedAttr), SCHED_OTHER, 0, nice, 0, round(SHORT_S * 1e9))
    ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), 0)
