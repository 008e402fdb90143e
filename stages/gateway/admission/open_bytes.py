"""What open requests keep in all processes, in bytes. Pure.

    gateway      the request, until ingest has its prompt's ids; then the ids, and the output
    ingest       the prompt, until it has the ids
    schedule     ids of prompt and output, their prefix keys, token outputs
    detokenize   the options, and text that is held back

The sum is an upper bound; tests/stages/gateway/admission/test_open_bytes.py compares it with what the processes' own
structs take. It has no part for what is fixed by settings, such as the rows of schedule and execute, and arenas.
Encoded images are counted apart (media_admission.py).

A prompt is bounded before it is read in, and output as it grows; `most_bytes` is the largest size that a request can
reach, as far as its fields bound it.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from pipeline.runtime import messages as m
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestSize

_encoder = msgspec.json.Encoder()

REQUEST_BYTES = 12 * 1024
"""A prompt request without its prompt, options and sequences: structs of all stages, its task and its response."""
SEQUENCE_BYTES = 6 * 1024
"""A sequence without its ids and output: structs of gateway, schedule and detokenize."""
OPTION_COPIES = 5
"""The options of a prompt request: in the gateway as the client gave them and as ingest has completed them, in schedule
as they are sent on and decoded, and in detokenize, whose sequences share them."""
PROMPT_COPIES = 2
"""A prompt that is not tokenized yet is in the gateway and in ingest, or in a queue between them."""
ID_BYTES = 4
PROMPT_ID_BYTES = 12
"""Of one prompt: gateway and schedule have its ids, and as many are in a message or an arena."""
ID_BYTES_OF_SEQUENCE = 9
"""Each sequence has the prompt's ids in schedule, and a prefix key for each 16 of them."""
OUTPUT_ID_BYTES = 20
"""Gateway and schedule have 4 bytes for each id; prefix keys; the gateway's copy for another attempt."""
CHAR_BYTES = 5
"""A character of output that was not sent: up to 4 as text, and its part of a complete reply's JSON."""
CHARS_PER_ID = 8
"""Characters of text for `most_bytes`; twice what is typical."""
ENTRY_BYTES = 160
"""JSON of one log probability in a complete reply, of a sampled or top token, while the reply is put together."""
EVENT_BYTES = 256
"""An event of a background response, without its text and log probabilities."""
NUM_EVENT_COPIES = 5
"""How often the events of a response repeat its text and log probabilities."""
VECTOR_ENTRY_BYTES = 6
"""JSON of one byte of an embedding's token output: a number has four."""
FIRST_EVENTS = 2
"""A stream of /v1/responses begins with two events that repeat the request's fields, and ends with one."""
ECHO_COPIES = 2
"""What a complete reply repeats of its request is there twice while it is put together and sent."""
BYTES_PER_TOKEN = 4
"""Typical of English text."""
MESSAGE_BYTES = 416
"""A message of a chat, without its texts."""
IMAGE_BYTES = 256
"""An encoded image, without its data and its field."""
IMAGE_TOKENS = 256
"""An estimate of an image's tokens, until ingest has said how many the prompt has."""
VALUE_BYTES = 72
"""An entry of a list: a number, or a text without its characters."""
TEXT_BYTES = 64
"""A text without its characters."""


def text_bytes(text: str | None) -> int:
    """A text in one process. A text that is not ASCII is also kept in UTF-8 once it was encoded."""
    if text is None:
        return 0
    if text.isascii():
        return len(text) + TEXT_BYTES
    return min(3 * sys.getsizeof(text), 8 * len(text) + 2 * TEXT_BYTES)


def prompt_bytes(prompt: m.Prompt) -> int:
    """A prompt in one process."""
    match prompt:
        case m.IdsPrompt(ids):
            return len(ids) + TEXT_BYTES if isinstance(ids, bytes) else TEXT_BYTES
        case m.TextPrompt(text, pair, kwargs):
            return text_bytes(text) + text_bytes(pair) + text_bytes(kwargs or None) + TEXT_BYTES
        case m.ChatPrompt(messages):
            texts = prompt.tools, prompt.tool_name, prompt.documents, prompt.template_kwargs
            return sum(map(text_bytes, texts)) + sum(map(_message_bytes, messages))


def _message_bytes(message: m.ChatMessage) -> int:
    size = MESSAGE_BYTES + text_bytes(message.content)
    if message.name is not None or message.reasoning is not None or message.tool_call_id is not None:
        size += text_bytes(message.name) + text_bytes(message.reasoning) + text_bytes(message.tool_call_id)
    if message.parts:
        size += _texts_bytes(message.parts)
    for call in message.tool_calls:
        size += MESSAGE_BYTES + text_bytes(call.id) + text_bytes(call.name) + text_bytes(call.arguments)
    return size


def _texts_bytes(texts: Iterable[str]) -> int:
    return sum(map(text_bytes, texts)) + VALUE_BYTES


def typical_tokens(prompt: m.Prompt, length: Callable[[str], int]) -> int:
    """An estimate of a prompt's tokens: exact for ids. `length` is `utf8_bytes`."""
    match prompt:
        case m.IdsPrompt(ids):
            return len(ids) // ID_BYTES if isinstance(ids, bytes) else ids.length // ID_BYTES
        case m.TextPrompt(text, pair, kwargs):
            return (length(text) + length(pair or "") + length(kwargs)) // BYTES_PER_TOKEN
        case m.ChatPrompt(messages):
            return sum(length(one.content or "") for one in messages) // BYTES_PER_TOKEN


def images_bytes(images: Iterable[m.EncodedImage]) -> int:
    """Images in one process, as clients send them."""
    return sum(len(one.data) + text_bytes(one.param) + IMAGE_BYTES for one in images)


def utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def options_bytes(options: m.GenerationOptions) -> int:
    """The options in one process, without their fixed part."""
    size = len(options.allowed_ids) + len(options.predicted_ids) + _grammar_bytes(options)
    for text in (options.cache_salt, options.prediction, options.adapter_id):
        if text:
            size += text_bytes(text)
    for texts in (options.bad_words, options.stop):
        if texts:
            size += _texts_bytes(texts) + VALUE_BYTES * len(texts)
    num = len(options.bias_ids) + len(options.bias_values)
    return size + VALUE_BYTES * (num + len(options.stop_token_ids) + len(options.logprob_token_ids))


def _grammar_bytes(options: m.GenerationOptions) -> int:
    size = text_bytes(options.compiled_grammar) if options.compiled_grammar else 0
    return size if options.grammar is None else size + text_bytes(options.grammar.source)


def stop_bytes(stop: Sequence[str]) -> int:
    """The automaton of stop strings in detokenize: a node for each character."""
    return 320 * sum(map(len, stop)) if stop else 0


def reply_bytes(parsed: ParsedRequest) -> int:
    """What a request keeps for its reply, whatever becomes of its prompts."""
    size = text_bytes(parsed.request_id)
    if parsed.echoed:
        size += text_bytes(parsed.echoed) + ECHO_COPIES * parsed.n * json_bytes(parsed.echoed)
    size += sum(map(text_bytes, parsed.left_out))
    if parsed.reply is not None and parsed.reply.tools:
        size += sum(map(text_bytes, parsed.reply.custom))
        size += sum(
            text_bytes(name) + text_bytes(schema) + 2 * VALUE_BYTES for name, schema in parsed.reply.tools.items()
        )
    return size + parsed.dialect.reply_bytes(stream=parsed.stream)


def echo_bytes(texts: Sequence[str]) -> int:
    """What a complete reply repeats of its request's texts, and they themselves."""
    return sum(map(text_bytes, texts)) + ECHO_COPIES * json_bytes(texts)


def json_bytes(value: object) -> int:
    """A value in a reply. Characters that JSON escapes take up to six times their size."""
    return len(_encoder.encode(value))


def measured(parsed: ParsedRequest) -> ParsedRequest:
    """The request with its size. The time for that grows with everything that the client sent: call it where the body
    is parsed."""
    return msgspec.structs.replace(parsed, size=measure(parsed))


def measure(parsed: ParsedRequest) -> RequestSize:
    """The size of a request, as `measured` adds it."""
    sizes = [prompt_bytes(one) for one in parsed.prompts]
    # A query is in the prompt of each of a thousand documents.
    length = functools.cache(utf8_bytes) if len(sizes) > 1 else utf8_bytes
    num_tokens = [typical_tokens(one, length) for one in parsed.prompts]
    if parsed.images:
        num_tokens[0] += IMAGE_TOKENS * len(parsed.images)
    return RequestSize(reply_bytes(parsed), sizes, num_tokens)


def size_of(parsed: ParsedRequest) -> RequestSize:
    """The size of a measured request."""
    assert parsed.size is not None, "it was not measured"
    return parsed.size


def fixed_bytes(options: m.GenerationOptions) -> int:
    """A prompt request without its prompt, output and grammar. All prompts of a request have the same options: compute
    it once for them."""
    size = REQUEST_BYTES + SEQUENCE_BYTES * options.n + stop_bytes(options.stop)
    return size + OPTION_COPIES * (options_bytes(options) - _grammar_bytes(options))


def submitted_bytes(parsed: ParsedRequest, fixed: int) -> list[int]:
    """Each prompt request of a measured request, as long as ingest has not answered. `fixed` is `fixed_bytes`."""
    fixed += OPTION_COPIES * _grammar_bytes(parsed.options) + 6 * sum(map(len, parsed.outputs))
    return [fixed + PROMPT_COPIES * size for size in size_of(parsed).prompts]


def accepted_bytes(submit: m.Submit, accepted: m.Accepted, fixed: int) -> int:
    """A prompt request whose prompt's ids are known, without output. `submit` is what is submitted again, and `fixed`
    is `fixed_bytes`."""
    options, size = submit.options, fixed + OPTION_COPIES * _grammar_bytes(submit.options)
    if isinstance(submit.prompt, m.IdsPrompt):
        size += prompt_bytes(submit.prompt) // ID_BYTES * (PROMPT_ID_BYTES + ID_BYTES_OF_SEQUENCE * options.n)
    else:
        size += prompt_bytes(submit.prompt)
    if accepted.text is not None:
        size += (2 + CHAR_BYTES * options.n) * text_bytes(accepted.text)
    for each in (accepted.token_strs, accepted.pieces):
        if each is not None:
            size += 2 * VALUE_BYTES * len(each)
    return size


class Output(Protocol):
    """What a sequence has in the gateway."""

    pending: list[str]
    special_spans: bytearray
    ids: bytearray
    token_outputs: bytearray


class OutputCost(msgspec.Struct, frozen=True):
    """What the output of one kind of request takes."""

    id_bytes: int
    """An output id: its copies, and its token output in schedule."""
    token_output_bytes: float
    """A byte of a token output that is in the gateway: the token output, a reference to the text of each of its ids,
    and its part of a complete reply."""
    prompt_logprob_bytes: float
    """A byte of a prompt's token output: in schedule, in the gateway, and in a complete reply."""
    most_id_bytes: float
    """The most that an output id can take, as far as it is known before."""


TOKEN_OUTPUT_COPIES = 2.5
"""A byte of a token output in the gateway, with half of a reference to a text."""
PLAIN = OutputCost(OUTPUT_ID_BYTES, TOKEN_OUTPUT_COPIES, 1 + TOKEN_OUTPUT_COPIES, OUTPUT_ID_BYTES)
"""Of a stream without log probabilities."""
KEPT = msgspec.structs.replace(PLAIN, most_id_bytes=OUTPUT_ID_BYTES + CHAR_BYTES * CHARS_PER_ID)
"""Of a reply that is sent as a whole, without log probabilities."""


def output_cost(parsed: ParsedRequest, hidden_size: int | None) -> OutputCost:
    """The cost of a request's output. A complete reply, or the best of several sequences, is kept until its end."""
    options = parsed.options
    is_kept = keeps_output(parsed)
    width, prompt_width = token_output_bytes(options, hidden_size or 0), prompt_logprob_bytes(options)
    if is_kept and not width and not prompt_width:
        return KEPT
    if not width and not prompt_width and not parsed.dialect.ends_with_output:
        return PLAIN
    id_bytes, reply, prompt_reply = OUTPUT_ID_BYTES + width, 0.0, 0.0
    num_entries = 0 if parsed.details.num_top is None else 1 + options.num_logprobs + bool(options.logprob_token_ids)
    if is_kept and options.pooling:
        reply = VECTOR_ENTRY_BYTES
    elif is_kept and width:
        reply = ENTRY_BYTES * num_entries / width
    if prompt_width and (is_kept or parsed.echo):
        repeats = parsed.n if parsed.dialect.repeats_prompt_logprobs else 1
        prompt_reply = ENTRY_BYTES * (1 + options.num_prompt_logprobs) / prompt_width * repeats
    per_byte, text = TOKEN_OUTPUT_COPIES + reply, CHAR_BYTES * CHARS_PER_ID
    most = id_bytes + (per_byte * width + text if is_kept else 0)
    if parsed.dialect.ends_with_output and not is_kept:
        id_bytes += text + ENTRY_BYTES * num_entries
        most = id_bytes
        if parsed.dialect.keeps_events:
            most += EVENT_BYTES + NUM_EVENT_COPIES * (text + ENTRY_BYTES * num_entries)
    return OutputCost(id_bytes, per_byte, 1 + TOKEN_OUTPUT_COPIES + prompt_reply, most)


def keeps_output(parsed: ParsedRequest) -> bool:
    """Whether its output stays in the gateway until all of it is there."""
    return not parsed.stream or parsed.is_best_of


def output_bytes(cost: OutputCost, sequence: "Output") -> int:
    """The output of a sequence: its ids, and the text and token outputs that were not released yet. Called for each
    delta."""
    size = cost.id_bytes * (len(sequence.ids) // ID_BYTES)
    if sequence.pending:
        size += CHAR_BYTES * sum(map(len, sequence.pending)) + len(sequence.special_spans)
    return size + int(cost.token_output_bytes * len(sequence.token_outputs)) if sequence.token_outputs else size


def most_bytes(parsed: ParsedRequest, hidden_size: int | None, max_model_len: int | None = None) -> tuple[int, float]:
    """The size of a measured request without output, and what one more output id of each of its sequences adds at
    most."""
    size = size_of(parsed).reply_bytes + sum(submitted_bytes(parsed, fixed_bytes(parsed.options)))
    num = len(parsed.prompts) * parsed.num_sequences
    if parsed.options.pooling == m.Pooling.ALL:  # the one id of a prompt has a result for each of its tokens
        num = sum(_most_tokens(parsed, index, max_model_len) for index in range(len(parsed.prompts)))
    return size, num * output_cost(parsed, hidden_size).most_id_bytes


def pooled_bytes(parsed: ParsedRequest, hidden_size: int | None, max_model_len: int | None) -> list[int]:
    """What the result of each prompt of a measured request will take; 0 if it is not pooled. It comes all at once, so
    it is counted before."""
    if not parsed.options.pooling:
        return [0] * len(parsed.prompts)
    id_bytes = output_cost(parsed, hidden_size).most_id_bytes
    if parsed.options.pooling != m.Pooling.ALL:
        return [int(id_bytes)] * len(parsed.prompts)
    return [int(id_bytes * _most_tokens(parsed, index, max_model_len)) for index in range(len(parsed.prompts))]


def _most_tokens(parsed: ParsedRequest, index: int, max_model_len: int | None) -> int:
    """The most tokens that a prompt can have. A token has at least a byte of a text."""
    sized = size_of(parsed)
    is_ids = isinstance(parsed.prompts[index], m.IdsPrompt)
    most = sized.num_tokens[index] if is_ids else sized.prompts[index]
    most = most if max_model_len is None else min(most, max_model_len)
    truncate = parsed.prompt_options.truncate
    return min(most, truncate) if truncate > 0 else most


def bounded(parsed: ParsedRequest, max_bytes: int, hidden_size: int | None, max_model_len: int | None) -> ParsedRequest:
    """The measured request, if it fits into `max_bytes` when nothing else is open. A default `max_tokens` is lowered
    for that. Raises ApiError, 400."""
    size, id_bytes = most_bytes(parsed, hidden_size, max_model_len)
    max_tokens = parsed.options.max_tokens
    if max_tokens is None:
        if max_model_len is None or size + id_bytes * max_model_len <= max_bytes:
            return parsed
        if (num_ids := int((max_bytes - size) / id_bytes)) > 0:
            options = msgspec.structs.replace(parsed.options, max_tokens=max(num_ids, parsed.options.min_tokens))
            prompt_options = msgspec.structs.replace(parsed.prompt_options, lowers_max_tokens=True)
            return msgspec.structs.replace(parsed, options=options, prompt_options=prompt_options)
        max_tokens = 1
    if parsed.options.pooling:
        max_tokens = 1
    elif max_model_len is not None:
        max_tokens = min(max_tokens, max_model_len)  # ingest lowers or refuses more
    if size + id_bytes * max_tokens > max_bytes:
        raise _too_much(parsed, size, int(size + id_bytes * max_tokens), max_bytes)
    return parsed


def _too_much(parsed: ParsedRequest, size: int, num_bytes: int, max_bytes: int) -> ApiError:
    """400 for a request that can't fit. It names what makes it large."""
    fields = []
    dialect = parsed.dialect
    prompt_param = dialect.prompt_field if parsed.prompt_param == "prompt" else parsed.prompt_param
    if size > max_bytes // 2:
        fields.append(prompt_param)
        fields += ["tools"] if dialect.has_tools else []
    if len(parsed.prompts) > 1:
        fields.append(f"the number of prompts in {prompt_param}")
    if num_bytes > size:
        fields += ["n"] if parsed.num_sequences > 1 else []
        if not parsed.is_pooled:
            fields.append(parsed.max_tokens_param)
        elif not fields:
            fields.append(prompt_param)
        fields += [dialect.logprobs_field] if parsed.details.num_top else []
    param = fields[0] if size > max_bytes // 2 else parsed.max_tokens_param
    message = (
        f"this request may keep {num_bytes} bytes in memory with all of its output, and the limit is {max_bytes}, "
        f"three quarters of gateway.max_open_bytes: lower {', '.join(dict.fromkeys(fields))}"
    )
    return invalid(param, message, "request_too_large")
