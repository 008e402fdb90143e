"""The limit of open files: each connection needs a descriptor."""

import errno
import logging
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

SPARE = 64
"""Descriptors for clients that get 503, for /health, and for connections that are closing."""
REMIND_S = 60.0
"""Interval of the lines that say that no descriptor is left."""


def num_open() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def raise_limit(max_open_sequences: int, log: logging.Logger) -> int:
    """Raise the soft limit of open files to the hard limit, and warn if it is too low for the sequences that may be
    open. Returns the limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            limit = most
        except (OSError, ValueError) as error:  # "unlimited" may be more than the kernel's fs.nr_open
            log.warning("Failed to raise the limit of open files", extra={"fields": {"limit": limit, "why": error}})
    needed = num_open() + max_open_sequences + SPARE
    if limit != resource.RLIM_INFINITY and limit < needed:
        log.warning(
            "the limit of open files is too low for gateway.max_open_sequences: clients above it will wait; raise it "
            "(ulimit -n, LimitNOFILE=) or lower gateway.max_open_sequences",
            extra={"fields": {"limit": limit, "needed": needed, "max_open_sequences": max_open_sequences}},
        )
    return limit


class DescriptorWatch:
    """Logs that no descriptor is left. The event loop then closes new connections without a word, so that it does not
    spin, and serves those that it has."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._next_s = 0.0

    def check(self) -> None:
        """Call it once per heartbeat."""
        try:
            os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and (now_s := self._clock()) >= self._next_s:
                self._next_s = now_s + REMIND_S
                self._log.error(
                    "no descriptor is left, so new connections are closed: raise the limit of open files (ulimit -n, "
                    "LimitNOFILE=) or lower gateway.max_open_sequences",
                    extra={"fields": {"limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0], "why": error.strerror}},
                )
