"""Bodies of POST /inference/v1/generate: token ids in, token ids out, in the shape of vLLM's route. Pure."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.client.protocol.generation import GenerationFields
from pipeline.client.protocol.request import CacheSalt, MaxTokens, NumLogprobs, Priority, Timeout
from pipeline.client.protocol.sampling import Id
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.tokens.reply import TOKENS
from pipeline.stages.gateway.errors import ApiError, invalid, unsupported
from pipeline.stages.gateway.parsing.bodies import Body, StreamOptions, has_no_effect, with_unsupported
from pipeline.stages.gateway.parsing.build import default_completion_tokens, details_of, parsed_request_of
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.prompt_fields import check_num_ids, packed
from pipeline.stages.gateway.parsing.token_detail_options import check_num_top


class GenerateSamplingParams(GenerationFields, kw_only=True, omit_defaults=True):
    """Sampling parameters."""

    max_tokens: Annotated[MaxTokens, Meta(description="By default 16.")] | None = None
    logprobs: NumLogprobs | None = None
    detokenize: Annotated[bool, Meta(description="No effect: the reply has no text.")] | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate"""

    token_ids: Annotated[list[Id], Meta(min_length=1, description="The prompt.")]
    sampling_params: GenerateSamplingParams
    model: Annotated[str, Meta(description="The served model by default.")] | None = None
    request_id: Annotated[str, Meta(description="The client's own id of the request; the reply repeats it.")] | None = (
        None
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: CacheSalt | None = None
    priority: Priority | None = None
    timeout_s: Timeout | None = None
    """Ours"""


GENERATE_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "ec_transfer_params": ({},),
    "features": (),
    "kv_transfer_params": ({},),
}
PARAMS_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "extra_args": ({},),
    "logits_processors": ([],),
    "repetition_detection": (),
    "watermarking": (False,),
}


_Body: type[GenerateBody] = msgspec.defstruct(  # type: ignore[assignment]
    "GenerateBody",
    [("sampling_params", with_unsupported(GenerateSamplingParams, PARAMS_UNSUPPORTED_FIELDS))],
    bases=(GenerateBody,),
    kw_only=True,
)
_decoder = msgspec.json.Decoder(with_unsupported(_Body, GENERATE_UNSUPPORTED_FIELDS))


def parse_tokens_only(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /inference/v1/generate. Raises ApiError."""
    decoded = decode(_decoder, body, GENERATE_UNSUPPORTED_FIELDS)
    params = decoded.sampling_params
    for name, values in PARAMS_UNSUPPORTED_FIELDS.items():
        if not has_no_effect(getattr(params, name), values):
            raise unsupported(f"sampling_params.{name}")
    try:
        parsed = _ask(decoded, limits)
    except ApiError as error:
        raise _in_params(error) from error
    options = parsed.options
    if (grammar := options.grammar) is not None:
        grammar = msgspec.structs.replace(grammar, param=f"sampling_params.{grammar.param}")
        options = msgspec.structs.replace(options, grammar=grammar)
    return msgspec.structs.replace(parsed, options=options, prompt_param="token_ids")


def _ask(decoded: GenerateBody, limits: RequestLimits) -> ParsedRequest:
    params = decoded.sampling_params
    body = Body(
        **{name: getattr(params, name) for name in GenerationFields.__struct_fields__},
        model=decoded.model or limits.model,
        max_tokens=params.max_tokens,
        stream=decoded.stream,
        stream_options=decoded.stream_options,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
        request_id=decoded.request_id,
        priority=decoded.priority,
        cache_salt=decoded.cache_salt,
        timeout_s=decoded.timeout_s,
    )
    num_top = 0 if params.logprobs is None and params.logprob_token_ids else params.logprobs
    num_top = check_num_top("logprobs", num_top, limits.caps)

    def prompts() -> list[m.Prompt]:
        check_num_ids(len(decoded.token_ids), "token_ids", limits.max_prompt_tokens)
        return [m.IdsPrompt(packed(decoded.token_ids))]

    return parsed_request_of(
        body,
        1,
        prompts,
        default_completion_tokens(limits) if params.max_tokens is None else params.max_tokens,
        limits,
        TOKENS,
        max_tokens_param="sampling_params.max_tokens",
        details=details_of(body, num_top, limits),
        with_pieces=False,
    )


def _in_params(error: ApiError) -> ApiError:
    """Prefix the param of an error with `sampling_params`, if it is one of its fields."""
    param = error.param or ""
    if param.split(".")[0].split("[")[0] not in GenerateSamplingParams.__struct_fields__:
        return error
    message = error.message.replace(f"'{param}'", f"'sampling_params.{param}'", 1)
    return invalid(f"sampling_params.{param}", message, error.code)
