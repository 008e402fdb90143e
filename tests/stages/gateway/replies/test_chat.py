"""Tool calls and reasoning in replies to chats, complete and streamed, in the formats of OpenAI and vLLM."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate, events_of, read_until

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("find", "now")]
WITH_TOOLS = CHAT | {"tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "find"}}
FIND = '<tool_call>\n{"name": "find", "arguments": {"text": "a"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes")) as gate:
        yield gate


@pytest.fixture
def reasoning_gate(tmp_path: Path) -> Iterator[Gate]:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes", reasoning_parser="qwen3")) as gate:
        yield gate


def whole(gate: Gate, body: Any, text: str, finish: m.Finish = m.Finish.STOP) -> Any:
    """The only choice of a reply for which the model generates `text`."""
    future = gate.post(body)
    gate.finish(gate.begin(), text, finish=finish)
    response = future.result()
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice


def stream(gate: Gate, body: Any, *pieces: str, finish: m.Finish = m.Finish.STOP, tail: str | None = None) -> list[Any]:
    """The choices of a streamed reply in order, without the first event, which has the role."""
    future = gate.post(body | {"stream": True})
    submit = gate.submit()
    gate.accept(submit, tail=tail)
    for piece in pieces:
        gate.delta(submit, piece)
    gate.finish(submit, finish=finish)
    first, *events = events_of(future.result().text)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    return [choice for event in events for choice in event["choices"]]


def joined(choices: list[Any]) -> dict[str, Any]:
    """The message that a client accumulates from a stream."""
    reply: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None}
    for choice in choices:
        assert reply["finish_reason"] is None
        delta = choice["delta"]
        reply["content"] += delta.get("content", "")
        reply["reasoning"] += delta.get("reasoning_content", "")
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(reply["calls"])
                reply["calls"].append([call["function"]["name"], ""])
            reply["calls"][call["index"]][1] += call["function"]["arguments"]
        reply["finish_reason"] = choice["finish_reason"]
    return reply


@pytest.mark.parametrize("body", [CHAT, WITH_TOOLS, COMPLETION])
@pytest.mark.parametrize("reason", ["!", 7])
def test_the_last_event_has_what_stopped_it_like_a_whole_reply(gate: Gate, body: Any, reason: str | int) -> None:
    for is_stream in (False, True):
        future = gate.post(
            body | {"stream": is_stream}, "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        )
        submit = gate.begin()
        gate.delta(submit, "Hello")
        gate.delta(submit, finish=m.Finish.STOP, stop_reason=reason)
        text = future.result().text
        *_, last = events_of(text) if is_stream else [json.loads(text)]
        (choice,) = last["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


# ------------------------------------------------------------------------------------------------------------ calls


def test_a_complete_reply_has_its_calls(gate: Gate) -> None:
    choice = whole(gate, WITH_TOOLS, f"Let me see.\n{FIND}\n{NOW}")
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
        ("function", {"name": "find", "arguments": '{"text": "a"}'}),
        ("function", {"name": "now", "arguments": "{}"}),
    ]
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2
    assert all(len(one) == 37 and one.startswith("call_") for one in ids)


def test_a_reply_of_only_calls_has_null_content(gate: Gate) -> None:
    assert whole(gate, WITH_TOOLS, FIND)["message"]["content"] is None


def test_a_call_is_streamed_incrementally(gate: Gate) -> None:
    with gate.raw(WITH_TOOLS | {"stream": True}) as connection:
        submit = gate.begin()
        gate.delta(submit, "Hm. <tool_call>\n{")
        assert b'"delta":{"content":"Hm."}' in read_until(connection, b"Hm.")
        gate.delta(submit, '"name": "find", "arguments": {"te')
        begun = read_until(connection, b'te"}}]}')
        assert re.search(
            rb'"delta":{"tool_calls":\[{"index":0,"id":"call_\w{32}","type":"function",'
            rb'"function":{"name":"find","arguments":""}}\]}',
            begun,
        )
        assert rb'"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"te"}}]}' in begun
        gate.delta(submit, 'xt": "a"}}\n</')
        more = read_until(connection, b"}]}")
        assert rb'"delta":{"tool_calls":[{"index":0,"function":{"arguments":"xt\": \"a\"}"}}]}' in more
        gate.finish(submit, "tool_call>")
        end = read_until(connection, b"[DONE]")
        assert b'"delta":{},"finish_reason":"tool_calls"' in end
        assert b"tool_call>" not in end


@pytest.mark.parametrize(
    "text", [f"{FIND}\n{NOW}", f"a{NOW}b", "plain", "<tool_call>what?", '<tool_call>{"name": "fi', ""]
)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_a_stream_equals_the_complete_reply(gate: Gate, text: str, size: int) -> None:
    choice = whole(gate, WITH_TOOLS, text)
    message = choice["message"]
    reply = joined(stream(gate, WITH_TOOLS, *(text[at : at + size] for at in range(0, len(text), size))))
    calls = [list(call["function"].values()) for call in message.get("tool_calls", [])]
    assert reply["content"] == (message["content"] or "")
    assert reply["calls"] == calls
    assert reply["finish_reason"] == choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_the_finish_reason_of_a_named_call_is_stop(gate: Gate) -> None:
    body = WITH_TOOLS | {"tool_choice": NAMED}
    assert whole(gate, body, FIND)["finish_reason"] == "stop"
    assert joined(stream(gate, body, FIND))["finish_reason"] == "stop"
    assert whole(gate, WITH_TOOLS | {"tool_choice": "required"}, FIND)["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("finish", "reason"), [(m.Finish.LENGTH, "length"), (m.Finish.STOP, "stop")])
def test_a_reply_that_ends_within_a_call_keeps_the_partial_call(gate: Gate, finish: m.Finish, reason: str) -> None:
    text = f'{NOW}\n<tool_call>\n{{"name": "find", "arguments": {{"text": "ha'
    choice = whole(gate, WITH_TOOLS, text, finish)
    assert choice["finish_reason"] == reason
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ["{}", '{"text": "ha']
    reply = joined(stream(gate, WITH_TOOLS, text, finish=finish))
    assert reply["calls"] == [["now", "{}"], ["find", '{"text": "ha']]
    assert reply["finish_reason"] == reason


def test_without_parallel_calls_only_the_first_is_returned(gate: Gate) -> None:
    body = WITH_TOOLS | {"parallel_tool_calls": False}
    assert len(whole(gate, body, f"{FIND}\n{NOW}")["message"]["tool_calls"]) == 1
    assert [name for name, _ in joined(stream(gate, body, f"{FIND}\n{NOW}"))["calls"]] == ["find"]


def test_with_tool_choice_none_calls_are_content(gate: Gate) -> None:
    message = whole(gate, WITH_TOOLS | {"tool_choice": "none"}, FIND)["message"]
    assert message["content"] == FIND
    assert "tool_calls" not in message


def test_each_choice_is_parsed_separately(gate: Gate) -> None:
    future = gate.post(WITH_TOOLS | {"n": 2, "stream": True})
    submit = gate.begin()
    for begin in range(0, len(FIND), 7):
        gate.delta(submit, FIND[begin : begin + 7], index=0)
        gate.delta(submit, NOW[begin : begin + 7], index=1)
    for index in range(2):
        gate.finish(submit, index=index)
    choices = [choice for event in events_of(future.result().text)[2:] for choice in event["choices"]]
    replies = [joined([choice for choice in choices if choice["index"] == index]) for index in range(2)]
    assert [reply["calls"] for reply in replies] == [[["find", '{"text": "a"}']], [["now", "{}"]]]
    ids = {call["id"] for choice in choices for call in choice["delta"].get("tool_calls", []) if "id" in call}
    assert len(ids) == 2


def test_a_required_call_submits_its_grammar(gate: Gate) -> None:
    future = gate.post(WITH_TOOLS | {"tool_choice": "required"})
    submit = gate.serve(FIND)
    assert submit.options.grammar is not None and submit.options.grammar.kind == "calls"
    assert isinstance(submit.prompt, m.ChatPrompt)
    assert json.loads(submit.prompt.tools) == TOOLS
    assert future.result().json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_model_without_a_tool_format_can_make_a_named_call(tmp_path: Path) -> None:
    with Gate(tmp_path) as plain:
        assert plain.post(WITH_TOOLS).result().json()["error"]["param"] == "tools"
        body = WITH_TOOLS | {"tool_choice": NAMED}
        message = whole(plain, body, '{"name": "find", "parameters": {"text": "a"}}')["message"]
        assert message["tool_calls"][0]["function"] == {"name": "find", "arguments": '{"text": "a"}'}


def test_calls_of_mistral_have_ids_that_its_templates_accept(tmp_path: Path) -> None:
    with Gate(tmp_path, chat=ChatSettings(tool_call_parser="mistral")) as gate:
        (call,) = whole(gate, WITH_TOOLS, "[TOOL_CALLS]now[ARGS]{}")["message"]["tool_calls"]
        assert len(call["id"]) == 9 and call["id"].isalnum()


# -------------------------------------------------------------------------------------------------------- reasoning

THOUGHT = "<think>\nHm.\n</think>\n\nYes."


def test_reasoning_is_returned_beside_the_content(reasoning_gate: Gate) -> None:
    message = whole(reasoning_gate, CHAT, THOUGHT)["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("Hm.", "Hm.", "Yes.")
    reply = joined(stream(reasoning_gate, CHAT, *THOUGHT))
    assert (reply["reasoning"], reply["content"], reply["finish_reason"]) == ("Hm.", "Yes.", "stop")


def test_reasoning_can_be_excluded(reasoning_gate: Gate) -> None:
    message = whole(reasoning_gate, CHAT | {"include_reasoning": False}, THOUGHT)["message"]
    assert message["content"] == "Yes."
    assert "reasoning_content" not in message
    assert joined(stream(reasoning_gate, CHAT | {"include_reasoning": False}, THOUGHT))["reasoning"] == ""


def test_truncated_reasoning_leaves_no_content(reasoning_gate: Gate) -> None:
    choice = whole(reasoning_gate, CHAT, "<think>\nHm", m.Finish.LENGTH)
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "Hm")
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("<|im_start|>assistant\n", "Yes.", "", "Yes."),
    ],
)
def test_the_end_of_the_prompt_determines_where_the_reply_begins(
    reasoning_gate: Gate, tail: str, text: str, reasoning: str, content: str
) -> None:
    reply = joined(stream(reasoning_gate, CHAT, *text, tail=tail))
    assert (reply["reasoning"], reply["content"]) == (reasoning, content)


def test_text_before_acceptance_waits_for_the_end_of_the_prompt(reasoning_gate: Gate) -> None:
    future = reasoning_gate.post(CHAT | {"stream": True})
    submit = reasoning_gate.submit()
    assert submit.prompt_options.with_tail
    reasoning_gate.delta(submit, "Hm.</think>")
    reasoning_gate.finish(submit, "Yes.")
    reasoning_gate.accept(submit, tail="<think>\n")
    _, *events = events_of(future.result().text)
    reply = joined([choice for event in events for choice in event["choices"]])
    assert (reply["reasoning"], reply["content"]) == ("Hm.", "Yes.")


def test_a_request_can_be_aborted_before_acceptance(reasoning_gate: Gate) -> None:
    future = reasoning_gate.post(CHAT | {"stream": True, "request_id": "mine"})
    submit = reasoning_gate.submit()
    reasoning_gate.delta(submit, "Hm.")
    reasoning_gate.post({"request_ids": ["mine"]}, "/abort_requests").result()
    reasoning_gate.finish(submit, finish=m.Finish.ABORT)
    _, *events = events_of(future.result().text)
    assert joined([choice for event in events for choice in event["choices"]])["finish_reason"] == "abort"


def test_calls_follow_reasoning(reasoning_gate: Gate) -> None:
    choice = whole(reasoning_gate, WITH_TOOLS, f"<think>\nI need <tool_call>.\n</think>\n\n{FIND}")
    assert choice["message"]["reasoning"] == "I need <tool_call>."
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"


# ------------------------------------------------------------------------------------------- the official client


def test_the_official_client_accumulates_calls_from_a_stream(gate: Gate) -> None:
    with openai.OpenAI(base_url=f"{gate.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:

        def read() -> Any:
            messages: Any = CHAT["messages"]
            tools: Any = TOOLS
            with client.chat.completions.stream(model=MODEL, messages=messages, tools=tools) as stream:
                return stream.get_final_completion().choices[0]

        future = gate.do(read)
        submit = gate.begin()
        for char in f"So:\n{FIND}\n{NOW}":
            gate.delta(submit, char)
        gate.finish(submit)
        choice = future.result()
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "So:"
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("find", '{"text": "a"}'), ("now", "{}")]
