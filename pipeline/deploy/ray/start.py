"""Waits until a Ray Serve application runs, and says how far it is."""

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from pipeline.errors import UserError

LOOK_S = 0.25
SAY_S = 10.0
"""The longest time without a line while replicas start."""
MAX_REASON = 600
"""Characters of a replica's error that are shown."""

Look = Callable[[], Any]
"""The application's status, a `ray.serve.schema.ApplicationStatusOverview`, or None."""


def until_running(look: Look, servers: str, num: int, timeout_s: float, stop: threading.Event) -> bool:
    """Wait until the application runs, with `num` replicas of the deployment `servers`. Prints progress to stderr.

    Returns False if `stop` is set first. Raises UserError if it can't start, or not in `timeout_s`.
    """
    began_s = said_s = time.monotonic()
    shown = ""
    print(f"starting {num} {'replica' if num == 1 else 'replicas'} …", file=sys.stderr, flush=True)
    while not stop.is_set():
        now_s = time.monotonic()
        overview = look()
        deployment = None if overview is None else overview.deployments.get(servers)
        num_ready = 0 if deployment is None else deployment.replica_states.get("RUNNING", 0)
        problem = "" if deployment is None else reason(deployment.message)
        status = "" if overview is None else str(getattr(overview.status, "value", overview.status))
        if status == "RUNNING":
            return True
        if status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise UserError(f"replicas could not start: {problem or reason(overview.message) or status}")
        if now_s - began_s > timeout_s:
            why = f": {problem}" if problem else "; `ray status` says whether the cluster has enough CPUs and GPUs"
            raise UserError(f"{num_ready} of {num} replicas were ready after {timeout_s:g} s{why}")
        line = f"{num_ready} of {num} replicas ready{f'; {problem}' if problem else ''}"
        if (line != shown and (num_ready or problem)) or now_s - said_s > SAY_S:
            print(f"{line} ({now_s - began_s:.0f} s)", file=sys.stderr, flush=True)
            shown, said_s = line, now_s
        stop.wait(LOOK_S)
    return False


def reason(message: str) -> str:
    """The error in Serve's message about a deployment, without the traceback; empty if there is none."""
    errors = [line.strip() for line in message.splitlines() if "Error: " in line]
    if not errors:
        return ""
    return errors[-1].partition("Error: ")[2].strip()[:MAX_REASON]
