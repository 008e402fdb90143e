"""Requests that arrive over ZeroMQ, checked by the rules of HTTP's bodies. Pure."""

from typing import assert_never

import msgspec

from pipeline.client import protocol as p
from pipeline.http_server import request_ids
from pipeline.runtime import messages as m
from pipeline.stages.gateway import errors
from pipeline.stages.gateway.apis.embeddings.parsing import POOLING, EmbeddingsBody, check_dimensions, embedding_request
from pipeline.stages.gateway.apis.openai.reply import CHAT, COMPLETION
from pipeline.stages.gateway.errors import invalid
from pipeline.stages.gateway.parsing import zmq_fields
from pipeline.stages.gateway.parsing.beam_search import check_grammar
from pipeline.stages.gateway.parsing.bodies import ParamsBody, Prediction
from pipeline.stages.gateway.parsing.build import (
    check_model,
    check_num_messages,
    details_of,
    parsed_request_of,
    priority_of,
)
from pipeline.stages.gateway.parsing.conversation import calls_grammar
from pipeline.stages.gateway.parsing.parsed_request import EmbeddingOptions, ParsedRequest, RequestLimits
from pipeline.stages.gateway.parsing.prompt_fields import check_num_ids, check_prompt_bytes, check_truncate, most_ids
from pipeline.stages.gateway.parsing.token_detail_options import check_num_top


def parse_generate(generate: p.Generate, limits: RequestLimits) -> ParsedRequest:
    """Check a request that arrived over ZeroMQ, with the rules and errors of HTTP. Raises ApiError."""
    if generate.pooling is not None:
        return _embedding(generate, limits)
    if generate.dimensions is not None:
        raise invalid("dimensions", "'dimensions' needs 'pooling', which requests an embedding", "invalid_value")
    params = generate.params
    fields = {name: getattr(params, name) for name in p.Params.__struct_fields__}
    fields |= {name: getattr(generate, name) for name in ("priority", "cache_salt", "timeout_s")}
    structured, predicted = fields.pop("structured_outputs"), fields.pop("prediction")
    try:
        body = msgspec.convert({"model": generate.model or limits.model, **fields}, ParamsBody)
    except msgspec.ValidationError as error:
        raise errors.of_validation(error, ParamsBody) from error
    body.structured_outputs = zmq_fields.structured_of(structured)
    body.prediction = Prediction("content", predicted) if predicted else None
    most = most_ids(params.truncate_prompt_tokens, limits.max_prompt_tokens)
    prompt_limits = msgspec.structs.replace(limits, max_prompt_tokens=most)
    parsed = parsed_request_of(
        body,
        1,
        lambda: [_prompt_of(generate.prompt, prompt_limits)],
        params.max_tokens,
        limits,
        CHAT if isinstance(generate.prompt, p.ChatPrompt) else COMPLETION,
        best_of=body.best_of,
        details=details_of(body, _num_top(body, limits), limits),
    )
    if generate.received and parsed.options.use_beam_search:
        message = "'received' is not allowed with use_beam_search: sequences are not streamed then"
        raise invalid("received", message, "invalid_value")
    if generate.received and parsed.num_sequences > parsed.n:
        message = "'received' is not allowed with best_of > n: sequences are not streamed then"
        raise invalid("received", message, "invalid_value")
    if generate.received and len(generate.received) != parsed.n:
        message = f"'received' must have one entry for each of n = {parsed.n} sequences, not {len(generate.received)}"
        raise invalid("received", message, "invalid_value")
    (prompt,) = parsed.prompts
    options = parsed.options
    if isinstance(prompt, m.ChatPrompt):
        grammar = calls_grammar(prompt, limits.formats, options.grammar, limits.caps)
        options = msgspec.structs.replace(options, grammar=grammar)
        check_grammar(options)
    return msgspec.structs.replace(
        parsed,
        stream=True,
        outputs=[_whole_ids(ids, f"received[{i}]") for i, ids in enumerate(generate.received)],
        request_id=request_ids.checked(generate.name, "name"),
        timings=generate.timings,
        options=options,
    )


def _embedding(generate: p.Generate, limits: RequestLimits) -> ParsedRequest:
    """Check a request for an embedding. Raises ApiError."""
    fields = {
        name: getattr(generate, name) for name in ("pooling", "dimensions", "priority", "cache_salt", "timeout_s")
    }
    fields |= {name: getattr(generate.params, name) for name in ("truncate_prompt_tokens", "truncation_side")}
    try:
        body = msgspec.convert({"model": generate.model or limits.model, "input": "", **fields}, EmbeddingsBody)
    except msgspec.ValidationError as error:
        raise errors.of_validation(error, EmbeddingsBody) from error
    model = check_model(body.model, limits)
    if isinstance(generate.prompt, p.ChatPrompt):
        raise invalid("prompt", "'pooling' needs a text or token ids as prompt, not a chat")
    if generate.received:
        raise invalid("received", "'received' is not allowed with 'pooling': there is no output", "invalid_value")
    check_dimensions(body.dimensions, limits)
    truncate = check_truncate(body.truncate_prompt_tokens, limits.max_prompt_tokens)
    most = most_ids(truncate, limits.max_prompt_tokens)
    prompts = [_prompt_of(generate.prompt, msgspec.structs.replace(limits, max_prompt_tokens=most))]
    check_prompt_bytes(prompts, limits.caps.max_prompt_bytes, "prompt")
    return embedding_request(
        model,
        prompts,
        "prompt",
        pooling=POOLING[body.pooling or "last"],
        priority=priority_of(body.priority, limits),
        cache_salt=body.cache_salt or "",
        adapter_id=limits.adapter_id(model),
        prompt_options=m.PromptOptions(truncate=truncate, truncates_right=body.truncation_side == "right"),
        request_id=request_ids.checked(generate.name, "name"),
        timeout_s=body.timeout_s,
        embedding=EmbeddingOptions(dimensions=body.dimensions),
        timings=generate.timings,
    )


def _num_top(body: ParamsBody, limits: RequestLimits) -> int | None:
    """Top logprobs of the reply. `logprob_token_ids` alone request logprobs, as in vLLM's SamplingParams."""
    num_top = 0 if body.logprobs is None and body.logprob_token_ids else body.logprobs
    return check_num_top("logprobs", num_top, limits.caps)


def _prompt_of(prompt: p.Prompt, limits: RequestLimits) -> m.Prompt:
    """Convert a prompt."""
    match prompt:
        case p.TextPrompt(text):
            return m.TextPrompt(text)
        case p.TokensPrompt(ids):
            check_num_ids(len(ids) // 4, "prompt", limits.max_prompt_tokens)
            return m.IdsPrompt(_whole_ids(ids, "prompt"))
        case p.ChatPrompt():
            check_num_messages(sum(map(_num_parts, prompt.messages)), limits)
            return zmq_fields.chat_of(prompt, limits.caps)
        case _:
            assert_never(prompt)


def _num_parts(message: p.ChatMessage) -> int:
    num_texts = len(message.content) if isinstance(message.content, list) else 1
    return max(1, num_texts) + len(message.tool_calls)


def _whole_ids(packed: bytes, param: str) -> bytes:
    if len(packed) % 4:
        raise invalid(param, f"'{param}' must be packed int32: {len(packed)} is not a multiple of 4 bytes")
    return packed
