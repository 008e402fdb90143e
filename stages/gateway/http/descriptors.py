"""File descriptors: each client's connection takes one."""

import logging
import resource
from pathlib import Path

SPARE = 64
"""For clients that are told 503, that ask for /health, and that are just leaving."""


def allow_many(max_open_requests: int, log: logging.Logger) -> int:
    """Raise the limit of open files to what this process may have, and warn where that is too little for the
    sequences that may be open at once. Returns the limit."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            limit = most
        except (OSError, ValueError) as error:  # "unlimited" may be more than the kernel's fs.nr_open
            log.warning("the limit of open files can't be raised", extra={"fields": {"limit": limit, "why": error}})
    needed = len(list(Path("/proc/self/fd").iterdir())) + max_open_requests + SPARE
    if limit != resource.RLIM_INFINITY and limit < needed:
        log.warning(
            "too few open files are allowed for gateway.max_open_requests: clients beyond the limit will have to wait; "
            "raise it (ulimit -n, LimitNOFILE=) or lower gateway.max_open_requests",
            extra={"fields": {"limit": limit, "needed": needed, "max_open_requests": max_open_requests}},
        )
    return limit
