"""Bodies of POST /v1/responses that are refused, and the field that each refusal names."""

from typing import Any

import pytest

from pipeline.stages.gateway.apis.responses.body import RESPONSES_UNSUPPORTED_FIELDS, ResponsesBody
from pipeline.stages.gateway.errors import ApiError
from tests.stages.gateway.apis.responses.parsed import CALL, NOW, OUTPUT, SCHEMA, WEB, WHY_OFF, parsed

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
