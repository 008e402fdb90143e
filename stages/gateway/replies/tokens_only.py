"""POST /inference/v1/generate: ids in, ids out, in the shapes of vLLM's route of this name.

Tokens are named by their ids in log probabilities too, as `token_id:123`: nothing of the reply is text. Stop strings
work all the same.
"""

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from pipeline.client.protocol import MAX_SALT_CHARS, MAX_TIMEOUT_S
from pipeline.runtime import messages as m
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import Body, MaxTokens, StreamOptions, is_neutral, with_unsupported
from pipeline.stages.gateway.parsing.parse import DEFAULT_COMPLETION_TOKENS, Ask, Limits, ask_of, decode, details_of
from pipeline.stages.gateway.parsing.prompt_fields import check_num_ids, packed
from pipeline.stages.gateway.parsing.sampling_fields import Id, SamplingFields
from pipeline.stages.gateway.parsing.token_detail_options import check_num_top
from pipeline.stages.gateway.replies.logprobs import ChatLogprobs
from pipeline.stages.gateway.replies.responses import (
    DONE,
    MAX_TOLD_AT_ONCE,
    finish_reason,
    framed,
    usage_of,
    usage_so_far,
)
from pipeline.stages.gateway.replies.token_details import IdTeller, prompt_logprobs
from pipeline.stages.gateway.replies.types import FinishReason, PromptLogprobs, Usage
from pipeline.stages.gateway.requests import Call


class SamplingParams(SamplingFields, kw_only=True, omit_defaults=True):
    """How the ids are drawn."""

    max_tokens: Annotated[MaxTokens, Meta(description="By default 16.")] | None = None
    logprobs: (
        Annotated[int, Meta(ge=0, description="Log probabilities of the ids, and of so many of the likeliest.")] | None
    ) = None
    detokenize: Annotated[bool, Meta(description="Changes nothing: the reply has no text.")] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate"""

    token_ids: Annotated[list[Id], Meta(min_length=1, description="The prompt.")]
    sampling_params: SamplingParams
    model: Annotated[str, Meta(description="By default the one that is served.")] | None = None
    request_id: Annotated[str, Meta(description="The client's own name for it, which the reply repeats.")] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31, description="Lower goes first.")] | None = None
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S, description="From its arrival to its end.")] | None = None
    """Ours"""


GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": ({},),
    "features": (),
    "kv_transfer_params": ({},),
}
PARAMS_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "extra_args": ({},),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "watermarking": (False,),
}


class GenerateChoice(msgspec.Struct):
    index: int
    logprobs: Annotated[ChatLogprobs, Meta(description="Tokens are called token_id:123.")] | None
    finish_reason: FinishReason | None
    token_ids: list[int]


class GenerateReply(msgspec.Struct):
    """POST /inference/v1/generate"""

    request_id: str
    choices: list[GenerateChoice]
    prompt_logprobs: PromptLogprobs | None
    kv_transfer_params: None
    usage: Usage


class GenerateChunk(msgspec.Struct):
    """An event of its stream."""

    request_id: str
    choices: list[GenerateChoice]
    usage: Usage | UnsetType = UNSET


_Body: type[GenerateBody] = msgspec.defstruct(  # type: ignore[assignment]
    "GenerateBody",
    [("sampling_params", with_unsupported(SamplingParams, PARAMS_NEUTRAL))],
    bases=(GenerateBody,),
    kw_only=True,
)
_decoder = msgspec.json.Decoder(with_unsupported(_Body, GENERATE_NEUTRAL))
_encoder = msgspec.json.Encoder()


def parse_tokens_only(body: bytes, limits: Limits) -> Ask:
    """Read the body of POST /inference/v1/generate. Raises ApiError."""
    asked = decode(_decoder, body, GENERATE_NEUTRAL)
    params = asked.sampling_params
    for name, values in PARAMS_NEUTRAL.items():
        if (value := getattr(params, name)) is not None and not is_neutral(value, values):
            raise unsupported(f"sampling_params.{name}")
    try:
        ask = _ask(asked, limits)
    except ApiError as error:
        raise _in_params(error) from error
    grammar = ask.grammar
    if grammar is not None:
        grammar = msgspec.structs.replace(grammar, param=f"sampling_params.{grammar.param}")
    return msgspec.structs.replace(ask, is_tokens_only=True, grammar=grammar, prompt_param="token_ids")


def _ask(asked: GenerateBody, limits: Limits) -> Ask:
    params = asked.sampling_params
    body = Body(
        **{name: getattr(params, name) for name in SamplingFields.__struct_fields__},
        model=asked.model or limits.model,
        max_tokens=params.max_tokens,
        stream=asked.stream,
        stream_options=asked.stream_options,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        request_id=asked.request_id,
        priority=asked.priority,
        cache_salt=asked.cache_salt,
        timeout_s=asked.timeout_s,
    )
    num_top = check_num_top("logprobs", params.logprobs, limits.caps)

    def prompts() -> list[m.Prompt]:
        check_num_ids(len(asked.token_ids), "token_ids", limits.max_prompt_tokens)
        return [m.IdsPrompt(packed(asked.token_ids))]

    return ask_of(
        body,
        1,
        prompts,
        DEFAULT_COMPLETION_TOKENS if params.max_tokens is None else params.max_tokens,
        limits,
        is_chat=False,
        max_tokens_param="sampling_params.max_tokens",
        details=details_of(body, num_top, limits),
        with_pieces=False,
    )


def _in_params(error: ApiError) -> ApiError:
    """An error of a field that stands in `sampling_params` here."""
    param = error.param or ""
    if param.split(".")[0].split("[")[0] not in SamplingParams.__struct_fields__:
        return error
    message = error.message.replace(f"'{param}'", f"'sampling_params.{param}'", 1)
    return invalid(f"sampling_params.{param}", message, error.code)


def generated(call: Call) -> bytes:
    """The body of a response that is not streamed. The call has finished."""
    (request,) = call.requests
    choices = []
    for i, sequence in enumerate(call.choices):
        told = IdTeller(call, request, sequence).take("")
        ids = [] if isinstance(told.token_ids, UnsetType) else told.token_ids
        choices.append(GenerateChoice(i, told.chat_logprobs, finish_reason(sequence), ids))
    of_prompt = prompt_logprobs(request)
    reply = GenerateReply(
        _name(call), choices, None if isinstance(of_prompt, UnsetType) else of_prompt, None, usage_of(call)
    )
    return _encoder.encode(reply)


def _name(call: Call) -> str:
    return call.ask.request_id or call.id


class GenerateEvents:
    """The events of one streamed response, as `responses.Events` has those of text: ids as they come, the end with the
    last of them; then usage if it was asked for, then [DONE]."""

    def __init__(self, call: Call) -> None:
        self._call = call
        (self._request,) = call.requests
        self._unfinished = dict(enumerate(call.sequences))
        self._tellers = [IdTeller(call, self._request, sequence) for sequence in call.sequences]
        self.has_more = False
        """As there"""

    @property
    def are_over(self) -> bool:
        return not self._unfinished and self._call.is_finished and self._call.failure is None

    def first(self) -> bytes:
        return b""

    def due(self) -> bytes:
        return self._call.told("due", b"".join(self._due()))

    def _due(self) -> Iterator[bytes]:
        num_told = 0
        self.has_more = False
        for i, sequence in list(self._unfinished.items()):
            if num_told > MAX_TOLD_AT_ONCE:
                self.has_more = True
                break
            num_told += self._tellers[i].num_untold
            sequence.take_text()  # which nobody reads
            is_over = sequence.finish not in (m.Finish.NONE, m.Finish.ERROR)
            told = self._tellers[i].take("")
            ids = [] if isinstance(told.token_ids, UnsetType) else told.token_ids
            if not ids and not is_over:
                continue
            reason = finish_reason(sequence) if is_over else None
            chunk = GenerateChunk(_name(self._call), [GenerateChoice(i, told.chat_logprobs, reason, ids)])
            if self._call.ask.continuous_usage:
                chunk.usage = usage_so_far(self._request, sequence)
            if is_over:
                del self._unfinished[i]
            yield framed(_encoder.encode(chunk))

    def last(self) -> bytes:
        if not self._call.ask.include_usage:
            return self._call.told("last", DONE)
        chunk = GenerateChunk(_name(self._call), [], usage_of(self._call))
        return self._call.told("last", framed(_encoder.encode(chunk)) + DONE)
