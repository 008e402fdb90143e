"""What responses and the items of conversations take in memory, in bytes. Pure.

The size of an item is computed once and kept with it: a request of a few bytes may name a large item many times.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from pipeline.stages.gateway.admission.open_bytes import MESSAGE_BYTES, TEXT_BYTES, VALUE_BYTES, text_bytes
from pipeline.stages.gateway.apis.responses.items import (
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputText,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    Refusal,
    num_parts,
)
from pipeline.stages.gateway.apis.responses.types import ResponseObject

PART_BYTES = 256
"""A part of an item, without its text and log probabilities."""
LOGPROB_BYTES = 80
"""A log probability, which is kept as JSON, without the JSON."""
RESPONSE_BYTES = 2048
"""A response without its texts and output."""


class SizedItem(NamedTuple):
    item: Item
    num_bytes: int
    num_parts: int
    """As of `num_parts`"""


def sized(item: Item) -> SizedItem:
    """Takes time for each part of the item, not for each character."""
    size = MESSAGE_BYTES + text_bytes(item.id)
    match item:
        case MessageItem():
            size += text_bytes(item.role)
            for part in item.content:
                size += PART_BYTES + text_bytes(_text_of(part))
                if isinstance(part, OutputText) and part.logprobs:
                    as_json: list[Any] = part.logprobs  # see OutputBuilder
                    size += sum(LOGPROB_BYTES + memoryview(one).nbytes for one in as_json)
        case FunctionCallItem():
            size += text_bytes(item.call_id) + text_bytes(item.name) + text_bytes(item.arguments)
            size += text_bytes(item.namespace or "")
        case CustomToolCallItem():
            size += text_bytes(item.call_id) + text_bytes(item.name) + text_bytes(item.input)
            size += text_bytes(item.namespace or "")
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            size += text_bytes(item.call_id)
            if isinstance(item.output, str):
                size += text_bytes(item.output)
            else:
                size += sum(PART_BYTES + text_bytes(_text_of(part)) for part in item.output)
        case ReasoningItem():
            size += sum(PART_BYTES + text_bytes(one.text) for one in item.summary)
            size += sum(PART_BYTES + text_bytes(one.text) for one in item.content)
    return SizedItem(item, size, num_parts([item]))


def _text_of(part: OutputText | InputText | InputImage | Refusal) -> str:
    match part:
        case InputImage():
            return part.image_url
        case Refusal():
            return part.refusal
    return part.text


def sum_of(items: Iterable[SizedItem]) -> int:
    return sum([one.num_bytes for one in items])


def parts_of(items: Iterable[SizedItem]) -> int:
    return sum([one.num_parts for one in items])


def response_bytes(response: ResponseObject) -> int:
    """A response without its output."""
    size = RESPONSE_BYTES
    for raw in (response.text, response.tool_choice, response.tools):
        size += TEXT_BYTES + memoryview(raw).nbytes
    for text in (response.instructions, response.user, response.prompt_cache_key, response.safety_identifier):
        size += text_bytes(text)
    if response.error is not None:
        size += text_bytes(response.error.message)
    return size + sum(text_bytes(key) + text_bytes(value) + 2 * VALUE_BYTES for key, value in response.metadata.items())
