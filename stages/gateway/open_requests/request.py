"""A client's request: the state that a gateway keeps of it until its response is over.

    Request ──one for each prompt──► PromptRequest ──n, or best_of──► SequenceOutput      (prompt_request.py)

RequestTable creates and releases them, ResultHandler updates them, and the code that writes the response reads them.
"""

import asyncio
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admission.open_bytes import PLAIN, OutputCost
from pipeline.stages.gateway.admission.usage import RequestUsage
from pipeline.stages.gateway.apis.responses.types import ResponseObject
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.replies.best_of import best
from pipeline.text.formats.chat_formats import ChatFormats


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
        self.is_chat = any(isinstance(prompt, m.ChatPrompt) for prompt in parsed.prompts)
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
        """What it uses of its API key's limits; None for a lookup, and without a key."""
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

    def release(self) -> None:
        """Its response is over. It has references to itself, so it stays until a garbage collection; its images go."""
        self.is_released = True
        if self.parsed.images:
            self.parsed = msgspec.structs.replace(self.parsed, images=[])

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

    @property
    def num_generated(self) -> int:
        """Output tokens of this request, and not of one that it continues. The id of a pooled prompt is none."""
        return 0 if self.parsed.is_pooled else sum(one.num_generated for one in self.sequences)

    def drop_prompts(self) -> None:
        """All prompts are tokenized: keep their ids only. The grammar is compiled, and its field is all that errors
        name."""
        options = self.parsed.options
        if options.grammar is not None:
            grammar = msgspec.structs.replace(options.grammar, source="")
            options = msgspec.structs.replace(options, grammar=grammar)
        self.parsed = msgspec.structs.replace(self.parsed, prompts=[], images=[], options=options)

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
