"""A replica that is planned by the real scheduler (stages/schedule), with an executor that only takes time.

The ids of prompts are made of the trace's block keys: equal keys mean equal ids, and so the same prefix keys. Sampled
ids follow the trace too, so that later turns of a conversation find the blocks of earlier answers.
"""

import msgspec
import numpy as np

from pipeline.replay.traffic import ReplicaProfile
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import MAX_TOKENS, UNLIMITED, SchedulerConfig
from tools.simulator.costs import KnownCosts
from tools.simulator.replica import NEVER, ReplicaListener
from tools.simulator.requests import SimRequest

MIN_BLOCK_TOKENS = 4
"""Ids that a block needs to hold its key."""
_WORD = 2**21 - 1
FILLER, FIRST_OWN = 1, 2**22


def ids_of(request: SimRequest, block_tokens: int) -> Ids:
    """int32, prompt and output of the first sequence. Blocks with the same key have the same ids; all others belong to
    this request alone."""
    num_ids = request.num_prompt + request.outputs[0]
    ids = np.full(num_ids, FIRST_OWN + request.index, np.int32)
    for position, key in enumerate(request.keys + request.output_keys):
        begin = position * block_tokens
        if begin + block_tokens > num_ids:
            break
        ids[begin : begin + block_tokens] = FILLER
        ids[begin : begin + 3] = key & _WORD, key >> 21 & _WORD, key >> 42
    return ids


def config_of(profile: ReplicaProfile) -> SchedulerConfig:
    """The scheduler's resources and rules."""
    return SchedulerConfig(
        num_blocks=profile.kv_tokens // profile.block_size,
        max_model_len=profile.max_model_len,
        max_num_seqs=profile.max_num_seqs,
        max_num_batched_tokens=profile.max_num_batched_tokens,
        max_num_prefill_tokens=profile.max_num_prefill_tokens,
        block_size=profile.block_size,
        max_step_s=profile.max_step_ms / 1000 or UNLIMITED,
        long_prompt_tokens=profile.long_prompt_tokens or MAX_TOKENS,
        prompt_max_slowdown=profile.prompt_max_slowdown or UNLIMITED,
        long_prompt_max_slowdown=profile.long_prompt_max_slowdown,
    )


class ScheduledReplica:
    """Simulates one replica. The driver calls `submit` for each request and `advance` at `next_s`."""

    def __init__(self, profile: ReplicaProfile, block_tokens: int, events: ReplicaListener) -> None:
        assert block_tokens >= MIN_BLOCK_TOKENS
        self.next_s = NEVER
        """When `advance` is due."""
        self.busy_s = 0.0
        self._block_tokens = block_tokens
        self._events = events
        self._costs = KnownCosts(profile)
        self._scheduler = Scheduler(config_of(profile))
        self._requests: dict[int, tuple[SimRequest, Ids]] = {}
        """By request id: the request and the ids of its first sequence."""
        self._step: m.Step | None = None
        self._step_s = 0.0
        self._started: set[int] = set()
        """Requests with a first token."""

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.lifecycle.num_preemptions

    def submit(self, request: SimRequest, now_s: float) -> None:
        """A request arrives. It must fit into the KV cache alone."""
        ids = ids_of(request, self._block_tokens)
        request_id = request.index + 1
        self._requests[request_id] = request, ids
        options = m.GenerationOptions(
            n=len(request.outputs), max_tokens=max(request.outputs), priority=request.priority
        )
        raw = msgspec.Raw(msgspec.msgpack.encode(options))
        self._scheduler.now_s = now_s
        prompt = ids[: request.num_prompt].tobytes()
        openings = self._scheduler.admit(m.Admit(request_id, 1, 0, request.arrival_s, prompt, raw))
        assert not isinstance(openings[0], m.Reject), openings[0]
        if self._step is None:
            self._plan(now_s)

    def advance(self) -> None:
        """The step in progress ends, and the next one begins."""
        now_s, scheduler = self.next_s, self._scheduler
        self.busy_s += self._step_s
        scheduler.now_s = now_s
        result, first = self._result()
        scheduler.settle(result)
        for request_id in first:
            request, _ = self._requests[request_id]
            self._events.started(request, scheduler.requests[request_id].sequences[0].num_cached)
            self._events.first_token(request, now_s)
        for request_id in dict.fromkeys(scheduler.traced_request_ids):
            if not scheduler.requests[request_id].open_sequences:
                request, _ = self._requests.pop(request_id)
                self._started.discard(request_id)
                scheduler.close(m.Closed(request_id, 1))
                self._events.ended(request, now_s)
        scheduler.output_buffer.pending()
        scheduler.output_buffer.mark_sent()
        self._plan(now_s)

    def _plan(self, now_s: float) -> None:
        self._step = self._scheduler.plan()
        if self._step is None:
            self.next_s = NEVER
            return
        starts, counts = (np.frombuffer(_inline(each), np.int32) for each in (self._step.starts, self._step.counts))
        decodes = counts == 1
        chunks, begins = counts[~decodes].astype(np.int64), starts[~decodes]
        self._step_s = self._costs.predict(
            int(decodes.sum()),
            int(starts[decodes].sum() + decodes.sum()),
            int(chunks.sum()),
            float((chunks * (begins + chunks / 2)).sum()),
        )
        self.next_s = now_s + self._step_s

    def _result(self) -> tuple[m.StepResult, list[int]]:
        """The executor's answer, and the requests whose first token it has."""
        step, rows = self._step, self._scheduler.rows
        assert step is not None
        sampled = np.frombuffer(_inline(step.rows), np.int32)[np.frombuffer(_inline(step.samples), np.uint8) > 0]
        ids = np.full(len(sampled), FILLER, np.int32)
        finishes = np.zeros(len(sampled), np.uint8)
        first: list[int] = []
        for position, (row, known) in enumerate(zip(sampled.tolist(), rows.num_tokens[sampled].tolist(), strict=True)):
            sequence = rows.sequences[row]
            assert sequence is not None
            request_id, index = sequence.request.request_id, sequence.index
            request, own = self._requests[request_id]
            if index == 0:
                ids[position] = own[known]
                if request_id not in self._started:
                    self._started.add(request_id)
                    first.append(request_id)
            if known + 1 == request.num_prompt + request.outputs[index]:
                finishes[position] = Finish.STOP
        result = m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=sampled.tobytes(),
            generations=rows.generation[sampled].tobytes(),
            ids=ids.tobytes(),
            finishes=finishes.tobytes(),
            compute_s=self._step_s,
            wait_s=0.0,
        )
        return result, first


def _inline(array: m.Array) -> bytes:
    assert isinstance(array, bytes)
    return array
