"""A client's request, its prompts, and their sequences: the state that a gateway keeps of each.

    Request ──one for each prompt──► PromptRequest ──n, or best_of──► Sequence

RequestTable creates and releases them, ResultHandler updates them, and the code that writes the response reads them.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import logprob_bytes
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.apis.responses.types import ResponseObject
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_bytes import PLAIN, OutputCost, output_bytes
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.replies.best_of import best
from pipeline.stages.gateway.usage import RequestUsage
from pipeline.text import special_spans
from pipeline.text.formats.chat_formats import ChatFormats

ID_BYTES = 4


class SequenceOutput(msgspec.Struct, eq=False):
    """One sample of a prompt: what the stages have sent, and which text the client has not been given yet."""

    pending: list[str] = []
    """Text that has arrived and was not taken yet, in a few pieces."""
    num_chars: int = 0
    """Characters of text that have arrived."""
    ids: bytearray = msgspec.field(default_factory=bytearray)
    """int32: all output ids that have arrived."""
    records: bytearray = msgspec.field(default_factory=bytearray)
    """Logprob records of `ids`, if the request asks for them; see pipeline/runtime/logprob_records.py."""
    pieces: list[bytes] = []
    """For each record: the bytes of its id, then those of its likeliest ids."""
    special_spans: bytearray = msgspec.field(default_factory=bytearray)
    """Where special tokens are in the text, if the request asks for it: those that were not taken yet."""
    special_end: int = 0
    """The offset in the text behind the last special token that has arrived."""
    finish: int = m.Finish.NONE
    stop_reason: str | int | None = None
    num_received: int = 0
    """Ids at the start of `ids` that came with the request: the client resumes a stream."""
    is_resumed: bool = False
    """The client has the first ids already. Their text is not sent again; the first delta says how long it is."""
    first: m.FirstTimes | None = None
    drafts: m.DraftCounts | None = None
    """Of the predicted output, if the request has one."""
    first_s: float = 0.0
    """When the first ids arrived. All times are by time.monotonic()."""
    last_s: float = 0.0
    """When the newest ids arrived."""
    settled_s: float = 0.0
    """When schedule sent the last ids."""
    sent_s: float = 0.0
    """When detokenize sent the last text."""
    ended_s: float = 0.0
    """When the end arrived here."""
    num_bytes: int = 0
    """What admission counts for this output."""

    @property
    def num_ids(self) -> int:
        return len(self.ids) // ID_BYTES

    @property
    def num_generated(self) -> int:
        """Ids that were generated for this request."""
        return self.num_ids - self.num_received

    def take_text(self) -> str:
        """Return the text that has arrived since the last call."""
        text = "".join(self.pending)
        self.pending.clear()
        return text

    def take_special_spans(self) -> bytes:
        """Return the spans of special tokens that have arrived since the last call."""
        spans = bytes(self.special_spans)
        self.special_spans.clear()
        return spans

    def extend(
        self,
        text: str,
        text_offset: int,
        ids: bytes,
        id_offset: int,
        records: bytes = b"",
        pieces: list[bytes] = [],  # noqa: B006 - only read
    ) -> None:
        """Append what is new. After a restart of a stage, deltas repeat text and ids that have arrived before."""
        if self.is_resumed:
            self.num_chars, self.is_resumed = text_offset, False
        assert text_offset <= self.num_chars and id_offset <= self.num_ids, "a delta is missing"
        if new := text[self.num_chars - text_offset :]:
            pending = self.pending
            # Pieces of a kept text are joined as in a binary counter, because a small text takes 50 bytes more.
            while pending and len(pending[-1]) <= len(new):
                new = pending.pop() + new
            pending.append(new)
            self.num_chars = text_offset + len(text)
        num_known = self.num_ids - id_offset
        if records:
            num_ids = len(ids) // ID_BYTES
            self.records += records[num_known * (len(records) // num_ids) :]
            self.pieces += pieces[num_known * (len(pieces) // num_ids) :]
        self.ids += ids[num_known * ID_BYTES :]

    def extend_special_spans(self, spans: bytes) -> None:
        """Append those of the special tokens that have not arrived before."""
        if new := special_spans.behind(spans, self.special_end):
            self.special_spans += new
            self.special_end = special_spans.end_of(new)


class PromptRequest(msgspec.Struct, eq=False):
    """One prompt of a request. The stages know it by `submit.request_id`."""

    submit: m.Submit
    """As it is sent again if a stage dies: with the same prompt, seed and arrival."""
    request: "Request"
    sequences: list[SequenceOutput]
    num_counted: int
    """Prompt tokens that admission counts: an estimate until ingest has sent the ids."""
    num_bytes: int = 0
    """Bytes that admission counts: `base_bytes`, and those of its output."""
    base_bytes: int = 0
    """What it keeps besides its output."""
    ingest: int = 0
    """The replica of ingest that it was sent to."""
    prompt_ids: "np.ndarray[Any, np.dtype[np.int32]] | None" = None
    """The tokenized prompt, from `Accepted`."""
    is_confirmed: bool = False
    """Output of the current attempt has arrived, so schedule has it."""
    echoed: str = ""
    """The prompt's text, if it stands before the output."""
    is_closed: bool = False
    """No more messages about it will arrive."""
    is_released: bool = False
    """Its response ended before it did: it was aborted and its results are dropped."""
    is_aborted: bool = False
    """It was aborted by id or by its timeout; its client still reads the response."""
    is_rejected: bool = False
    is_preempted: bool = False
    """No stage has it: it waits for room in the limit of bytes; see preemption.py."""
    prompt_text: str | None = None
    token_strs: list[str] | None = None
    pieces: list[bytes] | None = None
    """Bytes of each prompt id, if the request asks for them."""
    prompt_records: bytearray = msgspec.field(default_factory=bytearray)
    """Logprob records of the prompt ids from the second on, if the request asks for them."""
    prompt_pieces: list[bytes] = []
    """For each of these records: the bytes of its likeliest ids."""
    tail: str | None = None
    """As in `Accepted`, for the reply parser. It stays the same if the request is submitted again."""
    began_s: float = 0.0
    """As in `Accepted`, like `done_s`."""
    done_s: float = 0.0

    @property
    def id(self) -> int:
        return self.submit.request_id

    @property
    def generates(self) -> bool:
        """Whether schedule runs it. Otherwise only ingest does."""
        return self.submit.options.max_tokens != 0

    @property
    def is_with_schedule(self) -> bool:
        """Whether ingest's part is certainly done."""
        return self.is_confirmed and self.prompt_ids is not None

    @property
    def is_finished(self) -> bool:
        """Whether all its sequences have finished."""
        return all(sequence.finish != m.Finish.NONE for sequence in self.sequences)

    @property
    def num_prompt_records(self) -> int:
        return len(self.prompt_records) // logprob_bytes(max(0, self.submit.options.num_prompt_logprobs))

    @property
    def has_prompt_records(self) -> bool:
        """Whether all prompt records that are expected have arrived."""
        if self.submit.options.num_prompt_logprobs < 0 or self.is_finished:
            return True
        return self.prompt_ids is not None and self.num_prompt_records >= len(self.prompt_ids) - 1

    def extend_prompt_records(self, offset: int, records: bytes, pieces: list[bytes]) -> None:
        """Append prompt records, the first of which has index `offset`. Records that have arrived before are
        skipped."""
        num_known = self.num_prompt_records - offset
        assert num_known >= 0, "prompt records are missing"
        num_top = self.submit.options.num_prompt_logprobs
        self.prompt_records += records[num_known * logprob_bytes(num_top) :]
        self.prompt_pieces += pieces[num_known * num_top :]

    @property
    def num_cached(self) -> int:
        """Prompt ids found in the prefix cache: the minimum over its sequences, since the others also find what the
        first one has computed."""
        return min(self.nums_cached, default=0)

    @property
    def nums_cached(self) -> list[int]:
        """The same for each sequence that has an id."""
        return [one.first.num_cached for one in self.sequences if one.first is not None]

    @property
    def num_output_bytes(self) -> int:
        """The part of `num_bytes` that its output has, with the records of its prompt."""
        records = int(self.request.output_cost.prompt_record_bytes * len(self.prompt_records))
        return records + sum(sequence.num_bytes for sequence in self.sequences)

    def drop_output(self) -> None:
        """The output is not read any more. What schedule has of it still counts."""
        self.prompt_records.clear()
        self.prompt_pieces = []
        for sequence in self.sequences:
            sequence.pending.clear()
            sequence.special_spans.clear()
            sequence.records.clear()
            sequence.pieces = []
            sequence.num_bytes = output_bytes(self.request.output_cost, sequence)

    def echo(self) -> None:
        """Put the prompt's text before the text of each sequence. Call it before any text is taken."""
        prompt = self.submit.prompt
        text = prompt.text if isinstance(prompt, m.TextPrompt) else self.prompt_text
        if text:
            self.echoed = text
            for sequence in self.sequences:
                sequence.pending.insert(0, text)


def next_attempt(prompt_request: PromptRequest) -> m.Submit:
    """The request as it is submitted again: with the output that its client has, or will get."""
    submit = prompt_request.submit
    outputs: list[m.Array] = [bytes(sequence.ids) for sequence in prompt_request.sequences]
    return msgspec.structs.replace(
        submit,
        attempt=submit.attempt + 1,
        outputs=outputs if any(outputs) else list(submit.outputs),
    )


class Request:
    """One client request: its prompt requests, and the event that wakes the task that writes its response."""

    def __init__(
        self,
        parsed: ParsedRequest,
        stage: "Stage[m.GatewayInbox]",
        number: int,
        formats: ChatFormats,
        output_cost: OutputCost = PLAIN,
        fixed_bytes: int = 0,
    ) -> None:
        self.parsed = parsed
        self.formats = formats
        """How the model writes what `parsed.reply` looks for."""
        self.number = number
        """Counts the gateway's requests."""
        self._stage = stage
        replay = stage.replay_context
        self.received_s = parsed.received_s or replay.monotonic()
        """When the request began to arrive, by time.monotonic()."""
        self.trace = stage.trace
        if (resumption := parsed.resumption) is not None:
            self.id, self.created, self.salt = resumption.id, resumption.created, resumption.salt
        else:
            self.id = _id_of(parsed, replay.randbits)
            self.created = int(replay.time())
            self.salt = 0 if parsed.reply is None and not parsed.dialect.makes_ids else replay.randbits(64)
        """Seeds the ids of its tool calls and of a response's items."""
        self.on_response: Callable[[ResponseObject], None] | None = None
        """Stores a complete or failed response of /v1/responses before it is sent; it may be called in a thread."""
        self.output_cost = output_cost
        self.fixed_bytes = fixed_bytes
        """Of each of its prompt requests, for admission."""
        self.usage: RequestUsage | None = None
        """What it uses of its API key's limits; None for a request about its prompt only, and without a key."""
        self.num_bytes = self.num_base_bytes = 0
        """What admission counts, besides its prompt requests; and the part without output."""
        self.prompt_requests: list[PromptRequest] = []
        self.sequences: list[SequenceOutput] = []
        """Of all prompts; the position is the choice's index."""
        self.num_open = 0
        """Prompt requests that are not closed."""
        self.num_accepted = 0
        self.num_prompt_logprobs = 0
        """Prompt logprobs in the reply, for the prompts accepted so far."""
        self.has_begun = False
        """A delta has arrived."""
        self.timeout_s = 0.0
        """From `received_s` to its deadline; 0 if it has none."""
        self.has_dropped_output = False
        """It was preempted, and output of it that its client has not got was dropped; see preemption.py."""
        self.failure: ApiError | None = None
        self.is_released = False
        """Its response is over."""
        self._changed = asyncio.Event()
        self._push: Callable[[], bool] | None = None
        """Writes new output while the response's task waits."""

    @property
    def is_finished(self) -> bool:
        return self.num_open == 0

    @property
    def is_accepted(self) -> bool:
        return self.num_accepted == len(self.prompt_requests)

    @property
    def abort_ids(self) -> set[str]:
        """Ids that abort it: the id of its response, and the client's own if there is one."""
        return {self.id} if self.parsed.request_id is None else {self.id, self.parsed.request_id}

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(one.prompt_ids) for one in self.prompt_requests if one.prompt_ids is not None)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache."""
        return sum(one.num_cached for one in self.prompt_requests)

    @property
    def choices(self) -> list[SequenceOutput]:
        """The sequences to return: all of them, or with best_of the n best of each prompt."""
        if not self.parsed.is_best_of:
            return self.sequences
        num_top = self.parsed.options.num_logprobs
        return [one for each in self.prompt_requests for one in best(each.sequences, self.parsed.n, num_top)]

    @property
    def num_output_tokens(self) -> int:
        """All output tokens, including those of sequences that are not returned."""
        return sum(sequence.num_ids for sequence in self.sequences)

    def drop_prompts(self) -> None:
        """All prompts are tokenized: keep their ids only. The grammar is compiled, and its field is all that errors
        name."""
        options = self.parsed.options
        if options.grammar is not None:
            grammar = msgspec.structs.replace(options.grammar, source="")
            options = msgspec.structs.replace(options, grammar=grammar)
        self.parsed = msgspec.structs.replace(self.parsed, prompts=[], options=options)

    def log_output(self, event: str, data: bytes) -> bytes:
        """Record `data`, which is about to be sent to the client. Returns it."""
        self._stage.replay_context.event(event, self.number)
        self._stage.replay_context.log_output(self.number, data)
        return data

    def fail(self, error: ApiError) -> None:
        """End with an error. Later errors are ignored, and so are errors after it has finished."""
        if not self.is_finished:
            self.failure = self.failure or error
            self._changed.set()

    def wake(self) -> None:
        """Wake the response's task. Responses that are not streamed are woken at the end only."""
        if self.parsed.stream or self.is_finished:
            self._changed.set()

    def publish(self) -> None:
        """Write the output that has arrived, or wake the response's task to do so."""
        if self._push is None or self.is_finished or self.failure is not None or not self._push():
            self.wake()

    async def change(self, push: Callable[[], bool] | None = None) -> None:
        """Wait until something has changed since the last call. Raises ApiError if the request has failed. Meanwhile
        `push` is called when output has arrived, which saves a switch to this task. If it returns False, this ends.

        It needs no deadline of its own: each sequence gets a closing message, and the death of a stage or the end of a
        drain fails every request.
        """
        if self.failure is None:
            self._push = push
            try:
                await self._changed.wait()
            finally:
                self._push = None
            self._changed.clear()
        if self.failure is not None:
            raise self.failure

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Raises ApiError as `change`, and if the request has finished without it:
        nothing arrives any more, and no deadline applies to a finished request."""
        while self.failure is not None or not condition():
            if self.is_finished and self.failure is None:
                message = "the request has ended without what its response needs"
                raise ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, message, code="output_lost")
            await self.change()


def _id_of(parsed: ParsedRequest, randbits: Callable[[int], int]) -> str:
    prefix = "tokenize-" if parsed.is_prompt_only else parsed.dialect.id_prefix
    given = parsed.request_id if parsed.dialect.takes_id else None
    return prefix + (given or f"{randbits(64):016x}{randbits(64):016x}")
