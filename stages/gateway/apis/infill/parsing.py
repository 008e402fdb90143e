"""Bodies of POST /infill, llama.cpp's route for editors: fill in the text between a prefix and a suffix. Pure."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from pipeline.client.protocol.sampling import (
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
)
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.infill.reply import INFILL
from pipeline.stages.gateway.parsing.bodies import Body, with_unsupported
from pipeline.stages.gateway.parsing.build import check_model, parsed_request_of
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.fill_in import FillInTokens, fill_in_tokens
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits

TEMPERATURE, TOP_P, TOP_K, MIN_P = 0.8, 0.95, 40, 0.05
"""llama.cpp's defaults"""
REPO_NAME, FILE_NAME, SNIPPET = "myproject", "filename", "\n\n--- snippet ---\n\n"
"""llama.cpp's texts around the context"""
MAX_EXTRA = 1024


class InfillExtra(msgspec.Struct):
    """Text of another file."""

    text: str
    filename: str | None = None


class InfillBody(msgspec.Struct, kw_only=True):
    """POST /infill"""

    input_prefix: Annotated[str, Meta(description="Text before the output.")]
    input_suffix: Annotated[str, Meta(description="Text after the output.")]
    input_extra: (
        Annotated[list[InfillExtra], Meta(max_length=MAX_EXTRA, description="Texts of other files.")] | None
    ) = None
    prompt: Annotated[str, Meta(description="Start of the output, which the reply continues.")] | None = None
    model: str | None = None
    stream: bool | None = None
    n_predict: (
        Annotated[
            int, Meta(ge=-1, lt=2**31, description="Maximum number of output tokens. 0, -1: the model's default.")
        ]
        | None
    ) = None
    temperature: Annotated[Temperature, Meta(description="0 is greedy; default 0.8.")] | None = None
    top_k: Annotated[TopK, Meta(description="By default 40; -1 and 0 are off.")] | None = None
    top_p: Annotated[TopP, Meta(description="By default 0.95.")] | None = None
    min_p: Annotated[MinP, Meta(description="By default 0.05.")] | None = None
    seed: Annotated[Seed, Meta(description="-2^63 to 2^64 - 1; -1 is random.")] | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: PresencePenalty | None = None
    frequency_penalty: FrequencyPenalty | None = None


INFILL_UNSUPPORTED_FIELDS: dict[str, tuple[Any, ...]] = {
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "grammar": ("",),
    "json_schema": ({},),
    "logit_bias": ([], {}),
    "lora": ([],),
    "mirostat": (0,),
    "n_probs": (0,),
    "typical_p": (1,),
    "xtc_probability": (0,),
}
"""llama.cpp's fields that are not supported, and the values, besides null, at which they change nothing."""

_decoder = msgspec.json.Decoder(with_unsupported(InfillBody, INFILL_UNSUPPORTED_FIELDS))


def parse_infill(body: bytes, limits: RequestLimits) -> ParsedRequest:
    """Read the body of POST /infill. Raises ApiError."""
    decoded = decode(_decoder, body, INFILL_UNSUPPORTED_FIELDS)
    model = check_model(decoded.model, limits)
    prompt = prompt_of(decoded, fill_in_tokens(limits.formats.added, "input_suffix"))
    fields = Body(
        model=model,
        stream=decoded.stream,
        temperature=TEMPERATURE if decoded.temperature is None else decoded.temperature,
        top_k=TOP_K if decoded.top_k is None else decoded.top_k,
        top_p=TOP_P if decoded.top_p is None else decoded.top_p,
        min_p=MIN_P if decoded.min_p is None else decoded.min_p,
        seed=None if decoded.seed == -1 else decoded.seed,
        stop=decoded.stop,
        repetition_penalty=1.0 if decoded.repeat_penalty is None else decoded.repeat_penalty,
        presence_penalty=decoded.presence_penalty,
        frequency_penalty=decoded.frequency_penalty,
    )
    max_tokens = decoded.n_predict if decoded.n_predict is not None and decoded.n_predict > 0 else None
    parsed = parsed_request_of(
        fields, 1, lambda: [m.TextPrompt(prompt)], max_tokens, limits, INFILL, max_tokens_param="n_predict"
    )
    return msgspec.structs.replace(parsed, prompt_param="input_prefix")


def prompt_of(body: InfillBody, tokens: FillInTokens) -> str:
    """The prompt as in llama.cpp: the texts of other files first, with the model's separators if it has any."""
    parts = [f"{tokens.repo}{REPO_NAME}\n" if tokens.repo else ""]
    for extra in body.input_extra or ():
        parts.append(f"{tokens.file}{extra.filename or 'tmp'}\n" if tokens.file else SNIPPET)
        parts.append(extra.text)
    if tokens.file:
        parts.append(f"{tokens.file}{FILE_NAME}\n")
    return "".join(parts) + tokens.prompt(body.input_prefix, body.input_suffix) + (body.prompt or "")
