"""Kills stages at random moments, as a crash would, and waits until each is back."""

import asyncio
import random
import re
import signal
import time
from typing import Any

import psutil

from tools.benchmarks.served import Served

KILLED = ("ingest.0", "schedule.0", "execute.0", "detokenize.0")
"""Stages whose death no client may notice. The HTTP connections of a gateway end with it."""
BOTH = 0.2
"""How often two stages are killed at once."""
AGAIN = 0.2
"""How often a successor is killed before it is ready."""
BACK_S = 60.0
POLL_S = 0.02
LONGEST_ASK_S = 5.0
"""What takes longer is a suspension of all processes, which does not count."""
EXPECTED = re.compile(rf"(?:{'|'.join(map(re.escape, KILLED))}) died: was killed by SIGKILL")
"""What the log says about a kill."""


class Killer:
    """Kills about every `every_s` seconds. `pauses_s` has the time of each recovery, by the name of its stage."""

    def __init__(self, server: Served, every_s: float, seed: int) -> None:
        self._server = server
        self._every_s = every_s
        self._rng = random.Random(f"kills/{seed}")
        self.pauses_s: dict[str, list[float]] = {name: [] for name in KILLED}
        self.faults: list[str] = []

    async def run(self, end_s: float) -> None:
        """Kill until `end_s`, by time.monotonic()."""
        rng = self._rng
        while time.monotonic() < end_s:
            await asyncio.sleep(self._every_s * rng.uniform(0.5, 1.5))
            names = rng.sample(KILLED, 2 if rng.random() < BOTH else 1)
            begun_s = time.monotonic()
            for name in names:
                self._kill(name)
            before = dict(self._server.pids)
            if rng.random() < AGAIN:
                await self._until_seen(names[:1], before, is_ready=False)
                self._kill(names[0])
                before[names[0]] = self._server.pids[names[0]]
            await self._until_seen(names, before, is_ready=True)
            for name in names:
                self.pauses_s[name].append(time.monotonic() - begun_s)

    def _stages(self) -> dict[str, dict[str, Any]]:
        """The stages as in /health, by name; none if there is no complete answer in time, as during a suspension."""
        try:
            return {one["name"]: one for one in self._server.health()["stages"]}
        except OSError:
            return {}

    def _kill(self, name: str) -> None:
        psutil.Process(self._server.pids[name]).send_signal(signal.SIGKILL)

    async def _until_seen(self, names: list[str], before: dict[str, int], *, is_ready: bool) -> None:
        """Wait until each of these has another process than `before`, and perhaps until it is ready."""
        left_s = BACK_S
        while left_s > 0:
            asked_s = time.monotonic()
            found = await asyncio.to_thread(self._stages)
            new = [name for name in names if name in found and found[name]["pid"] != before[name]]
            self._server.pids.update({name: found[name]["pid"] for name in new})
            if len(new) == len(names) and (not is_ready or all(found[name]["state"] == "ready" for name in names)):
                return
            await asyncio.sleep(POLL_S)
            left_s -= min(time.monotonic() - asked_s, LONGEST_ASK_S)
        self.faults.append(f"{', '.join(names)} did not come back within {BACK_S:g} s")
