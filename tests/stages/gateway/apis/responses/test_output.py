"""The items and events of an output, in OpenAI's order, from fabricated deltas."""

from typing import Any

import msgspec
from msgspec import UNSET

from pipeline.stages.gateway.apis.openai.types import ChatDelta, FunctionDelta, ToolDelta
from pipeline.stages.gateway.apis.responses.items import FunctionCallItem, MessageItem, OutputText, ReasoningItem
from pipeline.stages.gateway.apis.responses.output import OutputBuilder
from pipeline.stages.gateway.replies.logprobs import TokenLogprob


def text(value: str) -> ChatDelta:
    return ChatDelta(content=value)


def thought(value: str) -> ChatDelta:
    return ChatDelta(reasoning_content=value, reasoning=value)


def call(index: int, name: str) -> ChatDelta:
    return ChatDelta(tool_calls=[ToolDelta(index, f"call_{index}", "function", FunctionDelta(name=name, arguments=""))])


def arguments(index: int, value: str) -> ChatDelta:
    return ChatDelta(tool_calls=[ToolDelta(index, UNSET, UNSET, FunctionDelta(arguments=value))])


def token(value: bytes) -> TokenLogprob:
    return TokenLogprob(value.decode(), -1.0, list(value), [])


def events_of(builder: OutputBuilder, *batches: list[ChatDelta], status: Any = "completed") -> list[Any]:
    """The events as clients see them."""
    encoded = [msgspec.json.encode(event) for batch in batches for event in builder.feed(batch)]
    encoded += [msgspec.json.encode(event) for event in builder.finish(status)]
    return [msgspec.json.decode(one) for one in encoded]


def names(events: list[Any]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


MESSAGE_BEGINS = ["output_item.added", "content_part.added"]
MESSAGE_ENDS = ["output_text.done", "content_part.done", "output_item.done"]


def test_a_message() -> None:
    builder = OutputBuilder("s")
    events = events_of(builder, [text("Hel")], [], [text("lo")])
    assert names(events) == [*MESSAGE_BEGINS, "output_text.delta", "output_text.delta", *MESSAGE_ENDS]
    added, part, first, second, done, part_done, item_done = events
    (item,) = builder.items
    assert isinstance(item, MessageItem)
    assert added["item"] == {
        "type": "message",
        "id": item.id,
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }
    empty = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert (part["part"], part["item_id"], part["content_index"], part["output_index"]) == (empty, item.id, 0, 0)
    assert (first["delta"], second["delta"], done["text"]) == ("Hel", "lo", "Hello")
    assert part_done["part"] == empty | {"text": "Hello"}
    assert item_done["item"]["content"] == [empty | {"text": "Hello"}]
    assert item_done["item"]["status"] == "completed"


def test_reasoning_a_message_and_calls() -> None:
    builder = OutputBuilder("s")
    first = [thought("Hm"), thought("."), text("I look.")]
    second = [call(0, "find"), arguments(0, '{"a"'), arguments(0, ":1}"), call(1, "now"), arguments(1, "{}")]
    events = events_of(builder, first, second)
    call_ends = ["function_call_arguments.done", "output_item.done"]
    assert names(events) == [
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *(*MESSAGE_BEGINS, "output_text.delta", *MESSAGE_ENDS),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.delta", *call_ends),
        *("output_item.added", "function_call_arguments.delta", *call_ends),
    ]
    indexes = [event["output_index"] for event in events]
    assert indexes == sorted(indexes) and set(indexes) == {0, 1, 2, 3}
    reasoning, message, find, now = builder.items
    assert isinstance(reasoning, ReasoningItem) and reasoning.content[0].text == "Hm."
    assert isinstance(message, MessageItem) and isinstance(message.content[0], OutputText)
    assert message.content[0].text == "I look."
    assert isinstance(find, FunctionCallItem) and isinstance(now, FunctionCallItem)
    assert (find.call_id, find.name, find.arguments, find.status) == ("call_0", "find", '{"a":1}', "completed")
    assert (now.call_id, now.name, now.arguments) == ("call_1", "now", "{}")
    assert len({item.id for item in builder.items}) == 4
    assert [item.id.partition("_")[0] for item in builder.items] == ["rs", "msg", "fc", "fc"]
    dones = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [(one["name"], one["arguments"]) for one in dones] == [("find", '{"a":1}'), ("now", "{}")]


def test_only_the_last_item_is_incomplete() -> None:
    builder = OutputBuilder("s")
    events = events_of(builder, [thought("a"), text("b")], status="incomplete")
    assert [item.status for item in builder.items] == ["completed", "incomplete"]
    assert [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"] == [
        "completed",
        "incomplete",
    ]


def test_no_output_is_an_empty_message() -> None:
    builder = OutputBuilder("s")
    assert names(events_of(builder)) == [*MESSAGE_BEGINS, *MESSAGE_ENDS]


def test_ids_are_the_same_for_the_same_seed() -> None:
    builders = [OutputBuilder(seed) for seed in ("a", "a", "b")]
    for builder in builders:
        events_of(builder, [text("x")])
    first, second, third = (builder.items[0].id for builder in builders)
    assert first == second != third


def logprobs_of(builder: OutputBuilder) -> list[str]:
    return [
        msgspec.json.decode(msgspec.json.encode(one))["token"]
        for item in builder.items
        if isinstance(item, MessageItem)
        for part in item.content
        if isinstance(part, OutputText)
        for one in part.logprobs
    ]


def test_each_delta_has_the_logprobs_of_its_tokens() -> None:
    builder = OutputBuilder("s")
    events = [*builder.feed([text("a")], [token(b"a")]), *builder.feed([], [token(b"b1")])]
    events += [
        *builder.feed([text("b1c")], [token(b"c")]),
        *builder.feed([], [token(b"")]),
        *builder.finish("completed"),
    ]
    deltas = [
        msgspec.json.decode(msgspec.json.encode(event.logprobs))
        for event in events
        if event.type == "response.output_text.delta"
    ]
    assert [[one["token"] for one in each] for each in deltas] == [["a"], ["b1", "c"]]
    assert logprobs_of(builder) == ["a", "b1", "c", ""]


def test_a_message_has_no_logprobs_of_reasoning_or_calls() -> None:
    whole = OutputBuilder("s")
    tokens = [b"Hm", b".", b"</think>", b"\n", b"I ", b"look.", b"<tool_call>", b"{", b"}"]
    list(whole.feed([thought("Hm."), text("I look."), call(0, "f"), arguments(0, "{}")], map(token, tokens)))
    list(whole.finish("completed"))
    assert logprobs_of(whole) == ["I ", "look."]
    streamed = OutputBuilder("s")
    list(streamed.feed([thought("Hm.")], [token(b"Hm"), token(b".")]))
    list(streamed.feed([], [token(b"</think>")]))
    list(streamed.feed([text("I look.")], [token(b"I "), token(b"look.")]))
    list(streamed.feed([call(0, "f")], [token(b"<tool_call>")]))
    list(streamed.finish("completed"))
    assert logprobs_of(streamed) == ["I ", "look."]
