"""Kills stages in the middle of swaps, as a crash would."""

import asyncio
import random
import time
from collections import Counter
from contextlib import suppress

import psutil

from tools.soak.turns.server import STAGES, Asked
from tools.soak.turns.watch import Watch

SWAP_S = 60.0
"""How long to wait for a swap."""
POLL_S = 0.01


class Killer:
    """Kills about every `every_s` seconds, when no model is awake: one falls asleep, or another one wakes."""

    def __init__(self, asked: Asked, watch: Watch, every_s: float, seed: int) -> None:
        self._asked, self._watch, self._every_s = asked, watch, every_s
        self._rng = random.Random(f"kills/{seed}")
        self.kills: Counter[str] = Counter()
        """By stage."""
        self.faults: Counter[str] = Counter()

    async def run(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < end_s:
            await asyncio.sleep(min(self._every_s * self._rng.uniform(0.5, 1.5), end_s - now_s))
            if time.monotonic() < end_s and await self._until_swap():
                await asyncio.to_thread(self._kill)

    async def _until_swap(self) -> bool:
        """Wait until no model is awake."""
        end_s = time.monotonic() + SWAP_S
        while time.monotonic() < end_s:
            with suppress(OSError):
                statuses = await asyncio.to_thread(self._asked.statuses)
                if not any(one["value"] == "loaded" for one in statuses.values()):
                    return True
            await asyncio.sleep(POLL_S)
        self.faults[f"no swap within {SWAP_S:g} s"] += 1
        return False

    def _kill(self) -> None:
        """Kill one of the stages that have a process."""
        try:
            models = list(self._asked.statuses())
        except OSError:
            return
        stages = [(stage, model) for stage in STAGES for model in models]
        self._rng.shuffle(stages)
        for stage, model in stages:
            if (process := self._asked.stage(stage, model)) is not None:
                self._watch.killed(stage, model)
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    self.kills[stage] += 1
                return
