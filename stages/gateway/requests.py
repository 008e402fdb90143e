"""Open requests: the one owner of what the gateway knows about each, and of the credits that bound them.

    open ──Submit──► (Accepted) ──► Deltas, Deltas, … ──► closed ──Closed──► settled
                         └────────────► Rejected ───────────┘

A client's call opens one request for each of its prompts. A request is closed when each of its sequences has had its
closing and its prompt's ids have come, or nobody needs them any more: results come by another way than `Accepted` and
may overtake it. It is settled when, besides, the client has got everything or has left: then its credits, one for each
sequence, and its prompt's tokens come back (see admission.py). A client that leaves has its open requests aborted; they
stay here until their closings have come. A call whose time is up is ended like one that somebody calls off, or, where
it has no token yet, fails.
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.api_keys import scoped_salt
from pipeline.runtime.logprob_records import logprob_bytes
from pipeline.runtime.stage import Stage
from pipeline.runtime.tracing import Args
from pipeline.stages.gateway import timings
from pipeline.stages.gateway.admission import Admission
from pipeline.stages.gateway.deadlines import Deadlines
from pipeline.stages.gateway.errors import ApiError, overloaded
from pipeline.stages.gateway.metrics import Counting
from pipeline.stages.gateway.parsing.parse import Ask
from pipeline.stages.gateway.parsing.sampling_fields import SamplingFields
from pipeline.stages.gateway.parsing.token_detail_options import too_many
from pipeline.stages.gateway.replies.best_of import best
from pipeline.stages.gateway.timings import RecentCalls
from pipeline.text.formats.chat_formats import ChatFormats

FIRST_ATTEMPT = 1
ID_BYTES = 4
ABORTED = "aborted"
"""The code that ingest and schedule give a request that was aborted before it began."""


class Sequence(msgspec.Struct, eq=False):
    """One sample: what has come of it, and what of that the client has not been given yet."""

    pending: list[str] = []
    num_chars: int = 0
    """Characters of its text that have come."""
    ids: bytearray = msgspec.field(default_factory=bytearray)
    """int32, every output id that has come"""
    records: bytearray = msgspec.field(default_factory=bytearray)
    """Of these, where its request asks for them; see pipeline/runtime/logprob_records.py"""
    pieces: list[bytes] = []
    """Likewise: for each record the bytes of its id, then of the ids that it names"""
    finish: int = m.Finish.NONE
    stop_reason: str | int | None = None
    num_received: int = 0
    """Of these, those that came from the client."""
    is_resumed: bool = False
    """Its first ids came from the client; only their text's length will be told."""
    first: m.FirstTimes | None = None
    first_s: float = 0.0
    """When its first ids came, by time.monotonic(); as below."""
    last_s: float = 0.0
    """When the newest came."""
    settled_s: float = 0.0
    """When schedule sent its closing."""
    sent_s: float = 0.0
    """When detokenize did."""
    ended_s: float = 0.0
    """When it came here."""

    @property
    def num_ids(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def num_generated(self) -> int:
        """Ids that were made for this call."""
        return self.num_ids - self.num_received

    def take_text(self) -> str:
        """The text that has come since the last time."""
        text = "".join(self.pending)
        self.pending.clear()
        return text

    def extend(
        self,
        text: str,
        text_offset: int,
        ids: bytes,
        id_offset: int,
        records: bytes = b"",
        pieces: list[bytes] = [],  # noqa: B006 - only read
    ) -> None:
        """Append what is new: a request that was driven again repeats itself from some earlier place."""
        if self.is_resumed:
            self.num_chars, self.is_resumed = text_offset, False
        assert text_offset <= self.num_chars and id_offset <= self.num_ids, "a delta left something out"
        if new := text[self.num_chars - text_offset :]:
            self.pending.append(new)
            self.num_chars += len(new)
        num_known = self.num_ids - id_offset
        if records:
            num_ids = len(ids) // ID_BYTES
            self.records += records[num_known * (len(records) // num_ids) :]
            self.pieces += pieces[num_known * (len(pieces) // num_ids) :]
        self.ids += ids[num_known * ID_BYTES :]


class Request(msgspec.Struct, eq=False):
    """One prompt of a call."""

    submit: m.Submit
    """As it was sent: prompt, seed and arrival are what the request is driven with again."""
    call: "Call"
    sequences: list[Sequence]
    num_counted: int
    """Tokens of its prompt as admission counts them: an estimate until the ids have come."""
    prompt_ids: "np.ndarray[Any, np.dtype[np.int32]] | None" = None
    """What ingest made of the prompt."""
    is_closed: bool = False
    is_aborted: bool = False
    """Its client has left."""
    is_called_off: bool = False
    """Somebody asked for its end; its client is still there, and is told."""
    is_rejected: bool = False
    prompt_text: str | None = None
    token_strs: list[str] | None = None
    pieces: list[bytes] | None = None
    """The bytes of its prompt's ids, where they are asked for"""
    prompt_records: bytearray = msgspec.field(default_factory=bytearray)
    """Of its prompt's ids, from the second on, where they are asked for"""
    prompt_pieces: list[bytes] = []
    """For each of these records the bytes of the ids that it names"""
    tail: str | None = None
    """The end of its prompt's text, where it is asked for"""
    began_s: float = 0.0
    """As `Accepted` has it."""
    done_s: float = 0.0

    @property
    def id(self) -> int:
        return self.submit.request_id

    @property
    def generates(self) -> bool:
        """Whether schedule hears of it."""
        return self.submit.max_tokens != 0

    @property
    def num_prompt_records(self) -> int:
        return len(self.prompt_records) // logprob_bytes(max(0, self.submit.text.prompt_num_top))

    @property
    def has_prompt_records(self) -> bool:
        """Whether all have come that are to come."""
        if self.submit.text.prompt_num_top < 0 or self.is_finished:
            return True
        return self.prompt_ids is not None and self.num_prompt_records >= len(self.prompt_ids) - 1

    def record_prompt(self, offset: int, records: bytes, pieces: list[bytes]) -> None:
        """Take records of the prompt, of which `offset` come before. A request that was driven again repeats itself."""
        num_known = self.num_prompt_records - offset
        assert num_known >= 0, "records of a prompt were left out"
        num_top = self.submit.text.prompt_num_top
        self.prompt_records += records[num_known * logprob_bytes(num_top) :]
        self.prompt_pieces += pieces[num_known * num_top :]

    @property
    def num_cached(self) -> int:
        """Ids of its prompt that were found in the prefix cache, by whichever of its sequences found least: the others
        find what that one has computed."""
        return min(self.nums_cached, default=0)

    @property
    def nums_cached(self) -> list[int]:
        """The same of each sequence that has an id."""
        return [one.first.num_cached for one in self.sequences if one.first is not None]

    def echo(self) -> None:
        """Put the prompt's text before all that its sequences say; nothing of it has been given out."""
        prompt = self.submit.prompt
        text = prompt.text if isinstance(prompt, m.TextPrompt) else self.prompt_text
        if text:
            for sequence in self.sequences:
                sequence.pending.insert(0, text)

    @property
    def is_finished(self) -> bool:
        """Whether each of its sequences has had its closing."""
        return all(sequence.finish != m.Finish.NONE for sequence in self.sequences)


class Call:
    """One client's call: its requests, and the wake of the task that writes its response."""

    def __init__(self, ask: Ask, stage: "Stage[m.GatewayInbox]", number: int, formats: ChatFormats) -> None:
        self.ask = ask
        self.formats = formats
        """How the model writes what `ask.reply` looks for."""
        self.number = number
        """Of the gateway's calls."""
        self._stage = stage
        replay = stage.replay_context
        self.received_s = ask.received_s or replay.monotonic()
        """When its client began to ask, by time.monotonic()."""
        self.trace = stage.trace
        prefix = _prefix(ask)
        self.id = f"{prefix}-{ask.request_id or f'{replay.randbits(64):016x}{replay.randbits(64):016x}'}"
        self.created = int(replay.time())
        self.salt = 0 if ask.reply is None else replay.randbits(64)
        """What ids of its tool calls are made from."""
        self.requests: list[Request] = []
        self.sequences: list[Sequence] = []
        """Of all its requests; the place is the choice's index."""
        self.num_open = 0
        """Of its requests, those that are not closed."""
        self.num_accepted = 0
        self.num_prompt_logprobs = 0
        """To be told of the prompts that are accepted."""
        self.has_begun = False
        """A delta has come: the server is computing this."""
        self.timeout_s = 0.0
        """From `received_s` to its deadline; 0 where it has none."""
        self.failure: ApiError | None = None
        self.is_over = False
        self._changed = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0

    @property
    def is_accepted(self) -> bool:
        return self.num_accepted == len(self.requests)

    @property
    def names(self) -> set[str]:
        """What it may be called off by: the id of its response, and the one its client gave it."""
        return {self.id} if self.ask.request_id is None else {self.id, self.ask.request_id}

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests if request.prompt_ids is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt tokens, those that were found in the prefix cache."""
        return sum(request.num_cached for request in self.requests)

    @property
    def choices(self) -> list[Sequence]:
        """What it is answered with: all its sequences, or of each request the best."""
        if self.ask.best_of is None:
            return self.sequences
        num_top = self.ask.text.num_top
        return [one for request in self.requests for one in best(request.sequences, self.ask.n, num_top)]

    @property
    def num_output_tokens(self) -> int:
        """Of all that was generated, whether it is returned or not."""
        return sum(sequence.num_ids for sequence in self.sequences)

    def told(self, what: str, data: bytes) -> bytes:
        """Note for recordings what is given out to the client now, and by what name. Returns it."""
        self._stage.replay_context.event(what, self.number)
        self._stage.replay_context.log_output(self.number, data)
        return data

    def fail(self, error: ApiError) -> None:
        """The call ends with an error; the first one counts, and none once it has finished."""
        if not self.is_finished:
            self.failure = self.failure or error
            self._changed.set()

    def wake(self) -> None:
        """Something came. A response that is sent whole waits for the end."""
        if self.ask.stream or self.is_finished:
            self._changed.set()

    async def change(self) -> None:
        """Wait until something has come since the last time. Raises ApiError when the call fails or has failed.

        No deadline of its own: each opening has a closing, a dead stage fails every call, and so does the end of a
        drain.
        """
        if self.failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self.failure is not None:
            raise self.failure

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Raises ApiError as `change`."""
        while self.failure is not None or not condition():
            await self.change()


class Requests:
    """The table of open requests."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        self._ingests = stage.outboxes_of("ingest")
        self._schedule = stage.outbox("schedule")
        self.formats = ChatFormats.load(stage.model_dir, stage.settings.chat)
        self.num_opened = 0
        """Calls that anybody has tried to open."""
        self._table: dict[int, Request] = {}
        self._names: dict[tuple[str, str], list[Call]] = {}
        """Calls whose responses are not over, by their scopes and names. Clients may give two calls one name."""
        self._shares_cache = stage.settings.gateway.share_prefix_cache
        self.num_calls = 0
        """Calls for output whose responses are not over."""
        self._owed: deque[tuple[Any, m.Abort | m.Closed]] = deque()
        """What a full socket refused: it goes out at a later wake, and nothing is opened before it has."""
        self.admission = Admission(
            topology.max_open_of_one(stage.settings), topology.max_open_tokens_of_one(stage.settings)
        )
        self._calls: dict[int, Call] = {}
        """By their numbers: those with a deadline."""
        self._timeout_s = stage.settings.gateway.request_timeout_s
        self._deadlines = Deadlines(lambda number: self.expire(self._calls[number]))
        self._idle = asyncio.Event()
        self._idle.set()
        self._trace = stage.trace
        self.counting = Counting()
        self.recent = RecentCalls()
        stage.control_requests.own_counts = lambda: self.counting.counts(self.num_open, self.admission)
        stage.control_requests.find_request = self.recent.find

    @property
    def num_open(self) -> int:
        return len(self._table)

    async def idle(self) -> None:
        """Wait until nothing is open. The caller has the deadline."""
        await self._idle.wait()

    # ------------------------------------------------------------------------------------------- the client's side

    def check_room(self) -> None:
        """Before a body is read. Raises ApiError, 503, where no request would be let in."""
        try:
            self.admission.check_room(time.monotonic())
        except ApiError:
            self.counting.num_overloaded += 1
            raise

    def timed_out(self, timeout_s: float) -> ApiError:
        """504, counted, for a call whose time is up before it is opened."""
        self.counting.num_timed_out += 1
        return _timeout(timeout_s)

    def open(self, ask: Ask) -> Call:
        """Open a request for each prompt and send them to ingest. Raises ApiError: 503, where as many are open as may
        be; 504, where its time is up already."""
        begin_s = time.monotonic()
        timeout_s = ask.timeout_s or self._timeout_s
        if (
            timeout_s
            and ask.received_s
            and not self._stage.replay_context.is_replaying
            and begin_s >= ask.received_s + timeout_s
        ):
            raise self.timed_out(timeout_s)
        try:
            call = self._open(ask)
        except ApiError:
            self.counting.num_overloaded += 1
            raise
        if self._trace.on:
            requests = [request.id for request in call.requests]
            self._trace.span("submit", begin_s, time.monotonic(), {"call": call.id}, requests)
        return call

    def _open(self, ask: Ask) -> Call:
        replay = self._stage.replay_context
        self.num_opened += 1
        if replay.is_recording:
            replay.event("open", self.num_opened, msgspec.msgpack.encode(ask))
        if self._owed:
            raise overloaded("its stages take no more messages")
        estimates = [self.admission.estimate(prompt, is_computed=not ask.is_lookup) for prompt in ask.prompts]
        now_s = time.monotonic()
        self.admission.admit(len(ask.prompts) * ask.num_sequences, sum(estimates), now_s)
        call = Call(ask, self._stage, self.num_opened, self.formats)
        self._name(call)
        cache_salt = ask.cache_salt if self._shares_cache else scoped_salt(ask.scope, ask.cache_salt)
        for i, prompt in enumerate(ask.prompts):
            # The client's seed holds for each prompt, so that a list gives what each prompt gives alone. Without one,
            # equal prompts get different outputs.
            seed = replay.randbits(64) if ask.seed is None else ask.seed
            submit = m.Submit(
                request_id=replay.randbits(63),
                attempt=FIRST_ATTEMPT,
                gateway=self._stage.replica,
                arrival_s=replay.time(),
                prompt=prompt,
                n=ask.num_sequences,
                max_tokens=ask.max_tokens,
                sampling=msgspec.structs.replace(ask.sampling, seed=seed),
                text=ask.text,
                outputs=list(ask.outputs),
                prompt_options=ask.prompt_options,
                priority=ask.priority,
                cache_salt=cache_salt,
                grammar=ask.grammar,
                bad_words=ask.bad_words,
            )
            if not self._ingest_of(submit.request_id).send(submit):
                self.leave(call)
                raise overloaded("its stages take no more messages")
            request = Request(submit, call, _sequences(ask), estimates[i])
            call.requests.append(request)
            call.sequences += request.sequences
            call.num_open += 1
            self.admission.take(ask.num_sequences, estimates[i], now_s)
            self._table[request.id] = request
            self._idle.clear()
            if request.generates:
                self.counting.opened(ask.num_sequences, ask.n, ask.max_tokens)
            self._stage.log.debug("opened", extra=_fields(request, call=call.id))
        self._set_deadline(call)
        return call

    def _set_deadline(self, call: Call) -> None:
        timeout_s = call.timeout_s = call.ask.timeout_s or self._timeout_s
        if timeout_s and not self._stage.replay_context.is_replaying:
            self._calls[call.number] = call
            self._deadlines.add(call.number, call.received_s + timeout_s)

    def leave(self, call: Call) -> None:
        """The response is over, whole or not: abort what is still open, and settle what is closed."""
        if call.is_over:
            return
        self._stage.replay_context.event("leave", call.number)
        call.is_over = True
        if self._calls.pop(call.number, None) is not None:
            self._deadlines.remove(call.number)
        self._unname(call)
        if call.requests and call.is_finished and call.failure is None and not call.ask.is_lookup:
            now_s = time.monotonic()
            self.recent.keep(timings.times_of(call, now_s))
            for request in call.requests:
                fields = _fields(request, call=call.id, took_s=round(now_s - call.received_s, 4))
                self._stage.log.debug("finished", extra=fields)
        for request in call.requests:
            if request.is_closed:
                self._settle(request)
            else:
                self._abort(request)

    def call_off(self, names: list[str], scope: str) -> list[int]:
        """End the calls of these names in a scope; their clients are told by a finish reason. Returns the places of
        the names that were known there. Idempotent."""
        places = []
        for place, name in enumerate(names):
            if calls := self._names.get((scope, name)):
                places.append(place)
            for call in calls or ():
                self._call_off(call, "called off")
        return places

    def expire(self, call: Call) -> None:
        """A call's time is up. What it has is its client's, and what is open ends; without any token it fails."""
        if call.is_finished or call.failure is not None:
            return  # all that is missing is its client's to take
        self._stage.replay_context.event("timeout", call.number)
        self.counting.num_timed_out += 1
        if any(sequence.num_generated for sequence in call.sequences):
            self._call_off(call, "timed out")
            return
        for request in call.requests:
            self._stage.log.info("timed out", extra=_fields(request, call=call.id))
        call.fail(_timeout(call.timeout_s))

    def _call_off(self, call: Call, why: str) -> None:
        for request in call.requests:
            if not (request.is_finished or request.is_aborted or request.is_called_off):
                request.is_called_off = True
                self._stage.log.info(why, extra=_fields(request, call=call.id))
                self._end(request)

    def _name(self, call: Call) -> None:
        if not call.ask.is_lookup:
            self.num_calls += 1
            for name in call.names:
                self._names.setdefault((call.ask.scope, name), []).append(call)

    def _unname(self, call: Call) -> None:
        if not call.ask.is_lookup:
            self.num_calls -= 1
            for name in call.names:
                calls = self._names[call.ask.scope, name]
                calls.remove(call)
                if not calls:
                    del self._names[call.ask.scope, name]

    # ------------------------------------------------------------------------------------------ the stages' side

    def accepted(self, message: m.Accepted) -> None:
        """Ingest has made ids of a prompt.

        A request that is not here any more was closed while this was on its way, and an Abort would be left lying in
        schedule; one that never was here is aborted at its first delta.
        """
        ids = self._stage.arrays.take(message.prompt_ids, np.int32)
        request = self._find(message.request_id, message.attempt, is_open=False)
        if request is not None and request.prompt_ids is None:
            request.prompt_ids = ids
            self.admission.correct(request.num_counted, len(ids))
            request.num_counted = len(ids)
            request.prompt_text, request.token_strs = message.text, message.token_strs
            request.pieces, request.tail = message.pieces, message.tail
            request.began_s, request.done_s = message.began_s, message.done_s
            request.call.num_accepted += 1
            self._count_logprobs(request.call, len(ids))
            if request.call.ask.echo:
                request.echo()
            if request.generates:
                self._close_if_over(request)
            for sequence in () if request.generates else request.sequences:
                self._finish(request, sequence, m.Finish.LENGTH, None)
            request.call.wake()

    def _count_logprobs(self, call: Call, num_ids: int) -> None:
        """A prompt of so many ids was accepted. The call fails where more is to be told of them than may be: a reply
        repeats it with each choice, and so may be many times larger than what was computed."""
        ask, caps = call.ask, self._stage.settings.limits
        is_repeated = not (ask.is_chat or ask.is_tokens_only) and (ask.echo or not ask.stream)
        call.num_prompt_logprobs += ask.details.num_of_prompt(num_ids, ask.n if is_repeated else 1)
        if call.num_prompt_logprobs > caps.max_prompt_logprobs:
            error = too_many(ask.details, call.num_prompt_logprobs, caps)
            call.fail(ApiError(error.status, error.message, _named(call, error.param), error.code))

    def rejected(self, message: m.Rejected) -> None:
        """A request can't be served; all its sequences are closed."""
        request = self._find(message.request_id, message.attempt, is_open=False)
        if request is None or request.is_closed:
            return
        failure = message.failure
        if request.is_called_off and failure.code == ABORTED:
            for sequence in request.sequences:
                self._finish(request, sequence, m.Finish.ABORT, None)
            request.call.wake()
            return
        if not request.is_aborted:
            self._stage.log.info("rejected", extra=_fields(request, status=failure.status, why=failure.message))
            param = _param(request, failure.param)
            words = failure.message.replace(f"'{failure.param}", f"'{param}", 1)
            request.call.fail(ApiError(failure.status, words, param, failure.code))
        request.is_rejected = True
        for sequence in request.sequences:
            self._finish(request, sequence, m.Finish.ERROR, None)

    def deltas(self, message: m.Deltas) -> None:
        """Text and ids of some sequences."""
        begin = 0
        now_s = self._stage.replay_context.monotonic()
        first_of = {first.place: first for first in message.firsts}
        gaps: dict[float, int] = {}
        """By when the ids before came: those of one message came together, so these are few."""
        errors = iter(message.errors)
        self._record_prompts(message)
        marked: list[int] = []
        """Requests that began or ended with this message, for traces."""
        for i, request_id in enumerate(message.request_ids):
            end = begin + message.num_ids[i] * ID_BYTES
            ids, begin = message.ids[begin:end], end
            records = message.records[i] if message.records else b""
            pieces = message.pieces[i] if message.pieces else []
            finish = message.finishes[i]
            error = next(errors, "") if finish == m.Finish.ERROR else ""
            request = self._find(request_id, message.attempts[i], is_open=finish == m.Finish.NONE)
            if request is None:
                continue
            sequence = request.sequences[message.indexes[i]]
            if sequence.finish != m.Finish.NONE:
                continue
            call = request.call
            if not call.is_over:
                offset = message.id_offsets[i]
                if not call.ask.hides_output:
                    sequence.extend(message.texts[i], message.text_offsets[i], ids, offset, records, pieces)
                call.has_begun = True
                if sequence.last_s:
                    gaps[sequence.last_s] = gaps.get(sequence.last_s, 0) + bool(message.num_ids[i])
                elif message.num_ids[i]:
                    sequence.first, sequence.first_s = first_of.get(i), now_s
                    self.counting.first_s.observe(now_s - call.received_s)
                    marked.append(request_id)
                sequence.last_s = now_s if message.num_ids[i] else sequence.last_s
            if finish != m.Finish.NONE:
                marked.append(request_id)
                sequence.settled_s, sequence.sent_s, sequence.ended_s = message.settled_s, message.sent_s, now_s
                self._finish(request, sequence, finish, message.stop_reasons[i], error)
            call.wake()
        for last_s, times in gaps.items():
            self.counting.gap_s.observe(now_s - last_s, times)
        if self._trace.on:
            args: Args = {"sequences": len(message.request_ids), "tokens": len(message.ids) // ID_BYTES}
            self._trace.span("deltas", now_s, time.monotonic(), args, marked)

    def _record_prompts(self, message: m.Deltas) -> None:
        """Take what a message has of prompts."""
        each = zip(
            message.prompt_places, message.prompt_offsets, message.prompt_records, message.prompt_pieces, strict=True
        )
        for place, offset, records, pieces in each:
            request = self._table.get(message.request_ids[place])
            if request is None or request.submit.attempt != message.attempts[place] or request.call.is_over:
                continue
            request.record_prompt(offset, records, pieces)

    def fail_all(self, error: ApiError) -> None:
        """End every call with this error."""
        self._stage.replay_context.event("fail all")
        for call in {id(request.call): request.call for request in self._table.values()}.values():
            call.fail(error)

    def give_up(self, error: ApiError) -> None:
        """No closing will come any more: end every call with this error and wait for none."""
        for request in list(self._table.values()):
            request.call.fail(error)
            self._close(request)
        self._owed.clear()

    def flush(self) -> None:
        """Send what full sockets refused before; to be called once per wake."""
        while self._owed:
            outbox, message = self._owed[0]
            if not outbox.send(message):
                return
            self._owed.popleft()

    # ------------------------------------------------------------------------------------------------- inside

    def _find(self, request_id: int, attempt: int, *, is_open: bool = True) -> Request | None:
        """The request a message is about. One that nobody here waits for is aborted if `is_open`, that is, if the
        sender goes on with it; what comes from an attempt before the last is dropped."""
        request = self._table.get(request_id)
        if request is None:
            if is_open:
                self._disown(request_id, attempt)
            return None
        return request if request.submit.attempt == attempt else None

    def _finish(
        self, request: Request, sequence: Sequence, finish: int, stop_reason: str | int | None, error: str = ""
    ) -> None:
        if sequence.finish != m.Finish.NONE:
            return
        if finish == m.Finish.ERROR and not request.is_aborted and request.call.failure is None:
            self._stage.log.info("failed", extra=_fields(request, why=error))
            request.call.fail(_failed(request, error))
        if request.call.ask.hides_output and finish == m.Finish.STOP:
            finish, stop_reason = m.Finish.LENGTH, None  # the id that nobody asked for is the one that stops it
        sequence.finish = finish
        sequence.stop_reason = stop_reason
        self._count(request, sequence, finish)
        self._close_if_over(request)

    def _count(self, request: Request, sequence: Sequence, finish: int) -> None:
        """A sequence has ended. A prompt from which nothing is generated has none."""
        if not request.generates:
            return
        if request.is_aborted:
            self.counting.ended(m.Finish.ABORT)
        elif request.is_rejected:
            self.counting.rejected()
        elif finish not in (m.Finish.STOP, m.Finish.LENGTH):
            self.counting.ended(finish)
        else:
            now_s = self._stage.replay_context.monotonic()
            num_prompt = 0 if request.prompt_ids is None else len(request.prompt_ids)
            decode_s = sequence.last_s - sequence.first_s
            self.counting.finished(
                finish, now_s - request.call.received_s, decode_s, num_prompt, sequence.num_generated
            )
            if request.is_finished:
                self.counting.longest(max(one.num_generated for one in request.sequences))

    def _close_if_over(self, request: Request) -> None:
        call = request.call
        needs_ids = (
            request.prompt_ids is None and not request.is_aborted and not request.is_called_off and call.failure is None
        )
        if request.is_finished and not needs_ids and not request.is_closed:
            if request.generates:
                self._send(self._schedule, m.Closed(request.id, request.submit.attempt))
            self._close(request)

    def _close(self, request: Request) -> None:
        if not request.is_closed:
            request.is_closed = True
            request.call.num_open -= 1
        if request.call.is_over:
            self._settle(request)

    def _settle(self, request: Request) -> None:
        if self._table.pop(request.id, None) is not None:
            self.admission.give(request.submit.n, request.num_counted, time.monotonic())
        if not self._table:
            self._idle.set()

    def _abort(self, request: Request) -> None:
        request.is_aborted = True
        if request.is_finished:
            self._close_if_over(request)  # only its prompt's ids were still to come
        else:
            self._stage.log.info("aborted", extra=_fields(request, call=request.call.id))
            self._end(request)

    def _end(self, request: Request) -> None:
        """Have it ended, wherever it is. Its closings will come, as for any other."""
        if request.generates:
            self._disown(request.id, request.submit.attempt)
        else:
            self._send(self._ingest_of(request.id), m.Abort(request.id, request.submit.attempt))

    def _disown(self, request_id: int, attempt: int) -> None:
        """Have a request ended, wherever it is."""
        abort = m.Abort(request_id, attempt)
        self._send(self._ingest_of(request_id), abort)
        self._send(self._schedule, abort)

    def _ingest_of(self, request_id: int) -> Any:
        return self._ingests[topology.shard(request_id, len(self._ingests))]

    def _send(self, outbox: Any, message: m.Abort | m.Closed) -> None:
        if self._owed or not outbox.send(message):  # in order: a Closed must not overtake its Abort
            self._owed.append((outbox, message))


def _prefix(ask: Ask) -> str:
    """What the ids of such a call's reply begin with."""
    if ask.is_lookup:
        return "tokenize"
    if ask.embedding is not None:
        return "embd"
    if ask.is_tokens_only:
        return "generate"
    return "chatcmpl" if ask.is_chat else "cmpl"


def _timeout(timeout_s: float) -> ApiError:
    message = f"the request was not done within {timeout_s:g} s, and has no token yet"
    return ApiError(HTTPStatus.GATEWAY_TIMEOUT, message, code="timeout")


def _sequences(ask: Ask) -> list[Sequence]:
    if not ask.outputs:
        return [Sequence() for _ in range(ask.num_sequences)]
    return [Sequence(ids=bytearray(ids), num_received=len(ids) // ID_BYTES, is_resumed=True) for ids in ask.outputs]


def _failed(request: Request, error: str) -> ApiError:
    """400, where what the client allows leaves no token; else it is the server's."""
    submit, call = request.submit, request.call
    param = "allowed_token_ids" if submit.sampling.allowed_ids else "bad_words" if submit.bad_words else None
    if error.startswith(m.NOTHING_LEFT):  # what it asks for contradicts itself, and would again
        return ApiError(HTTPStatus.BAD_REQUEST, error, _named(call, param), "nothing_left")
    message = "the server could not finish this request" + (f": {error}" if error else "")
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message)


def _param(request: Request, param: str | None) -> str | None:
    """The field to blame, as the client called it: the stages behind know one prompt, and one name for its length."""
    call = request.call
    if param == "max_tokens":
        return call.ask.max_tokens_param
    if param is not None and (match := _PROMPT_PLACE.fullmatch(param)):
        which = f"[{call.requests.index(request)}]" if len(call.ask.prompts) > 1 else ""
        return f"{call.ask.prompt_param}{which}{match[1]}"
    return _named(call, param)


def _named(call: Call, param: str | None) -> str | None:
    """A field of sampling, which a call of ids alone has in an object of its own."""
    is_within = call.ask.is_tokens_only and param in SamplingFields.__struct_fields__
    return f"sampling_params.{param}" if is_within else param


_PROMPT_PLACE = re.compile(r"prompt((?:\[\d+\])?)")


def _fields(request: Request, **fields: Any) -> dict[str, Any]:
    return {"fields": {"request": f"{request.id:x}", **fields}}
