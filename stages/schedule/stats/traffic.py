"""Notes when requests came, how long they were and which prefixes they shared, for `pipeline record traffic`.

Nothing of a request's text or ids leaves this process: only lengths, and hashes of blocks. A hash is keyed with the
recording's salt, which is written nowhere. So who has a trace can't try texts until one has the same hash, and two
traces can't be compared.

A request is noted when the gateway closes it, with all that the scheduler knows of it then. So there is no state for
requests that are open, and nothing to do while they are computed.
"""

import time
from collections.abc import Callable
from hashlib import blake2b

from pipeline.config.settings import GatewaySettings
from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile, TrafficRecord, TrafficReply
from pipeline.runtime import messages as m
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.request import RequestState, Sequence
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import MAX_TOKENS, UNLIMITED

MAX_KEPT = 16_384
"""Requests that wait to be taken."""
MAX_KEPT_KEYS = 1_000_000
"""Hashes of these. Beyond one of the limits, requests are lost, and counted."""
HASH_BYTES, HASH_BITS = 8, 53
"""A JSON reader with doubles reads numbers of 53 bits exactly."""
MAX_PRIORITY = 2**31
SALT_BYTES = range(16, 65)


class TrafficRecorder:
    """Off until `start`; off again if no command takes what it noted."""

    def __init__(self, scheduler: Scheduler, profile: Callable[[], ReplicaProfile]) -> None:
        self.is_on = False
        self._scheduler = scheduler
        self._profile = profile
        self._order = m.RecordTraffic(0, b"", 1, 0.0)
        self._begun_s = self._kept_s = 0.0
        self._records: list[TrafficRecord] = []
        self._num_keys = self._num_lost = 0

    def start(self, order: m.RecordTraffic) -> None:
        """Begin. Raises UserError if another recording is running, or if the order is not valid."""
        if self.is_on and time.monotonic() - self._kept_s <= self._order.lease_s:
            raise UserError("traffic is already being recorded")
        if len(order.salt) not in SALT_BYTES or order.block_tokens < 1 or order.lease_s <= 0:
            raise UserError("RecordTraffic needs a salt of 16 to 64 bytes, blocks of 1 token or more, and a lease")
        self._order, self.is_on = order, True
        self._begun_s = self._kept_s = time.monotonic()
        self._records, self._num_keys, self._num_lost = [], 0, 0

    def take(self, order: m.TakeTraffic) -> TrafficReply:
        """What was noted since the last call. Raises UserError if this recording is not running."""
        if not self.is_on or order.salt != self._order.salt:
            raise UserError("the recording of traffic has ended: schedule was restarted, or heard nothing for too long")
        self._kept_s = time.monotonic()
        if not order.goes_on:
            for request in self._scheduler.requests.values():
                self._note(request)
            self.is_on = False
        records, num_lost = self._records, self._num_lost
        self._records, self._num_keys, self._num_lost = [], 0, 0
        return TrafficReply(records, num_lost, self._profile())

    def closed(self, message: m.Closed) -> None:
        """The gateway has closed a request, which the scheduler still has."""
        if time.monotonic() - self._kept_s > self._order.lease_s:
            self.is_on = False
            self._records = []
            return
        request = self._scheduler.requests.get(message.request_id)
        if request is not None and request.attempt <= message.attempt:
            self._note(request)

    def _note(self, request: RequestState) -> None:
        """Note a request that came since the beginning."""
        if request.queued_s < self._begun_s:
            return
        if len(self._records) >= MAX_KEPT or self._num_keys >= MAX_KEPT_KEYS:
            self._num_lost += 1
            return
        record = self._record_of(request)
        self._num_keys += len(record.hash_ids) + len(record.output_hash_ids)
        self._records.append(record)

    def _record_of(self, request: RequestState) -> TrafficRecord:
        num_prompt = len(request.prompt)
        size = self._order.block_tokens
        all_ids = [self._ids_of(sequence) for sequence in request.sequences]
        lengths = [len(ids) - num_prompt for ids in all_ids]
        keys: list[int] = []
        if not request.needs_full_prefill:  # else it uses no prefix cache
            keys = self._keys(request, all_ids[0])
        return TrafficRecord(
            timestamp=round(1000 * (request.queued_s - self._begun_s), 3),
            input_length=num_prompt,
            output_length=max(lengths),
            hash_ids=keys[: num_prompt // size],
            block_size=size,
            output_hash_ids=keys[num_prompt // size :],
            output_lengths=lengths if len(lengths) > 1 else [],
            priority=max(-MAX_PRIORITY, min(request.priority, MAX_PRIORITY)),
        )

    def _ids_of(self, sequence: Sequence) -> Ids:
        return sequence.ids if sequence.row < 0 else self._scheduler.lifecycle.ids_of(sequence.row)

    def _keys(self, request: RequestState, ids: Ids) -> list[int]:
        """A hash for each whole block of these ids, chained from the root of the request's prefixes."""
        salt, width = self._order.salt, self._order.block_tokens * ids.itemsize
        data = ids.tobytes()
        digest = prefix.root(request.options.cache_salt)
        keys: list[int] = []
        for index in range(len(data) // width):
            part = data[index * width : (index + 1) * width]
            digest = blake2b(digest + part, digest_size=HASH_BYTES, key=salt).digest()
            keys.append(int.from_bytes(digest, "little") >> (8 * HASH_BYTES - HASH_BITS))
        return keys


def profile_of(scheduler: Scheduler, gateway: GatewaySettings) -> ReplicaProfile:
    """The speed and the size of this server, as far as it knows them by now."""
    config = scheduler.config
    base_s, row_s, context_s, token_s, pair_s = scheduler.cost_model.coefficients
    return ReplicaProfile(
        base_s=base_s,
        row_s=row_s,
        context_s=context_s,
        token_s=token_s,
        pair_s=pair_s,
        kv_tokens=config.num_blocks * config.block_size,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_prefill_tokens=config.max_num_prefill_tokens,
        long_prompt_tokens=0 if config.long_prompt_tokens == MAX_TOKENS else config.long_prompt_tokens,
        prompt_max_slowdown=0.0 if config.prompt_max_slowdown == UNLIMITED else config.prompt_max_slowdown,
        long_prompt_max_slowdown=config.long_prompt_max_slowdown,
        max_step_ms=0.0 if config.max_step_s == UNLIMITED else 1000 * config.max_step_s,
        max_open_sequences=gateway.max_open_sequences,
        max_open_tokens=gateway.max_open_tokens,
    )
