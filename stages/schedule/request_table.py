"""Requests from `Admit` to `Closed`."""

from collections import OrderedDict

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import prompt_record_bytes, record_bytes
from pipeline.runtime.messages import Finish
from pipeline.runtime.topology import shard
from pipeline.stages.schedule.arrays import Ids, Put, Take
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.manager import KVCacheManager
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.output_buffer import OutputBuffer
from pipeline.stages.schedule.policies.policy import Policy
from pipeline.stages.schedule.request import RequestState, Sequence
from pipeline.stages.schedule.scheduler_config import SchedulerConfig

MAX_TOMBSTONES = 65536
"""How many aborts that overtook their request are remembered: as many as there can be open requests."""

PROMPT_TAIL = 8
"""How many of the prompt's last ids detokenize gets: more than any character or word boundary spans."""

NO_IDS: Ids = np.zeros(0, np.int32)


class RequestStates:
    """Owns the requests, and the aborts that came before their request."""

    def __init__(
        self,
        config: SchedulerConfig,
        policy: Policy,
        lifecycle: SequenceLifecycle,
        kv_cache_manager: KVCacheManager,
        output_buffer: OutputBuffer,
        puts: list[Put],
        take: Take,
    ) -> None:
        self.by_id: dict[int, RequestState] = {}
        self._config = config
        self._policy = policy
        self._lifecycle = lifecycle
        self._kv_cache_manager = kv_cache_manager
        self._output_buffer = output_buffer
        self._puts = puts
        """By replica of detokenize."""
        self._take = take
        self._decoder = msgspec.msgpack.Decoder(m.GenerationOptions)
        self._tombstones: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._next_seq = 1

    def admit(self, message: m.Admit) -> list[m.Open | m.Refuse]:
        """Add a request. Returns the messages for detokenize: an `Open` for each sequence, or a `Refuse`."""
        prompt = self._take(message.prompt_ids, np.int32).astype(np.int32, copy=False)
        outputs = [self._take(ids, np.int32) for ids in message.outputs]
        options = self._decoder.decode(message.options)
        assert options.max_tokens is not None, "ingest sets max_tokens"
        limit = min(len(prompt) + options.max_tokens, self._config.max_model_len)
        failure = self._failure_of(message, len(prompt), limit)
        if failure is not None:
            return [m.Refuse(message.request_id, message.attempt, message.gateway, failure)]
        assert message.request_id not in self.by_id, f"request {message.request_id:x} was admitted twice"
        request = RequestState(
            message.request_id,
            message.attempt,
            message.gateway,
            message.arrival_s,
            prompt,
            options,
            message.options,
            queued_s=self._lifecycle.now_s,
            root=prefix.root(options.cache_salt) if options.cache_salt else prefix.ROOT,
            record_bytes=record_bytes(options, self._config.hidden_size),
            prompt_record_bytes=prompt_record_bytes(options),
        )
        self.by_id[request.request_id] = request
        return [
            self._open(request, index, limit, outputs[index], Finish(message.finishes[index]))
            if outputs
            else self._open(request, index, limit, NO_IDS, Finish.NONE)
            for index in range(options.n)
        ]

    def _failure_of(self, message: m.Admit, num_prompt: int, limit: int) -> m.Failure | None:
        """Why a request is refused. `limit` is the most ids that a sequence of it may have."""
        if self._tombstones.pop((message.request_id, message.attempt), self) is None:
            return m.Failure(499, "the request was aborted", code="aborted")
        num_blocks = self._kv_cache_manager.num_blocks_for(limit - 1)
        if num_blocks > self._config.num_blocks:
            return m.Failure(
                400,
                f"prompt and output need {num_blocks} KV blocks, but this server has {self._config.num_blocks}: "
                "shorten the prompt or lower max_tokens",
                param="max_tokens",
                code="context_length_exceeded",
            )
        if not 0 < num_prompt < limit:
            return m.Failure(400, f"the prompt has {num_prompt} tokens, which leaves no room for output")
        return None

    def _open(self, request: RequestState, index: int, limit: int, outputs: Ids, finish: Finish) -> m.Open:
        """Create a sequence that continues output that the client has, or finish it at once if that is complete."""
        ids = np.concatenate((request.prompt, outputs)) if len(outputs) else request.prompt
        assert len(ids) <= limit, f"request {request.request_id:x} has {len(ids)} ids, at most {limit} are allowed"
        order = (self._policy.rank(request), request.arrival_s, self._next_seq)
        sequence = Sequence(self._next_seq, request, index, ids, limit, order, num_given=len(ids))
        self._next_seq += 1
        if finish == Finish.NONE and len(ids) == limit:
            finish = Finish.LENGTH
        if finish == Finish.NONE:
            self._lifecycle.add(sequence)
        else:
            self._output_buffer.add_closing(sequence, len(ids), finish)
        return m.Open(
            sequence.seq,
            request.request_id,
            request.attempt,
            index,
            request.gateway,
            request.prompt[-PROMPT_TAIL:].tobytes(),
            request.raw_options,
            self._puts[shard(sequence.seq, len(self._puts))](outputs),
            int(finish),
            request.record_bytes,
        )

    def abort(self, message: m.Abort) -> None:
        """End a request, or one sequence of it. A request that is not known yet is refused when it comes."""
        request = self.by_id.get(message.request_id)
        if request is None or request.attempt < message.attempt:
            if message.index < 0:
                self._tombstones[message.request_id, message.attempt] = None
                if len(self._tombstones) > MAX_TOMBSTONES:
                    self._tombstones.popitem(last=False)
            return
        if request.attempt > message.attempt:
            return
        for sequence in list(request.open_sequences.values()):
            if message.index in (-1, sequence.index):
                self._lifecycle.finish(sequence, Finish(message.finish))

    def close(self, message: m.Closed) -> None:
        """Drop a request that the gateway has closed, and end its open sequences."""
        self._tombstones.pop((message.request_id, message.attempt), None)
        request = self.by_id.get(message.request_id)
        if request is not None and request.attempt <= message.attempt:
            for sequence in list(request.open_sequences.values()):
                self._lifecycle.finish(sequence, Finish.ABORT)
            del self.by_id[message.request_id]

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache. What open sequences compute from now on can be found only by parallel samples of the
        same request. Returns how many blocks the cache held."""
        for request in self.by_id.values():
            sequences = request.open_sequences.values()
            if any(sequence.row >= 0 or sequence.swapped is not None for sequence in sequences):
                request.root = prefix.unique_root(request.root, request.request_id)
                request.keys.clear()
                for sequence in sequences:
                    sequence.keys.clear()
        return self._kv_cache_manager.reset_prefix_cache()
