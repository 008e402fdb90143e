"""Prompts, parameters and outputs, converted to and from the messages of pipeline.client.protocol."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from pipeline.client import protocol as p
from pipeline.client.errors import RequestError
from pipeline.client.inputs.chat import reasoning_of, tool_calls_of, unknown_keys
from pipeline.client.inputs.images import image_part
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.logprobs import Logprob, logprobs_of
from pipeline.runtime.model.generation_config import GenerationDefaults

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text, token ids, or the messages of a chat: mappings with role, content and optionally name, tool_calls,
tool_call_id and reasoning; or fields of the protocol's `Request`."""
Received = Sequence[int] | Sequence[Sequence[int]] | None
"""Output ids that the caller has already: of the only sequence, or of each of n."""

_OWN_FORM = ("logit_bias", "structured_outputs", "prediction")
"""Parameters that a `Request` has in another form."""
_EXPLICIT = {*GenerationDefaults.__struct_fields__, "max_tokens"}
"""Parameters that are always sent: the server's default may be another one."""
_DEFAULTS = {
    name: None if name in _EXPLICIT else value
    for name, value in msgspec.structs.asdict(SamplingParams()).items()
    if name not in _OWN_FORM
}
"""The others, and the values that are not sent."""


class OutputDelta(msgspec.Struct, frozen=True):
    """New text and ids of one sequence."""

    index: int
    """Index of the sequence among the request's n."""
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """stop, length or abort with the sequence's last output, else None"""
    stop_reason: str | int | None = None
    """The stop string, or the id of stop_token_ids, that ended it."""
    text_offset: int = 0
    """Characters of the sequence's text before this one, those of a resumed request's `received` included."""
    token_offset: int = 0
    """Output ids of the sequence before these, `received` included."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each of `token_ids` its own and the likeliest alternatives; None if the request did not ask for them."""


def packed(ids: Sequence[int]) -> bytes:
    """Pack ids for the wire. Raises TypeError or ValueError for an invalid id."""
    try:
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        if all(isinstance(one, int) for one in ids):
            raise ValueError(f"token ids must be from 0 to 2147483647: {error}") from None
        raise TypeError("token ids must be integers") from None


def unpacked(data: bytes) -> list[int]:
    """The ids of a packed array. Trailing bytes of an incomplete id are ignored."""
    return list(struct.unpack_from(f"<{len(data) // 4}i", data))


def output_of(output: p.Output, num_top: int | None, *, is_ranked: bool = True) -> OutputDelta:
    ids = unpacked(output.token_ids)
    return OutputDelta(
        output.index,
        output.text,
        ids,
        output.finish_reason,
        output.stop_reason,
        output.text_offset,
        output.token_offset,
        None if num_top is None else logprobs_of(ids, output.records, output.pieces, num_top, is_ranked=is_ranked),
    )


def error_of(failure: p.Failure) -> RequestError:
    return RequestError(failure.status, failure.message, failure.param, failure.code, failure.retry_after_s)


def prompt_fields(prompt: Any) -> Mapping[str, Any]:
    """The fields of a `Request` for a prompt. Raises TypeError or ValueError."""
    if isinstance(prompt, Mapping):
        return prompt
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Sequence) and hasattr(prompt, "tolist"):
        prompt = prompt.tolist()  # a numpy array
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise TypeError(f"a prompt is a text, token ids or chat messages, not {type(prompt).__name__}")
    if len(prompt) == 0:
        raise ValueError("the prompt is empty")
    if all(isinstance(one, Mapping) for one in prompt):
        return {"messages": [_message(i, one) for i, one in enumerate(prompt)]}
    return {"prompt_token_ids": packed(prompt)}


def _message(index: int, message: Mapping[str, Any]) -> p.MessageParam:
    at, content, calls = f"messages[{index}]", message.get("content"), message.get("tool_calls")
    if unknown := unknown_keys(message):
        raise TypeError(f"{at} has keys that are not supported: {', '.join(unknown)}")
    fields = {name: message.get(name) for name in ("role", "name", "tool_call_id")}
    fields["reasoning"] = reasoning_of(message)
    for name in fields:
        if not isinstance(fields[name], str) and (name == "role" or fields[name] is not None):
            raise TypeError(f"{at}.{name} must be a string, not {type(fields[name]).__name__}")
    if isinstance(content, (list, tuple)):
        content = [_part(part, f"{at}.content[{j}]") for j, part in enumerate(content)]
    elif not isinstance(content, str) and (content is not None or fields["role"] != "assistant"):
        raise TypeError(f"{at}.content must be a string, not {type(content).__name__}")
    return p.MessageParam(content=content, tool_calls=tool_calls_of(calls, f"{at}.tool_calls"), **fields)  # type: ignore[arg-type]


def _part(part: Any, at: str) -> p.ContentPart:
    match part:
        case str(text) | {"type": "text", "text": str(text)}:
            return p.ContentPart("text", text)
        case {"type": "image_url" | "image_pil"}:
            return image_part(part, at)
    raise TypeError(f'{at} must be a string or {{"type": "text", "text": "…"}}')


def params_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields of a `Request` for parameters."""
    given = {name: value for name, default in _DEFAULTS.items() if (value := getattr(params, name)) != default}
    if params.logit_bias:
        given["logit_bias"] = {str(token_id): value for token_id, value in params.logit_bias.items()}
    if params.structured_outputs is not None:
        given["structured_outputs"] = params.structured_outputs.on_the_wire()
    if params.prediction:
        given["prediction"] = p.Prediction("content", params.prediction)
    return given


def pooling_fields(params: PoolingParams) -> dict[str, Any]:
    """The fields of a `Request` for what the model's pooler makes."""
    names = ("pooling", "dimensions", "truncate_prompt_tokens", "truncation_side", "prompt_name", "instruction")
    activates = params.normalize if params.use_activation is None else params.use_activation
    return {name: getattr(params, name) for name in names} | {"task": params.task, "use_activation": activates}


def default_params(defaults: Mapping[str, int | float]) -> SamplingParams:
    """The parameters of a request without any. Raises TypeError or ValueError."""
    given: dict[str, Any] = {name: value for name, value in defaults.items() if name in _DEFAULTS}
    # The server shortens its own maximum to what fits the context, but not one that a request gives.
    return SamplingParams(**given | ({"max_tokens": None} if "max_tokens" in given else {}))


def received_message(received: Any, n: int) -> list[bytes]:
    if received is None:
        return []
    each = [received] if n == 1 and not (received and isinstance(received[0], Sequence)) else received
    if len(each) != n:
        raise ValueError(f"received must hold the ids of each of n = {n} sequences, not of {len(each)}")
    return [packed(ids) for ids in each]
