"""Bodies of POST /v1/responses: what each field becomes."""

import json
from typing import Any

import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.items import num_parts
from pipeline.stages.gateway.apis.responses.parsing import finish_response, parse_response, read_response
from pipeline.stages.gateway.apis.responses.reply import reply_fields_of
from pipeline.stages.gateway.apis.responses.sizes import sum_of
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.apis.responses.parsed import (
    CALL,
    FIND,
    LIMITS,
    NOW,
    SCHEMA,
    THERE,
    LargeConversation,
    Stored,
    messages,
    parsed,
    prompt,
    reply_fields,
    request,
)

# ------------------------------------------------------------------------------------------------------------ input


def test_a_text_is_a_user_s_message_after_the_instructions() -> None:
    assert messages() == [m.ChatMessage("user", "Hi")]
    assert messages(instructions="Be brief.") == [m.ChatMessage("system", "Be brief."), m.ChatMessage("user", "Hi")]


def test_messages_may_be_easy_or_have_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items = [
        {"role": "developer", "content": "x"},
        {"type": "message", "role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "d"}]},
    ]
    assert messages(input=items) == [
        m.ChatMessage("developer", "x"),
        m.ChatMessage("user", "a\nb", parts=["a", "b"]),
        m.ChatMessage("assistant", "c"),
        m.ChatMessage("assistant", "d"),
    ]


def test_an_assistant_s_turn_is_one_message() -> None:
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"role": "assistant", "content": "I look."},
        CALL,
        CALL | {"call_id": "c2", "name": "now"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "12"}]},
        {"type": "function_call_output", "call_id": "c1", "output": "here"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "So."}]},
        {"role": "assistant", "content": "Done."},
    ]
    calls = [m.ToolCall("c1", "find", "{}"), m.ToolCall("c2", "now", "{}")]
    assert messages(input=items) == [
        m.ChatMessage("user", "q"),
        m.ChatMessage("assistant", "I look.", tool_calls=calls, reasoning="Hm."),
        m.ChatMessage("tool", "12", tool_call_id="c2"),
        m.ChatMessage("tool", "here", tool_call_id="c1"),
        m.ChatMessage("assistant", "Done.", reasoning="So."),
    ]


def test_a_message_after_calls_is_the_same_turn() -> None:
    """Its call has no output yet, so no other message can stand before that."""
    says = {"role": "assistant", "content": "a"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "here"}
    thinks = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    calls = [m.ToolCall("c1", "find", "{}")]
    for items, expected in (
        ([CALL, says], m.ChatMessage("assistant", "a", tool_calls=calls)),
        ([CALL, thinks, says], m.ChatMessage("assistant", "a", tool_calls=calls, reasoning="Hm.")),
        ([says, CALL, says], m.ChatMessage("assistant", "aa", tool_calls=calls)),
        ([thinks, says, CALL, thinks, says], m.ChatMessage("assistant", "aa", tool_calls=calls, reasoning="Hm.Hm.")),
    ):
        first, second = messages(input=[*items, output])
        assert first == expected
        assert second == m.ChatMessage("tool", "here", tool_call_id="c1")


def test_messages_that_follow_each_other_are_turns() -> None:
    first, second = messages(input=[{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}])
    assert (first.content, second.content) == ("a", "b")


def test_a_previous_response_and_references_are_resolved() -> None:
    output = {"type": "function_call_output", "call_id": "c1", "output": "here"}
    roles = [message.role for message in messages(previous_response_id="resp_1", input=[output])]
    assert roles == ["user", "assistant", "tool"]
    assert messages(input=[{"type": "item_reference", "id": "msg_9"}, {"id": "msg_9"}]) == [
        m.ChatMessage("assistant", "There."),
        m.ChatMessage("assistant", "There."),
    ]


def test_what_is_stored_is_counted_with_the_items_of_the_body() -> None:
    fields: Any = {
        "previous_response_id": "resp_1",
        "input": [{"id": "msg_9"}, {"role": "user", "content": "a" * 500}] * 2,
    }
    found = parsed(**fields)
    assert reply_fields_of(found.request).conversation_bytes == sum_of(found.items) > 2 * 500
    assert found.items.count(THERE) == 2
    assert reply_fields(**fields, store=False).conversation_bytes == 0, "only the prompt is kept"
    checked = Stored()
    parse_response(json.dumps(fields).encode(), LIMITS, checked, "seed")
    before = sum_of(checked.conversation("resp_1"))
    there = THERE.num_bytes
    sizes = [("previous_response_id", before), ("input[0].id", before + there), ("input[2].id", before + 2 * there)]
    assert checked.checked == sizes


def test_items_get_unique_ids_and_keep_their_own() -> None:
    items = parsed(
        input=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}, CALL | {"id": "fc_7"}]
    ).items
    first, second, third = (one.item.id for one in items)
    assert first != second and first.startswith("msg_")
    assert third == "fc_7"


# ----------------------------------------------------------------------------------------------------------- fields


def test_sampling_fields_reach_the_stages() -> None:
    options = request(temperature=0.5, top_p=0.9, max_output_tokens=7, seed=3, stop="x", top_k=4).options
    assert (options.temperature, options.top_p, options.max_tokens, options.stop) == (0.5, 0.9, 7, ["x"])
    assert options.top_k == 4 and request(seed=3).seed == 3
    assert request().max_tokens_param == "max_output_tokens"


def test_functions_are_a_chat_s_tools() -> None:
    found = prompt(tools=[FIND | {"strict": True}, NOW])
    assert json.loads(found.tools) == [
        {
            "type": "function",
            "function": {
                "name": "find",
                "description": "It finds",
                "parameters": {"type": "object"},
                "strict": True,
            },
        },
        {"type": "function", "function": {"name": "now"}},
    ]
    assert json.loads(reply_fields(tools=[FIND, NOW]).tools) == [FIND, NOW]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ("auto", "")),
        ("auto", ("auto", "")),
        ("none", ("none", "")),
        ("required", ("required", "")),
        ({"type": "function", "name": "now"}, ("named", "now")),
    ],
)
def test_tool_choice(choice: Any, expected: tuple[str, str]) -> None:
    found = prompt(tools=[FIND, NOW], tool_choice=choice)
    assert (found.tool_choice, found.tool_name) == expected
    assert json.loads(reply_fields(tools=[FIND, NOW], tool_choice=choice).tool_choice) == (choice or "auto")


def test_parallel_tool_calls() -> None:
    assert not prompt(tools=[FIND], parallel_tool_calls=False).parallel_tool_calls
    assert not reply_fields(parallel_tool_calls=False).parallel_tool_calls
    assert reply_fields().parallel_tool_calls


@pytest.mark.parametrize(
    ("given", "kind", "param"),
    [
        ({"type": "text"}, None, None),
        ({"type": "json_object"}, "json_object", "text.format"),
        (SCHEMA, "closed_schema", "text.format.schema"),
        ({"type": "json_object", "schema": SCHEMA["schema"]}, "closed_schema", "text.format.schema"),
    ],
)
def test_text_format(given: Any, kind: str | None, param: str | None) -> None:
    grammar = request(text={"format": given}).options.grammar
    assert (grammar and grammar.kind, grammar and grammar.param) == (kind, param)
    assert json.loads(reply_fields(text={"format": given}).text)["format"].items() >= given.items()


def test_reasoning() -> None:
    kwargs = json.loads(prompt(reasoning={"effort": "none", "summary": "auto"}).template_kwargs)
    assert kwargs == {"reasoning_effort": "none", "enable_thinking": False}
    found = reply_fields(reasoning={"effort": "low", "generate_summary": "auto"})
    assert (found.effort, found.summary) == ("low", "auto")


def test_logprobs_are_included_on_request() -> None:
    include = ["message.output_text.logprobs"]
    assert request().details.num_top is None
    assert request(include=include).details.num_top == 0
    assert request(include=include, top_logprobs=3).details.num_top == 3
    assert request(include=["reasoning.encrypted_content"]).details.num_top is None


def test_truncation() -> None:
    assert request(truncation="auto").prompt_options.truncate == -1
    assert request(truncation="disabled").prompt_options.truncate == 0


def test_fields_that_the_response_repeats() -> None:
    given = {"metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k"}
    found = reply_fields(**given, instructions="i", max_output_tokens=9)
    assert {name: getattr(found, name) for name in given} == given
    assert (found.instructions, found.max_output_tokens) == ("i", 9)


def test_store_background_and_stream() -> None:
    assert reply_fields().store and not reply_fields(store=False).store and not reply_fields().background
    assert reply_fields(background=True).background
    assert request(stream=True, stream_options={"include_obfuscation": False}).stream
    assert not reply_fields(is_on=False).store and not reply_fields(is_on=False, store=True).store


def test_other_fields_that_change_how_it_runs() -> None:
    found = request(request_id="mine", cache_salt="s", timeout_s=3, chat_template_kwargs={"a": 1})
    assert (found.request_id, found.options.cache_salt, found.timeout_s) == ("mine", "s", 3)
    assert json.loads(prompt(chat_template_kwargs={"a": 1}).template_kwargs) == {"a": 1}


# --------------------------------------------------------------------------------------------------------- refusals

PARTS = [{"type": "input_text", "text": "x"}]
AFTER = {"previous_response_id": "resp_1"}


class TestStoredConversations:
    """A small body may name much that is stored."""

    @pytest.mark.parametrize(
        "fields",
        [
            {"input": [{"role": "user", "content": PARTS * 513}]},
            {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}] * 513}]},
            AFTER | {"input": [{"role": "user", "content": PARTS * 14}]},
            AFTER | {"input": [{"role": "user", "content": "x"}] * 14},
            AFTER | {"input": [{"type": "item_reference", "id": "msg_1"}]},
        ],
    )
    def test_more_parts_than_the_model_takes_tokens_are_refused_before_they_are_read(
        self, fields: dict[str, Any]
    ) -> None:
        stored = LargeConversation(500)
        with pytest.raises(ApiError) as refused:
            parse_response(json.dumps({"model": "tiny", "input": "Hi"} | fields).encode(), LIMITS, stored, "seed")
        assert (refused.value.status, refused.value.param, refused.value.code) == (
            400,
            "input",
            "context_length_exceeded",
        )
        assert not stored.num_read

    @pytest.mark.parametrize("num", [1, 500])
    def test_reading_the_body_alone_tells_how_much_is_stored(self, num: int) -> None:
        stored = LargeConversation(num)
        body = json.dumps({"model": "tiny", "input": "Hi"} | AFTER).encode()
        read = read_response(body, LIMITS, stored, "seed")
        assert (read.num_stored_bytes, stored.num_read, read.num_parts) == (stored.message.num_bytes, 0, num + 1)
        parsed = finish_response(read, LIMITS, stored)
        assert (len(parsed.items), stored.num_read) == (2, 1)
        assert num_parts(one.item for one in parsed.items) == num + 1

    def test_items_that_a_body_names_count_as_stored(self) -> None:
        body = json.dumps({"model": "tiny", "input": [{"type": "item_reference", "id": "a"}] * 2}).encode()
        stored = LargeConversation(100)
        assert read_response(body, LIMITS, stored, "seed").num_stored_bytes == 2 * stored.message.num_bytes
