"""One prompt of a client's request, and its sequences: what the stages have sent of each."""

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import logprob_bytes
from pipeline.stages.gateway.admission.open_bytes import output_bytes
from pipeline.text import special_spans

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.request import Request

ID_BYTES = 4


class SequenceOutput(msgspec.Struct, eq=False):
    """One sample of a prompt: what the stages have sent, and which text the client has not been given yet."""

    pending: list[str] = []
    """Text that has arrived and was not taken yet, in a few pieces."""
    num_chars: int = 0
    """Characters of text that have arrived."""
    ids: bytearray = msgspec.field(default_factory=bytearray)
    """int32: all output ids that have arrived."""
    token_outputs: bytearray = msgspec.field(default_factory=bytearray)
    """Token outputs of `ids`, if the request asks for them; see pipeline/runtime/token_outputs.py."""
    pieces: list[bytes] = []
    """For each token output: the bytes of its id, then those of its likeliest ids."""
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
        token_outputs: bytes = b"",
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
        if token_outputs:
            num_ids = len(ids) // ID_BYTES
            self.token_outputs += token_outputs[num_known * (len(token_outputs) // num_ids) :]
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
    media_bytes: int = 0
    """Bytes that admission counts for its images."""
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
    prompt_logprobs: bytearray = msgspec.field(default_factory=bytearray)
    """Logprobs of the prompt ids from the second on, if the request asks for them."""
    prompt_pieces: list[bytes] = []
    """For each of these token outputs: the bytes of its likeliest ids."""
    tail: str | None = None
    """As in `Accepted`, for the reply parser. It stays the same if the request is submitted again."""
    began_s: float = 0.0
    """As in `Accepted`, like `done_s`."""
    done_s: float = 0.0

    @property
    def id(self) -> int:
        return self.submit.request_id

    @property
    def name(self) -> str:
        """In log lines."""
        return f"{self.id:x}"

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
    def num_known_prompt_logprobs(self) -> int:
        return len(self.prompt_logprobs) // logprob_bytes(max(0, self.submit.options.num_prompt_logprobs))

    @property
    def has_all_prompt_logprobs(self) -> bool:
        """Whether all prompt logprobs that are expected have arrived."""
        if self.submit.options.num_prompt_logprobs < 0 or self.is_finished:
            return True
        return self.prompt_ids is not None and self.num_known_prompt_logprobs >= len(self.prompt_ids) - 1

    def extend_prompt_logprobs(self, offset: int, logprobs: bytes, pieces: list[bytes]) -> None:
        """Append prompt logprobs, the first of which has index `offset`. Token outputs that have arrived before are
        skipped."""
        num_known = self.num_known_prompt_logprobs - offset
        assert num_known >= 0, "prompt logprobs are missing"
        num_top = self.submit.options.num_prompt_logprobs
        self.prompt_logprobs += logprobs[num_known * logprob_bytes(num_top) :]
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
        """The part of `num_bytes` that its output has, with the logprobs of its prompt."""
        token_outputs = int(self.request.output_cost.prompt_logprob_bytes * len(self.prompt_logprobs))
        return token_outputs + sum(sequence.num_bytes for sequence in self.sequences)

    def drop_output(self) -> None:
        """The output is not read any more. What schedule has of it still counts."""
        self.prompt_logprobs.clear()
        self.prompt_pieces = []
        for sequence in self.sequences:
            sequence.pending.clear()
            sequence.special_spans.clear()
            sequence.token_outputs.clear()
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


def log_fields(prompt_request: PromptRequest, **fields: Any) -> dict[str, Any]:
    """The `extra` of a log line about it."""
    return {"fields": {"request": prompt_request.name, **fields}}


def next_attempt(prompt_request: PromptRequest) -> m.Submit:
    """The request as it is submitted again: with the output that its client has, or will get."""
    submit = prompt_request.submit
    outputs: list[m.Array] = [bytes(sequence.ids) for sequence in prompt_request.sequences]
    return msgspec.structs.replace(
        submit,
        attempt=submit.attempt + 1,
        outputs=outputs if any(outputs) else list(submit.outputs),
    )
