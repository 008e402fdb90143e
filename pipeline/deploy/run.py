"""An ingress in front of servers that run already: `pipeline deploy --servers URL,URL`."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable

from pipeline.config.load import ConfigError
from pipeline.deploy.health_checks import FixedReplicas
from pipeline.deploy.ingress import Ingress, IngressSettings
from pipeline.runtime.queues.work_pool import WorkPool, share_interpreter
from pipeline.runtime.security.api_keys import Keys

FIRST_ANSWER_S = 5.0

log = logging.getLogger("pipeline.deploy")


def serve(
    addresses: list[tuple[str, int]],
    settings: IngressSettings,
    keys: Keys | None,
    read_again: Callable[[], Keys | None] | None = None,
) -> int:
    """Relay until SIGINT or SIGTERM, then let open responses end. A second signal ends the drain. `keys` are those that
    clients need; at SIGHUP, `read_again` reads them again, or raises ConfigError. Raises OSError if the address is not
    free, ConfigError if the certificate can't be read, UserError if the access log can't be written."""
    from uvloop import run  # behind --help

    share_interpreter()
    return run(_serve(addresses, settings, keys, read_again))


class KeyReader:
    """Reads API keys again at SIGHUP, in a thread. Keys that can't be read change nothing."""

    def __init__(self, ingress: Ingress, keys: Keys, read_again: Callable[[], Keys | None]) -> None:
        self._ingress, self._keys, self._read_again = ingress, keys, read_again
        self._work = WorkPool("reading API keys")
        self._task: asyncio.Task[None] | None = None
        self._again = False
        """Another signal came meanwhile."""

    @property
    def is_done(self) -> bool:
        """Whether nothing is being read."""
        return self._task is None or self._task.done()

    def signalled(self) -> None:
        if not self.is_done:
            self._again = True
        else:
            self._task = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        self._again = True
        while self._again:
            self._again = False
            try:
                keys = await self._work.run(self._read_again)
            except ConfigError as error:
                log.error("the API keys stay as they were", extra={"fields": {"why": str(error)}})
                continue
            if keys is None:
                why = "there are none any more; an ingress with API keys can have none only by a restart"
                log.error("the API keys stay as they were", extra={"fields": {"why": why}})
                continue
            change = self._keys.change_to(keys)
            self._ingress.use_keys(keys)
            log.info("read the API keys again", extra={"fields": {"keys": change or "no change"}})


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal: then SIGHUP says that it is gone, and ends the process."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


async def _serve(
    addresses: list[tuple[str, int]],
    settings: IngressSettings,
    keys: Keys | None,
    read_again: Callable[[], Keys | None] | None,
) -> int:
    replicas = FixedReplicas(addresses)
    ingress = Ingress(replicas, settings, keys)
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, signalled)
    if keys is not None and read_again is not None and not _has_terminal():
        loop.add_signal_handler(signal.SIGHUP, KeyReader(ingress, keys, read_again).signalled)
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
