"""Requests from `Admit` to `Closed`."""

from collections import OrderedDict

import msgspec
import numpy as np
from msgspec import Raw

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.runtime.topology import shard
from pipeline.stages.schedule.arrays import Ids
from pipeline.stages.schedule.kv_cache import prefix
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.lifecycle import SequenceLifecycle
from pipeline.stages.schedule.media.request_media import RequestMedia
from pipeline.stages.schedule.policies.fair_shares import FairShares
from pipeline.stages.schedule.request import NO_REPLICA, RequestState, Sequence
from pipeline.stages.schedule.samples.beam_search import BeamSearch, row_options
from pipeline.stages.schedule.state import SchedulerState

MAX_TOMBSTONES = 65536
"""How many aborts that overtook their request are remembered: as many as there can be open requests."""

PROMPT_TAIL = 8
"""How many of the prompt's last ids detokenize gets: more than any character or word boundary spans."""

NO_IDS: Ids = np.zeros(0, np.int32)

Opening = tuple[int, m.Open | m.Reject]
"""A replica of detokenize, and a message with which it begins."""


class RequestStates:
    """Owns the requests, and the aborts that came before their request."""

    def __init__(self, state: SchedulerState, lifecycle: SequenceLifecycle) -> None:
        self.by_id: dict[int, RequestState] = {}
        self._state = state
        self._config = state.config
        self._policy = state.policy
        self._lifecycle = lifecycle
        self._kv_cache_manager = state.kv_cache_manager
        self._output_buffer = state.output_buffer
        self._puts = state.output_puts
        """By replica of detokenize. The list grows."""
        self.num_detokenize = state.context.num_detokenize
        """Replicas that get new sequences."""
        self._take = state.context.take
        self._decoder = msgspec.msgpack.Decoder(m.GenerationOptions)
        self._encoder = msgspec.msgpack.Encoder()
        self._tombstones: OrderedDict[int, int] = OrderedDict()
        """The last attempt that was aborted before it came, by request id."""
        self._next_seq = 1
        self._shares = FairShares() if state.config.is_encoder else None
        self._rejections: dict[int, tuple[int, m.Reject]] = {}
        """By request id, until the request is closed: the replica of detokenize that got the refusal, or whose
        successor receives it again."""

    def admit(self, message: m.Admit) -> list[m.Open | m.Reject]:
        """Add a request. Returns the messages for detokenize: an `Open` for each sequence, or a `Reject`. There are
        none for a pooled prompt, and if the request is here already.

        After a restart of a stage, a request may come again: one that is here already is ignored, and one with a higher
        attempt takes its place."""
        known = self._attempt_of(message.request_id)
        prompt = self._take(message.prompt_ids, np.int32).astype(np.int32, copy=False)
        outputs = [self._take(ids, np.int32) for ids in message.outputs]
        if known >= message.attempt:
            self._done(message.media)
            return []
        if known:
            self._drop(message.request_id)
        options = self._decoder.decode(message.options)
        assert options.max_tokens is not None, "ingest sets max_tokens"
        limit = min(len(prompt) + options.max_tokens, self._config.max_model_len)
        if not self._config.generates:
            limit = min(len(prompt), self._config.max_model_len) + 1
        failure = self._failure_of(message, options, len(prompt), limit)
        if failure is not None:
            self._done(message.media)
            rejection = m.Reject(message.request_id, message.attempt, message.gateway, failure)
            self._rejections[message.request_id] = self.replica_of(rejection), rejection
            return [rejection]
        request = RequestState(
            message.request_id,
            message.attempt,
            message.gateway,
            message.arrival_s,
            prompt,
            options,
            message.options,
            queued_s=self._state.now_s,
            root=prefix.root(options.cache_salt, options.adapter_id),
            token_output_bytes=token_output_bytes(options, self._config.hidden_size, len(prompt)),
            prompt_logprob_bytes=prompt_logprob_bytes(options),
            cut_positions=message.cut_positions,
            row_options=message.options,
            scope_id=message.scope_id,
        )
        if message.media:
            request.media = RequestMedia(message.media, len(prompt))
            request.extras = prefix.media_extras(message.media, self._config.block_size)
        if options.use_beam_search:
            request.beam_search = search = BeamSearch(options, len(prompt), limit, self._config.eos_ids)
            request.row_options = Raw(self._encoder.encode(row_options(options, search)))
        if options.bad_words_ids:  # only the executor needs them, and as objects they are large
            request.options = msgspec.structs.replace(options, bad_words_ids=[])
        self.by_id[request.request_id] = request
        if self._lifecycle.quarantine.is_suspect(request.request_id):
            self._lifecycle.suspect(request)
        openings: list[m.Open | m.Reject] = []
        for index in range(options.n):
            ids, finish = (outputs[index], Finish(message.finishes[index])) if outputs else (NO_IDS, Finish.NONE)
            sequence = self._open(request, index, limit, ids, finish)
            if not request.is_pooled:
                openings.append(self._opening_of(sequence, ids))
        if not request.open_sequences:  # the client has all output already
            self._lifecycle.quarantine.ended(request.request_id, is_complete=True)
        return openings

    def _attempt_of(self, request_id: int) -> int:
        """The attempt of a request that was admitted or refused and is not closed; 0 if there is none."""
        if (known := self.by_id.get(request_id)) is not None:
            return known.attempt
        return self._rejections[request_id][1].attempt if request_id in self._rejections else 0

    def _failure_of(
        self, message: m.Admit, options: m.GenerationOptions, num_prompt: int, limit: int
    ) -> m.Failure | None:
        """Why a request is refused. `limit` is the most ids that a sequence of it may have."""
        aborted = self._tombstones.get(message.request_id, 0)
        if aborted <= message.attempt:
            self._tombstones.pop(message.request_id, None)
        if aborted >= message.attempt:
            return m.Failure(499, "the request was aborted", code="aborted")
        if (largest := max((item.num_rows for item in message.media), default=0)) > self._config.num_encoder_rows:
            return m.Failure(
                400,
                f"an image of this prompt takes {largest} tokens, but the encoder cache of this server has room for "
                f"{self._config.num_encoder_rows}: send a smaller image, or raise execute.encoder_cache_bytes"
                if self._config.num_encoder_rows
                else "this model takes no images",
                code="context_length_exceeded" if self._config.num_encoder_rows else None,
            )
        num_blocks = self._kv_cache_manager.most_blocks(limit - 1)
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
        return self._beam_failure_of(options, num_prompt, num_blocks) if options.use_beam_search else None

    def _beam_failure_of(self, options: m.GenerationOptions, num_prompt: int, num_blocks: int) -> m.Failure | None:
        """Why a beam search is refused, whose sequences hold `num_blocks` blocks each: all of them must run at once."""
        if options.compiled_grammar:
            message = "structured output is not allowed together with use_beam_search = true"
            return m.Failure(400, message, param="use_beam_search")
        width = options.n
        if width > self._config.max_num_rows:
            limit = f"schedule.max_num_seqs = {self._config.max_num_seqs}"
            if self._config.max_num_rows < self._config.max_num_seqs:
                limit = f"slots for the states of {self._config.max_num_rows}"
            return m.Failure(
                400,
                f"beam search with n = {width} computes as many sequences at once, but this server has "
                f"{limit}: lower n",
                param="n",
            )
        num_top = BeamSearch(options, num_prompt, num_prompt, self._config.eos_ids).num_top
        if 0 < self._config.max_num_top < num_top:
            return m.Failure(
                400,
                f"beam search with n = {width} needs the {num_top} likeliest ids of each beam (n and the number of "
                "stop ids and of ids that the model excludes), and this executor returns "
                f"{self._config.max_num_top}: lower n, give fewer stop_token_ids, or raise limits.max_logprobs",
                param="n",
            )
        num_shared = num_prompt // self._config.block_size if self._kv_cache_manager.windows.is_plain else 0
        # Each beam but one leaves room for the next blocks of the others.
        num_needed = num_shared + width * (num_blocks - num_shared + len(self._config.kv_groups))
        if num_needed <= self._config.num_blocks:
            return None
        return m.Failure(
            400,
            f"beam search with n = {width} needs {num_needed} KV blocks, but this server has "
            f"{self._config.num_blocks}: lower n or max_tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )

    def replica_of(self, opening: m.Open | m.Reject) -> int:
        """The replica of detokenize that gets a new sequence, or a new refusal."""
        return shard(opening.seq if isinstance(opening, m.Open) else opening.request_id, self.num_detokenize)

    def _open(self, request: RequestState, index: int, limit: int, outputs: Ids, finish: Finish) -> Sequence:
        """Create a sequence that continues output that the client has, or finish it at once if that is complete."""
        if request.beam_search is not None:
            return self._open_beam(request, index, limit, outputs, finish)
        ids = np.concatenate((request.prompt, outputs)) if len(outputs) else request.prompt
        assert len(ids) <= limit, f"request {request.request_id:x} has {len(ids)} ids, at most {limit} are allowed"
        order = (self._policy.rank(request), self._order_of(request), self._next_seq)
        if finish == Finish.NONE and len(ids) == limit:
            finish = Finish.LENGTH
        sequence = Sequence(
            self._next_seq,
            request,
            index,
            ids,
            limit,
            order,
            NO_REPLICA if request.is_pooled else shard(self._next_seq, self.num_detokenize),
            finish=finish,
            num_resumed_tokens=len(ids),
            resumed_finish=finish,
            num_computed_prompt=len(request.prompt) if len(outputs) else 0,
        )
        self._next_seq += 1
        request.sequences.append(sequence)
        if finish == Finish.NONE:
            self._lifecycle.add(sequence)
        else:
            self._output_buffer.add_closing(sequence, len(ids), finish)
        return sequence

    def _order_of(self, request: RequestState) -> float:
        """What orders requests of a rank: the arrival, or with an encoder the turn among scopes."""
        if self._shares is None:
            return request.arrival_s
        waiting = self._lifecycle.waiting
        return self._shares.tag(request.scope_id, len(request.prompt), waiting.first_order[1] if waiting else None)

    def _open_beam(self, request: RequestState, index: int, limit: int, outputs: Ids, finish: Finish) -> Sequence:
        """Create a sequence of a beam search. If the client has some output, the search finds it again."""
        order = (self._policy.rank(request), request.arrival_s, self._next_seq)
        replica = shard(self._next_seq, self.num_detokenize)
        sequence = Sequence(self._next_seq, request, index, request.prompt, limit, order, replica)
        sequence.num_resumed_tokens, sequence.resumed_finish = len(request.prompt) + len(outputs), finish
        sequence.resumed_outputs = outputs
        self._next_seq += 1
        request.sequences.append(sequence)
        self._lifecycle.add(sequence)
        return sequence

    def _opening_of(self, sequence: Sequence, outputs: Ids) -> m.Open:
        request = sequence.request
        return m.Open(
            sequence.seq,
            request.request_id,
            request.attempt,
            sequence.index,
            request.gateway,
            request.prompt[-PROMPT_TAIL:].tobytes(),
            request.raw_options,
            self._puts[sequence.detokenize](outputs),
            int(sequence.resumed_finish),
            request.token_output_bytes,
        )

    def abort(self, message: m.Abort) -> None:
        """End a request, or one sequence of it. A request that is not known yet is refused when it comes."""
        request = self.by_id.get(message.request_id)
        if request is None or request.attempt < message.attempt:
            if message.index < 0:
                known = self._tombstones.get(message.request_id, 0)
                self._tombstones[message.request_id] = max(known, message.attempt)
                if len(self._tombstones) > MAX_TOMBSTONES:
                    self._tombstones.popitem(last=False)
            return
        if request.attempt > message.attempt:
            return
        for sequence in list(request.open_sequences.values()):
            if message.index in (-1, sequence.index) or request.beam_search is not None:
                sequence.ended_by_text = message.finish == Finish.STOP
                self._lifecycle.finish(sequence, Finish(message.finish))

    def close(self, message: m.Closed) -> None:
        """Drop a request that the gateway has closed, and end its open sequences."""
        if self._tombstones.get(message.request_id, 0) <= message.attempt:
            self._tombstones.pop(message.request_id, None)
        if 0 < self._attempt_of(message.request_id) <= message.attempt:
            self._drop(message.request_id)

    def _drop(self, request_id: int) -> None:
        """End the open sequences of a request, and forget it."""
        self._rejections.pop(request_id, None)
        request = self.by_id.pop(request_id, None)
        if request is not None:
            for sequence in list(request.open_sequences.values()):
                self._lifecycle.finish(sequence, Finish.ABORT)
            if request.media is not None:
                for pixels in request.media.pixels:
                    self._state.context.done(pixels)

    def _done(self, media: list[m.MediaItem]) -> None:
        """Free the pixels of a request that is not admitted."""
        for item in media:
            self._state.context.done(item.pixels)

    # ------------------------------------------------------------------------------------------ restarts of stages

    def gateway_lost(self, gateway: int) -> None:
        """A gateway has died: no one closes its requests any more."""
        lost = [one.request_id for one in self.by_id.values() if one.gateway == gateway]
        lost += [one.request_id for _, one in self._rejections.values() if one.gateway == gateway]
        for request_id in lost:
            self._drop(request_id)
        self._output_buffer.pooled.mark_sent(gateway)

    def executor_lost(self, loss: ExecutorLoss) -> None:
        """The executor has died."""
        self._lifecycle.executor_lost(loss)
        self._state.media.executor_lost()

    def ingest_lost(self, segment: str) -> None:
        """A process of ingest is gone."""
        view = self._state.context.view
        for request in self.by_id.values():
            if request.media is not None:
                request.media.keep(segment, lambda array: view(array, np.uint8).tobytes())

    def fail(self, errors: dict[int, str]) -> None:
        """Requests kill a stage: no successor of it gets them. The gateways learn of it without this, so what is on its
        way to detokenize may be lost."""
        for request_id in errors.keys() & self.by_id.keys():
            for sequence in list(self.by_id[request_id].open_sequences.values()):
                sequence.error = errors[request_id]
                self._lifecycle.finish(sequence, Finish.ERROR)
            self._drop(request_id)

    def resend(self, replica: int, *, is_removed: bool) -> list[Opening]:
        """A process of detokenize has died. Returns the messages with which its successor begins, as they were sent the
        first time; if it `is_removed`, the other replicas get its sequences. All their output is pending again."""
        self._output_buffer.forget(replica)
        openings: list[Opening] = []
        for request in self.by_id.values():
            for sequence in request.sequences:
                if sequence.detokenize == replica:
                    if is_removed:
                        sequence.detokenize = shard(sequence.seq, self.num_detokenize)
                    opening = self._opening_of(sequence, self._resumed_outputs(sequence))
                    openings.append((sequence.detokenize, opening))
                    self._output_buffer.resend(sequence)
        for request_id, (owner, rejection) in list(self._rejections.items()):
            if owner == replica:
                to = self.replica_of(rejection) if is_removed else replica
                self._rejections[request_id] = to, rejection
                openings.append((to, rejection))
        return openings

    def _resumed_outputs(self, sequence: Sequence) -> Ids:
        if sequence.request.beam_search is not None:
            return sequence.resumed_outputs
        num_prompt = len(sequence.request.prompt)
        ids = sequence.ids if sequence.row < 0 else self._lifecycle.ids_of(sequence.row)
        return ids[num_prompt : sequence.num_resumed_tokens]

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
