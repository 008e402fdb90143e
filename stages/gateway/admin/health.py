"""One question to the supervisor for however many clients ask at once."""

import asyncio

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage

GRACE_S = 1.0
"""What the supervisor has, besides the time its stages have, to answer."""


class HealthBody(msgspec.Struct):
    """GET /health"""

    status: str
    """ok, starting, draining, late, dead or failed"""
    reason: str | None = None
    stages: list[dict[str, str | int | float]] = []
    running: int | None = None
    waiting: int | None = None
    swapped: int | None = None
    kv_blocks: dict[str, int] | None = None
    """free, cached and held make up the total"""
    swap_blocks: dict[str, int] | None = None
    depth: int | None = None
    """steps in flight at most, as it is now"""
    counters: dict[str, int] | None = None
    """since start"""
    open_requests: int = 0


class HealthDesk:
    """Asks the supervisor how all stages are."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._supervisor = stage.supervisor
        self._timeout_s = stage.settings.supervisor.health_timeout_s + GRACE_S
        self._question: asyncio.Future[m.Health | None] | None = None
        self._nonce = 0

    async def ask(self) -> m.Health | None:
        """The supervisor's answer, or None where it does not come in time."""
        if self._question is None:
            self._nonce += 1
            if not self._supervisor.send(m.AskHealth(self._nonce)):
                return None
            loop = asyncio.get_running_loop()
            self._question = loop.create_future()
            loop.call_later(self._timeout_s, self._close, self._nonce, None)
        return await asyncio.shield(self._question)

    def answered(self, health: m.Health) -> None:
        self._close(health.nonce, health)

    def _close(self, nonce: int, health: m.Health | None) -> None:
        if self._question is not None and nonce == self._nonce:
            self._question.set_result(health)
            self._question = None


def body_of(health: m.Health | None, status: str, reason: str | None, num_open: int) -> HealthBody:
    """What /health says. `status` is the gateway's own; where that is ok, the worst of the stages counts."""
    if health is None:
        return HealthBody(status, reason, open_requests=num_open)
    body = HealthBody(
        health.status if status == "ok" else status,
        reason,
        [
            {"name": stage.name, "pid": stage.pid, "state": stage.state, "answer_ms": stage.answer_ms}
            for stage in health.stages
        ],
        open_requests=num_open + health.num_open_elsewhere,
    )
    if (load := health.schedule) is not None:
        body.running = load.num_running
        body.waiting = load.num_waiting
        body.swapped = load.num_swapped
        body.swap_blocks = {"free": load.num_swap_blocks_free, "total": load.num_swap_blocks_total}
        body.depth = load.depth
        body.kv_blocks = {
            "free": load.num_blocks_free,
            "cached": load.num_blocks_cached,
            "held": load.num_blocks_held,
            "total": load.num_blocks_total,
        }
        body.counters = {
            "prompt_tokens": load.num_prompt_tokens,
            "cached_tokens": load.num_cached_tokens,
            "output_tokens": load.num_output_tokens,
            "preemptions": load.num_preemptions,
            "blocks_swapped_out": load.num_blocks_swapped_out,
            "blocks_swapped_in": load.num_blocks_swapped_in,
            "forks": load.num_forks,
            "steps": load.num_steps,
        }
    return body
