"""Parsing of chats: messages of every role, tools, and template arguments."""

import json
from typing import Any

import pytest

from pipeline.config.settings import ChatSettings
from pipeline.config.settings import LimitSettings as Caps
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_chat, parse_tokenize
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.chat.conversation import ReplyParsing
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.text.formats.chat_formats import ChatFormats
from pipeline.text.formats.grammar.lark import AddedToken
from pipeline.text.formats.tool_format import NO_PARAMETERS

HERMES = ChatFormats.of("", ChatSettings(tool_call_parser="hermes"))
THINKING = ChatFormats.of("", ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3"))
LLAMA = ChatFormats.of("", ChatSettings(tool_call_parser="llama3"), [AddedToken(5, "<|python_tag|>", True)])
TYPED = ChatFormats.of("", ChatSettings(tool_call_parser="glm45"))
NONE = ChatFormats()
USER = {"role": "user", "content": "Hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": '{"text": "a"}'}}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}, "x-note": [1]}}
NOW = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "find"}}


def parsed(formats: ChatFormats = HERMES, caps: Caps = Caps(), **fields: Any) -> ParsedRequest:  # noqa: B008 - frozen
    limits = RequestLimits("tiny", 64, max_prompt_tokens=1000, caps=caps, formats=formats)
    return parse_chat(json.dumps({"model": "tiny", "messages": [USER]} | fields).encode(), limits)


def prompt(**fields: Any) -> m.ChatPrompt:
    (made,) = parsed(**fields).prompts
    assert isinstance(made, m.ChatPrompt)
    return made


def refused(**fields: Any) -> tuple[str | None, str | None]:
    with pytest.raises(ApiError) as error:
        parsed(**fields)
    assert error.value.status == 400
    assert error.value.param is None or error.value.param.split(".")[-1] in error.value.message
    return error.value.param, error.value.code


class TestMessages:
    def test_messages_of_every_role_become_the_prompt(self) -> None:
        messages = [
            {"role": "developer", "content": "Be brief."},
            USER | {"name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "refusal": "no", "reasoning": "Oh."},
        ]
        assert prompt(messages=messages).messages == [
            m.ChatMessage("developer", "Be brief."),
            m.ChatMessage("user", "Hi", "Ann"),
            m.ChatMessage(
                "assistant", None, tool_calls=[m.ToolCall("call_1", "find", '{"text": "a"}')], reasoning="Hm."
            ),
            m.ChatMessage("tool", "b", parts=["b"], tool_call_id="call_1"),
            m.ChatMessage("assistant", "x\nno", parts=["x", "no"]),
            m.ChatMessage("assistant", "no", reasoning="Oh."),
        ]

    @pytest.mark.parametrize(
        ("fields", "reasoning"),
        [
            ({}, None),
            ({"content": None}, None),
            ({"content": None, "tool_calls": []}, None),
            ({"content": None, "reasoning_content": "Hm.", "reasoning": "Hm."}, "Hm."),
            ({"content": None, "reasoning": "Hm.", "refusal": None, "tool_calls": None}, "Hm."),
        ],
    )
    def test_an_assistant_s_message_may_have_no_content(self, fields: dict[str, Any], reasoning: str | None) -> None:
        """As replies that ended within their reasoning, which clients may forget."""
        (_, message, _) = prompt(messages=[USER, {"role": "assistant"} | fields, USER]).messages
        assert message == m.ChatMessage("assistant", "", reasoning=reasoning)

    @pytest.mark.parametrize(
        ("message", "field", "code"),
        [
            ({"role": "function", "name": "f", "content": "x"}, "role", "invalid_value"),
            ({"role": "tool", "content": "x"}, "tool_call_id", None),
            ({"role": "tool", "content": "x", "tool_call_id": ""}, "tool_call_id", None),
            ({"role": "tool", "tool_call_id": "c"}, "content", None),
            ({"role": "user", "content": "x", "tool_calls": [CALL]}, "tool_calls", "invalid_value"),
            ({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}, "tool_calls[0].custom", None),
            ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "tool_calls[0].function", None),
            ({"role": "assistant", "tool_calls": [CALL | {"id": "a" * 257}]}, "tool_calls[0].id", "invalid_value"),
            ({"role": "assistant", "function_call": {"name": "f"}}, "function_call", "unsupported"),
            ({"role": "assistant", "audio": {"id": "a"}}, "audio", "unsupported"),
            ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "content[0].image_url.url", None),
            ({"role": "user", "content": [{"type": "input_audio"}]}, "content[0]", "unsupported"),
            ({"role": "user", "content": [{"type": "other"}]}, "content[0].type", "unsupported"),
            ({"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}, "content[0].type", "unsupported"),
            ({"role": "assistant", "content": [{"type": "refusal"}]}, "content[0].refusal", None),
        ],
    )
    def test_an_invalid_field_is_named(self, message: Any, field: str, code: str | None) -> None:
        assert refused(messages=[USER, message]) == (f"messages[1].{field}", code)

    def test_messages_and_calls_are_counted_before_they_are_parsed(self) -> None:
        message = {"role": "assistant", "tool_calls": [CALL] * 1001}
        assert refused(messages=[message]) == ("messages", "context_length_exceeded")


class TestTools:
    def test_tools_are_passed_on_unchanged(self) -> None:
        made = prompt(tools=[FIND, NOW], tool_choice="auto", parallel_tool_calls=False)
        assert json.loads(made.tools) == [FIND, NOW]
        assert (made.tool_choice, made.tool_name, made.parallel_tool_calls) == ("auto", "", False)
        assert prompt(tools=[]) == prompt(tools=None, tool_choice=None) == prompt()

    def test_tool_choice_is_passed_on(self) -> None:
        for choice in ("none", "auto", "required"):
            assert prompt(tools=[FIND], tool_choice=choice).tool_choice == choice
        made = prompt(tools=[FIND, NOW], tool_choice=NAMED)
        assert (made.tool_choice, made.tool_name) == ("named", "find")

    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"tools": {}}, "tools", "invalid_type"),
            ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", None),
            ({"tools": [{"type": "function"}]}, "tools[0].function", None),
            ({"tools": [FIND, {"type": "function", "function": {}}]}, "tools[1].function.name", None),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
            ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "invalid_value"),
            (
                {"tools": [{"type": "function", "function": {"name": "f" * 65}}]},
                "tools[0].function.name",
                "invalid_value",
            ),
            ({"tools": [FIND, FIND]}, "tools[1].function.name", "invalid_value"),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
                "tools[0].function.parameters",
                "invalid_type",
            ),
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
                "tools[0].function.parameters.type",
                "invalid_value",
            ),
            ({"tool_choice": "required"}, "tool_choice", None),
            ({"tool_choice": NAMED}, "tool_choice", "invalid_value"),
            ({"tools": [NOW], "tool_choice": NAMED}, "tool_choice", "invalid_value"),
            ({"tools": [NOW], "tool_choice": "any"}, "tool_choice", "invalid_value"),
            ({"tools": [NOW], "tool_choice": 5}, "tool_choice", "invalid_type"),
            ({"tools": [NOW], "tool_choice": {"type": "function"}}, "tool_choice.function", None),
            ({"tools": [NOW], "tool_choice": {"type": "web_search"}}, "tool_choice.type", "unsupported"),
            (
                {"tools": [FIND], "tool_choice": "required", "response_format": {"type": "json_object"}},
                "response_format",
                "invalid_value",
            ),
            (
                {"tools": [FIND], "tool_choice": NAMED, "structured_outputs": {"regex": "a"}},
                "structured_outputs.regex",
                "invalid_value",
            ),
            ({"functions": [{"name": "f"}]}, "functions", "unsupported"),
        ],
    )
    def test_an_invalid_field_is_named(self, fields: Any, param: str, code: str | None) -> None:
        assert refused(**fields) == (param, code)

    def test_the_number_of_tools_is_limited_by_the_settings(self) -> None:
        tools = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(3)]
        assert refused(caps=Caps(max_tools=2), tools=tools) == ("tools", "invalid_value")
        assert parsed(caps=Caps(max_tools=3), tools=tools)

    def test_tools_require_a_tool_format_unless_a_grammar_enforces_a_call(self) -> None:
        assert refused(formats=NONE, tools=[FIND]) == ("tools", "unsupported")
        assert parsed(formats=NONE, tools=[FIND], tool_choice="none").reply is None
        for choice in ("required", NAMED):
            made = parsed(formats=NONE, tools=[FIND], tool_choice=choice)
            assert made.options.grammar is not None and made.reply is not None


class TestReplies:
    def test_replies_are_parsed_only_for_tools_or_reasoning(self) -> None:
        assert parsed().reply is None
        assert parsed(tools=[FIND], tool_choice="none").reply is None
        assert parsed(tools=[FIND, NOW], parallel_tool_calls=False).reply == ReplyParsing(
            "auto", {"find": "", "now": ""}, False
        )
        typed = parsed(formats=TYPED, tools=[FIND, NOW]).reply
        assert typed is not None and typed.tools == {"find": '{"type": "object"}', "now": NO_PARAMETERS}
        assert parsed(formats=THINKING).reply == ReplyParsing("none")

    def test_strict_functions_have_a_grammar_if_the_format_shows_where_a_call_begins(self) -> None:
        function = {"name": "find", "parameters": {"type": "object"}, "strict": True}
        strict = {"type": "function", "function": function}
        formats = ChatFormats.of("", ChatSettings(tool_call_parser="hermes"), [AddedToken(7, "<tool_call>")])
        made = parsed(formats=formats, tools=[strict, NOW]).options.grammar
        assert made is not None and (made.kind, made.param) == ("calls", "tools")
        assert list(json.loads(made.source)["schemas"].values()) == [{"type": "object"}] * 2
        without_mark = ChatFormats.of("", ChatSettings(tool_call_parser="mistral"))  # whose token the model lacks
        for tools, known in (([FIND, NOW], formats), ([strict], without_mark)):
            assert parsed(formats=known, tools=tools).options.grammar is None
        assert parsed(formats=formats, tools=[strict], tool_choice="none").options.grammar is None
        answer = parsed(formats=formats, tools=[strict], response_format={"type": "json_object"}).options.grammar
        assert answer is not None and answer.kind.endswith("json_object")

    def test_reasoning_is_returned_unless_the_client_declines(self) -> None:
        assert parsed(formats=THINKING, include_reasoning=False).reply == ReplyParsing("none", with_reasoning=False)
        assert parsed(formats=THINKING).prompt_options.with_tail
        assert not parsed(tools=[FIND]).prompt_options.with_tail

    def test_special_tokens_are_shown_only_if_a_marker_is_one(self) -> None:
        assert not parsed(formats=LLAMA, tools=[FIND]).options.skip_special_tokens
        assert parsed(formats=LLAMA).options.skip_special_tokens
        assert parsed(tools=[FIND]).options.skip_special_tokens
        shown = parsed(formats=LLAMA, tools=[FIND], skip_special_tokens=False)
        assert not shown.options.skip_special_tokens
        assert shown.reply is not None and shown.reply.shows_specials

    def test_required_calls_are_enforced_by_a_grammar(self) -> None:
        assert parsed(tools=[FIND]).options.grammar is None
        required, named = (
            parsed(tools=[FIND, NOW], tool_choice="required"),
            parsed(tools=[FIND, NOW], tool_choice=NAMED),
        )
        assert required.options.grammar is not None and named.options.grammar is not None
        assert (required.options.grammar.kind, required.options.grammar.param) == ("calls", "tools")
        assert (named.options.grammar.kind, named.options.grammar.param) == ("calls", "tools[0].function.parameters")
        assert "now" in required.options.grammar.source
        assert "now" not in named.options.grammar.source

    def test_tools_can_be_combined_with_structured_outputs(self) -> None:
        made = parsed(tools=[FIND], response_format={"type": "json_object"})
        assert made.options.grammar is not None and made.options.grammar.kind == "json_object"


class TestTemplate:
    def test_the_template_gets_its_arguments(self) -> None:
        made = prompt(chat_template_kwargs={"enable_thinking": False}, documents=[{"text": "a"}])
        assert json.loads(made.template_kwargs) == {"enable_thinking": False}
        assert json.loads(made.documents) == [{"text": "a"}]
        assert prompt(chat_template_kwargs={}, documents=[]) == prompt(chat_template_kwargs=None) == prompt()

    def test_the_template_gets_the_reasoning_effort(self) -> None:
        assert json.loads(prompt(reasoning_effort="high").template_kwargs) == {"reasoning_effort": "high"}
        none = {"reasoning_effort": "none", "enable_thinking": False}
        assert json.loads(prompt(reasoning_effort="none").template_kwargs) == none
        own = {"enable_thinking": True}
        made = prompt(reasoning_effort="none", chat_template_kwargs=own)
        assert json.loads(made.template_kwargs) == none | own

    def test_the_template_begins_a_reply_or_continues_the_last_message(self) -> None:
        assert (prompt().add_generation_prompt, prompt().continue_final_message) == (True, False)
        assert not prompt(add_generation_prompt=False).add_generation_prompt
        made = prompt(continue_final_message=True)
        assert (made.add_generation_prompt, made.continue_final_message) == (False, True)
        both = {"continue_final_message": True, "add_generation_prompt": True}
        assert refused(**both) == ("continue_final_message", "invalid_value")

    @pytest.mark.parametrize(
        ("fields", "param", "code"),
        [
            ({"chat_template": "{{ 1 }}"}, "chat_template", "unsupported"),
            ({"chat_template_kwargs": []}, "chat_template_kwargs", "invalid_type"),
            ({"documents": {}}, "documents", "invalid_type"),
            ({"documents": ["a"]}, "documents[0]", "invalid_type"),
            ({"reasoning_effort": "extreme"}, "reasoning_effort", "invalid_value"),
            ({"continue_final_message": 1}, "continue_final_message", "invalid_type"),
        ],
    )
    def test_an_invalid_template_field_is_named(self, fields: Any, param: str, code: str) -> None:
        assert refused(**fields) == (param, code)


def test_tokenize_accepts_the_same_chats() -> None:
    body = {"messages": [USER], "tools": [FIND], "chat_template_kwargs": {"a": 1}, "continue_final_message": True}
    limits = RequestLimits("tiny", 64)
    (made,) = parse_tokenize(json.dumps(body).encode(), limits).prompts
    assert made == prompt(**{name: value for name, value in body.items() if name != "messages"})
    with pytest.raises(ApiError) as error:
        parse_tokenize(json.dumps(body | {"tools": [{}]}).encode(), limits)
    assert error.value.param == "tools[0].type"
