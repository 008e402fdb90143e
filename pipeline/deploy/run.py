"""An ingress in front of servers that run already: `pipeline deploy --servers URL,URL`."""

import asyncio
import contextlib
import logging
import signal
import sys

from pipeline.deploy.health_checks import FixedReplicas
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.runtime.api_keys import Keys

FIRST_ANSWER_S = 5.0

log = logging.getLogger("pipeline.deploy")


def serve(addresses: list[tuple[str, int]], settings: IngressSettings, keys: Keys | None) -> int:
    """Relay until SIGINT or SIGTERM, then let open responses end. A second signal ends the drain. `keys` are those that
    clients need. Raises OSError if the address is not free, ConfigError if the certificate can't be read."""
    from uvloop import run  # behind --help

    return run(_serve(addresses, settings, keys))


async def _serve(addresses: list[tuple[str, int]], settings: IngressSettings, keys: Keys | None) -> int:
    replicas = FixedReplicas(addresses)
    ingress = Ingress(replicas, settings, keys)
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    try:
        await ingress.start()
        await replicas.start(FIRST_ANSWER_S)
        num_ok = len(replicas.upstreams())
        print(f"relaying on {ingress.url} to {num_ok} of {len(addresses)} servers", file=sys.stderr, flush=True)
        await stop.wait()
        drain = asyncio.create_task(ingress.drain())
        now = asyncio.create_task(stop_now.wait())
        await asyncio.wait([drain, now], return_when=asyncio.FIRST_COMPLETED)
        for task in (drain, now):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
    finally:
        await ingress.close()
    return 0
