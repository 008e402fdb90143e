"""GET /health: asks the supervisor for the state of all stages. Concurrent callers share one question."""

import asyncio

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.pending_replies import ONLY_PEER, PendingReplies

FINE = ("ok", "sleeping", "waking")
"""Statuses of a server that takes requests."""

GRACE_S = 1.0
"""Time for the supervisor itself, besides the time that its stages have to reply."""


class HealthBody(msgspec.Struct):
    """GET /health"""

    status: str
    """ok, starting, draining, late, recovering, waking, sleeping, dead or failed"""
    reason: str | None = None
    stages: list[dict[str, str | int | float]] = []
    running: int | None = None
    waiting: int | None = None
    swapped: int | None = None
    kv_blocks: dict[str, int] | None = None
    """free, cached and held make up the total"""
    swap_blocks: dict[str, int] | None = None
    depth: int | None = None
    """current maximum number of steps in flight"""
    counters: dict[str, int] | None = None
    """since start"""
    open_requests: int = 0
    nan_logits: dict[str, int] | None = None
    """sequences that failed because their logits were NaN, since the executor's start, and when the last one did (Unix
    time); null if there are none"""
    batch_invariant: bool | None = None
    """whether ids are the same in any batch, and so continued streams exact; null until the executor is ready"""
    backend: str | None = None
    """what computes: kernels, a digest of their code, dtypes and formats. A stream continues exactly at a server with
    the same one; null until the executor is ready"""


class HealthQuery:
    """Sends one question at a time. Callers that arrive while it is pending share its reply."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._supervisor = stage.supervisor
        self._pending: PendingReplies[m.Health] = PendingReplies(stage.settings.supervisor.health_timeout_s + GRACE_S)
        self._current: asyncio.Task[m.Health | None] | None = None

    async def fetch(self) -> m.Health | None:
        """The supervisor's reply, or None if it does not come in time."""
        if self._current is None or self._current.done():
            self._current = asyncio.create_task(self._fetch())
        return await asyncio.shield(self._current)

    async def _fetch(self) -> m.Health | None:
        nonce = self._pending.send(lambda nonce, _: self._supervisor.send(m.AskHealth(nonce)))
        if nonce is None:
            return None
        replies, _ = await self._pending.collect(nonce)
        return replies.get(ONLY_PEER)

    def handle_reply(self, health: m.Health) -> None:
        self._pending.handle(health.nonce, health)


def body_of(
    health: m.Health | None, status: str, reason: str | None, num_open: int, facts: m.ExecuteFacts | None = None
) -> HealthBody:
    """The body of /health. `status` is the gateway's own; if that is ok, the worst status of the stages is reported.
    `facts` are the executor's."""
    batch_invariant = None if facts is None else facts.is_batch_invariant
    backend = None if facts is None else str(facts.backend)
    if health is None:
        return HealthBody(status, reason, open_requests=num_open, batch_invariant=batch_invariant, backend=backend)
    body = HealthBody(
        health.status if status == "ok" else status,
        reason or health.reason or None,
        [
            {"name": stage.name, "pid": stage.pid, "state": stage.state, "answer_ms": stage.answer_ms}
            for stage in health.stages
        ],
        open_requests=num_open + health.num_open_elsewhere,
        batch_invariant=batch_invariant,
        backend=backend,
    )
    if health.num_nan:
        body.nan_logits = {"sequences": health.num_nan, "last": int(health.last_nan_s)}
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
            "blocks_offloaded": load.num_blocks_offloaded,
            "blocks_restored": load.num_blocks_restored,
            "forks": load.num_forks,
            "recomputed_prompt_tokens": load.num_recomputed_tokens,
            "steps": load.num_steps,
        }
    return body
