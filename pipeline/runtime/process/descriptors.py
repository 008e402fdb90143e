"""The descriptors that a `Launch` names: a process inherits them by number, or gets its own numbers for them."""

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from pipeline.runtime.messages import Launch

T = TypeVar("T", bound=msgspec.Struct)

FIELDS = (
    *("death_fd", "control_fd", "listen_fd", "keys_fd", "usage_fd", "admin_fd"),
    *("ranks_fd", "stages_fd", "library_fd", "saved_kv_fd", "models_fd"),
)
"""Those that are fields of a launch itself."""
OF_A_RING = ("data_fd", "position_fd", "event_fd")
OF_A_BLACK_BOX = ("stacks_fd", "memory_fd", "recording_fd")


def descriptors_of(launch: Launch) -> list[int]:
    """The numbers of all descriptors that the process needs."""
    fds = [getattr(launch, name) for name in FIELDS]
    fds += [segment.fd for segment in launch.segments]
    fds += [getattr(ring, name) for ring in launch.rings for name in OF_A_RING]
    fds += [] if launch.tcp is None else [launch.tcp.listen_fd]
    fds += [] if launch.black_box is None else launch.black_box.fds
    return [fd for fd in fds if fd >= 0]


def renumbered(launch: Launch, own: Mapping[int, int]) -> Launch:
    """The launch with the process's own number for each descriptor. Raises KeyError if one is missing."""

    def new(struct: T, names: tuple[str, ...]) -> T:
        return replace(struct, **{name: own[fd] for name in names if (fd := getattr(struct, name)) >= 0})

    return replace(
        new(launch, FIELDS),
        segments=[new(one, ("fd",)) for one in launch.segments],
        rings=[new(one, OF_A_RING) for one in launch.rings],
        tcp=None if launch.tcp is None else new(launch.tcp, ("listen_fd",)),
        black_box=None if launch.black_box is None else new(launch.black_box, OF_A_BLACK_BOX),
    )
