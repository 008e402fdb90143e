"""Bodies of POST /v1/responses: what each field becomes, and the field that each refusal names."""

import json
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.body import RESPONSES_UNSUPPORTED_FIELDS, ResponsesBody
from pipeline.stages.gateway.apis.responses.fields import ResponseFields
from pipeline.stages.gateway.apis.responses.items import (
    FunctionCallItem,
    InputText,
    MessageItem,
    OutputText,
    num_parts,
)
from pipeline.stages.gateway.apis.responses.parsing import (
    ParsedResponse,
    StoredSize,
    finish_response,
    parse_response,
    read_response,
)
from pipeline.stages.gateway.apis.responses.reply import reply_fields_of
from pipeline.stages.gateway.apis.responses.sizes import SizedItem, sized, sum_of
from pipeline.stages.gateway.errors import ApiError, invalid
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats

LIMITS = RequestLimits(
    model="tiny",
    max_sequences=64,
    max_prompt_tokens=512,
    formats=ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")),
)
FIND = {"type": "function", "name": "find", "description": "It finds", "parameters": {"type": "object"}}
NOW = {"type": "function", "name": "now"}
WEB = {"type": "web_search", "external_web_access": False}
CALL = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "a"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
WHY_OFF = "it is off"
THERE = sized(MessageItem("msg_9", "assistant", "completed", [OutputText("There.")]))


class Stored:
    """One stored response of a question and a call."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.is_on = is_on
        self.why_off = WHY_OFF
        self.checked: list[tuple[str, int]] = []

    def size(self, response_id: str) -> StoredSize:
        items = self.conversation(response_id)
        return StoredSize(sum_of(items), num_parts(one.item for one in items))

    def conversation(self, response_id: str) -> list[SizedItem]:
        if response_id != "resp_1":
            raise invalid("previous_response_id", "not found")
        call = FunctionCallItem("fc_1", "c1", "find", "{}", "completed")
        return [sized(MessageItem("msg_1", "user", "completed", [InputText("Where?")])), sized(call)]

    def item(self, param: str, item_id: str) -> SizedItem:
        if item_id != "msg_9":
            raise invalid(param, "not found")
        return THERE

    def check_size(self, param: str, num_bytes: int) -> None:
        self.checked.append((param, num_bytes))


class LargeConversation:
    """A stored conversation of one message with many parts."""

    is_on = True
    why_off = ""

    def __init__(self, num: int) -> None:
        self.message = sized(MessageItem("msg_1", "user", "completed", [InputText("x")] * num))
        self.num_read = 0

    def size(self, response_id: str) -> StoredSize:
        return StoredSize(self.message.num_bytes, num_parts([self.message.item]))

    def conversation(self, response_id: str) -> list[SizedItem]:
        self.num_read += 1
        return [self.message]

    def item(self, param: str, item_id: str) -> SizedItem:
        return self.message

    def check_size(self, param: str, num_bytes: int) -> None:
        pass


def parsed(*, is_on: bool = True, **fields: Any) -> ParsedResponse:
    body = json.dumps({"model": "tiny", "input": "Hi"} | fields).encode()
    return parse_response(body, LIMITS, Stored(is_on=is_on), "seed")


def request(**fields: Any) -> ParsedRequest:
    return parsed(**fields).request


def reply_fields(**fields: Any) -> ResponseFields:
    return reply_fields_of(request(**fields))


def messages(**fields: Any) -> list[m.ChatMessage]:
    (prompt,) = request(**fields).prompts
    assert isinstance(prompt, m.ChatPrompt)
    return prompt.messages


def prompt(**fields: Any) -> m.ChatPrompt:
    (found,) = request(**fields).prompts
    assert isinstance(found, m.ChatPrompt)
    return found


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

PART = {"type": "input_image", "image_url": "x"}
REFUSALS: list[tuple[dict[str, Any], str, str | None]] = [
    ({"model": "other"}, "model", "model_not_found"),
    ({"input": None}, "input", None),
    ({"input": []}, "input", "invalid_value"),
    ({"input": 1}, "input", "invalid_type"),
    ({"input": [{"content": "a"}]}, "input[0].role", None),
    ({"input": [{"role": "bot", "content": "a"}]}, "input[0].role", "invalid_value"),
    ({"input": [{"role": "user"}]}, "input[0].content", None),
    ({"input": [{"role": "user", "content": [PART]}]}, "input[0].content[0]", "unsupported"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text", None),
    ({"input": [{"role": "user", "content": [{"type": "refusal"}]}]}, "input[0].content[0].type", "unsupported"),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal", None),
    ({"input": [{"type": "web_search_call"}]}, "input", "invalid_value"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type", "unsupported"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments", "invalid_type"),
    ({"input": [CALL, OUTPUT | {"output": {}}]}, "input[1].output", "invalid_type"),
    ({"input": [CALL, OUTPUT | {"output": [{"text": "a"}]}]}, "input[1].output[0].type", None),
    ({"input": [CALL, OUTPUT | {"output": [{"type": "input_image"}]}]}, "input[1].output[0]", "unsupported"),
    ({"input": [{"type": "item_reference"}]}, "input[0].id", None),
    ({"input": [{"type": "item_reference", "id": "msg_0"}]}, "input[0].id", None),
    ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments", None),
    ({"input": [{"type": "function_call", "name": "f", "arguments": ""}]}, "input[0].call_id", None),
    ({"input": [{"type": "function_call", "call_id": "c", "arguments": ""}]}, "input[0].name", None),
    ({"input": [{"type": "function_call_output", "output": ""}]}, "input[0].call_id", None),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output", None),
    ({"input": [{"type": "function_call_output", "call_id": "c", "output": "a"}]}, "input[0].call_id", "invalid_value"),
    (
        {"input": [CALL, {"type": "function_call_output", "call_id": "c1", "output": [PART]}]},
        "input[1].output[0]",
        "unsupported",
    ),
    ({"input": [{"type": "reasoning", "summary": [PART]}]}, "input[0].summary[0]", "unsupported"),
    ({"input": [{"type": "reasoning", "content": [PART]}]}, "input[0].content[0]", "unsupported"),
    ({"input": [{"role": "user", "content": "a"}] * 600}, "input", "context_length_exceeded"),
    ({"instructions": 1}, "instructions", "invalid_type"),
    ({"tools": [{"type": "functoin", "name": "x"}]}, "tools[0].type", "unsupported"),
    ({"tools": [{"type": "custom"}]}, "tools[0].name", None),
    ({"tools": [{"type": "namespace", "tools": [NOW]}]}, "tools[0].name", None),
    ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools", None),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [NOW, {"type": "function"}]}]},
        "tools[0].tools[1].name",
        None,
    ),
    (
        {"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "mcp"}]}]},
        "tools[0].tools[0].type",
        "unsupported",
    ),
    (
        {"tools": [WEB, {"type": "namespace", "name": "a", "tools": [NOW, NOW]}]},
        "tools[1].tools[1].name",
        "invalid_value",
    ),
    (
        {"tools": [WEB, {"type": "namespace", "name": "a", "tools": [NOW | {"parameters": 1}]}]},
        "tools[1].tools[0].parameters",
        "invalid_type",
    ),
    ({"tools": [{"type": "custom", "name": "now"}, NOW]}, "tools[1].name", "invalid_value"),
    ({"tools": [WEB, NOW | {"parameters": {"type": "array"}}]}, "tools[1].parameters.type", "invalid_value"),
    ({"tools": [WEB], "tool_choice": "required"}, "tool_choice", None),
    ({"tools": [WEB], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported"),
    ({"tools": [WEB], "tool_choice": {"type": "function", "name": "web_search"}}, "tool_choice", "invalid_value"),
    ({"tools": [NOW], "tool_choice": {"type": "custom", "name": "now"}}, "tool_choice", "invalid_value"),
    ({"input": [{"type": "custom_tool_call", "call_id": "c", "name": "f"}]}, "input[0].input", None),
    ({"input": [{"type": "custom_tool_call_output", "call_id": "c"}]}, "input[0].output", None),
    ({"tools": [{"type": "function"}]}, "tools[0].name", None),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
    ({"tools": [NOW, NOW]}, "tools[1].name", "invalid_value"),
    ({"tools": [NOW | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type", "invalid_value"),
    ({"tools": [NOW | {"parameters": 1}]}, "tools[0].parameters", "invalid_type"),
    ({"tools": [NOW] * 2000}, "tools", "invalid_value"),
    ({"tool_choice": "any"}, "tool_choice", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name", None),
    ({"tool_choice": {"type": "function", "name": "x"}, "tools": [NOW]}, "tool_choice", "invalid_value"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "invalid_value"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema", None),
    ({"text": {"format": SCHEMA | {"schema": 1}}}, "text.format.schema", "invalid_type"),
    ({"text": {"format": SCHEMA}, "tools": [NOW], "tool_choice": "required"}, "text.format.schema", "invalid_value"),
    ({"text": {"format": SCHEMA}, "guided_regex": "a"}, "guided_regex", "invalid_value"),
    ({"text": {"verbosity": "none"}}, "text.verbosity", "invalid_value"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort", "invalid_value"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported"),
    ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary", "unsupported"),
    ({"max_output_tokens": 0}, "max_output_tokens", "invalid_value"),
    ({"temperature": 3}, "temperature", "invalid_value"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_logprobs": 1}, "top_logprobs", None),
    ({"top_logprobs": 10**6, "include": ["message.output_text.logprobs"]}, "top_logprobs", "invalid_value"),
    ({"include": ["web_search_call.action.sources"]}, "include[0]", "unsupported"),
    ({"metadata": {"a": 1}}, "metadata.a", "invalid_type"),
    ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
    ({"metadata": {"a": "b" * 513}}, "metadata[...]", "invalid_value"),
    ({"truncation": "left"}, "truncation", "invalid_value"),
    ({"user": 1}, "user", "invalid_type"),
    ({"store": 1}, "store", "invalid_type"),
    ({"previous_response_id": "resp_0"}, "previous_response_id", None),
    ({"background": True, "store": False}, "background", "invalid_value"),
    ({"stream_options": {}}, "stream_options", None),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
        "unsupported",
    ),
    ({"n": 2}, "n", "unsupported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported"),
    ({"priority": 1}, "priority", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), REFUSALS, ids=lambda one: str(one)[:60])
def test_a_refusal_names_the_field(fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parsed(**fields)
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.status in (400, 404)


@pytest.mark.parametrize("name", RESPONSES_UNSUPPORTED_FIELDS)
def test_unsupported_fields_are_refused_by_name(name: str) -> None:
    assert name not in ResponsesBody.__struct_fields__
    fields: dict[str, Any] = {name: ["x"]}
    with pytest.raises(ApiError, match=f"'{name}' is not supported") as refused:
        parsed(**fields)
    assert refused.value.param == name


@pytest.mark.parametrize("fields", [{"background": True}, {"previous_response_id": "resp_1"}])
def test_without_a_store_what_needs_it_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError, match=WHY_OFF) as refused:
        parsed(is_on=False, **fields)
    assert refused.value.param == next(iter(fields))


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
