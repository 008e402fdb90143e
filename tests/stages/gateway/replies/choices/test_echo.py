"""`echo` puts the prompt's text before the output's."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai import parsing as parse
from tests.stages.gateway.gate import CHAT, COMPLETION, NONE_CACHED, Gate, events_of
from tests.stages.gateway.parsing.bodies import LIMITS, refused

ECHO = COMPLETION | {"echo": True}
STREAM = ECHO | {"stream": True, "stream_options": {"include_usage": True}}


def accept(gate: Gate, submit: m.Submit, num_ids: int = 3, text: str | None = None) -> None:
    ids = np.arange(num_ids, dtype=np.int32).tobytes()
    gate.rig.send(m.Accepted(submit.request_id, submit.attempt, ids, text), "ingest.0")


def texts_of(stream: str) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events_of(stream):
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


class TestCompleteReply:
    def test_every_choice_of_every_prompt_begins_with_its_prompt(self, gate: Gate) -> None:
        response = gate.complete(ECHO | {"prompt": ["Ä ", "b"], "n": 2})
        submits = [gate.submit(), gate.submit()]
        for submit, name in zip(submits, "xy", strict=True):
            accept(gate, submit, 2)
            for index in range(2):
                gate.finish(submit, f"{name}{index}", index)
        body = response.result().json()
        assert [c["text"] for c in body["choices"]] == ["Ä x0", "Ä x1", "by0", "by1"]
        assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, **NONE_CACHED}

    def test_the_text_of_token_ids_is_requested_from_ingest(self, gate: Gate) -> None:
        response = gate.complete(ECHO | {"prompt": [[1, 2], [3]]})
        first, second = gate.submit(), gate.submit()
        assert first.prompt_options == second.prompt_options == m.PromptOptions(with_text=True)
        accept(gate, first, 2, "one")
        accept(gate, second, 1, "two")
        gate.finish(second, "!")
        gate.finish(first, "?")
        assert [c["text"] for c in response.result().json()["choices"]] == ["one?", "two!"]

    def test_the_text_of_a_text_prompt_is_not_requested(self, gate: Gate) -> None:
        response = gate.complete(ECHO)
        assert gate.serve("!").prompt_options == m.PromptOptions()
        assert response.result().json()["choices"][0]["text"] == "Hi!"

    def test_output_before_acceptance_follows_the_prompt(self, gate: Gate) -> None:
        response = gate.complete(ECHO)
        submit = gate.submit()
        gate.finish(submit, " there")
        gate.rig.load()
        accept(gate, submit)
        assert response.result().json()["choices"][0]["text"] == "Hi there"


class TestStream:
    @pytest.mark.parametrize("early", [False, True])
    def test_a_stream_begins_with_the_prompt_of_each_choice(self, gate: Gate, early: bool) -> None:
        response = gate.complete(STREAM | {"prompt": ["a", "b"], "n": 2})
        submits = [gate.submit(), gate.submit()]
        if early:  # deltas and acceptances come over different channels
            for submit in submits:
                gate.delta(submit, "-", index=0)
            gate.rig.load()
        for submit in submits:
            accept(gate, submit, 2)
        for submit in submits:
            for index in range(2):
                gate.finish(submit, f"{index}", index)
        text = response.result().text
        dash = "-" if early else ""
        assert texts_of(text) == {0: f"a{dash}0", 1: "a1", 2: f"b{dash}0", 3: "b1"}
        assert events_of(text)[-1]["usage"]["completion_tokens"] == (6 if early else 4)

    def test_repeated_text_is_sent_once(self, gate: Gate) -> None:
        response = gate.complete(STREAM)
        submit = gate.submit()
        accept(gate, submit)
        gate.delta(submit, "abc", 3)
        gate.delta(submit, "bcd", 3, back=2)
        gate.finish(submit, "e")
        assert texts_of(response.result().text) == {0: "Hiabcde"}


class TestNoOutput:
    @pytest.mark.parametrize("n", [1, 2])
    def test_without_output_the_reply_is_the_prompt_and_takes_no_step(self, gate: Gate, n: int) -> None:
        response = gate.complete(ECHO | {"max_tokens": 0, "n": n})
        submit = gate.submit()
        assert submit.options.max_tokens == 0
        accept(gate, submit, 5)
        body = response.result().json()
        assert [(c["text"], c["finish_reason"]) for c in body["choices"]] == [("Hi", "length")] * n
        assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5, **NONE_CACHED}
        gate.rig.until(lambda load: load.num_open_requests == 0)
        assert gate.rig.nothing("schedule", 0)

    def test_an_echo_without_output_can_be_streamed(self, gate: Gate) -> None:
        response = gate.complete(STREAM | {"max_tokens": 0})
        accept(gate, gate.submit(), 5)
        *events, usage = events_of(response.result().text)
        assert [e["choices"][0]["finish_reason"] for e in events] == ["length"]
        assert texts_of(response.result().text) == {0: "Hi"}
        assert usage["usage"] == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5, **NONE_CACHED}

    def test_no_output_requires_echo(self, tmp_path: Path) -> None:
        error = refused(COMPLETION | {"max_tokens": 0}, parse.parse_completion)
        assert (error.status, error.param) == (400, "max_tokens")
        assert parse.parse_completion(json.dumps(ECHO | {"max_tokens": 0}).encode(), LIMITS).options.max_tokens == 0


@pytest.mark.parametrize("value", [0, "yes", [True]])
def test_echo_must_be_a_boolean(value: Any) -> None:
    error = refused(COMPLETION | {"echo": value}, parse.parse_completion)
    assert (error.status, error.param) == (400, "echo")


CHAT_ECHO = {
    "model": CHAT["model"],
    "messages": [{"role": "user", "content": "Go on"}, {"role": "assistant", "content": "An apple a day, "}],
    "echo": True,
}


class TestChats:
    @pytest.mark.parametrize(
        "fields",
        [{"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}, {}],
    )
    def test_a_last_message_of_the_assistant_comes_before_the_reply(self, gate: Gate, fields: dict[str, Any]) -> None:
        response = gate.post(CHAT_ECHO | fields | {"n": 2})
        submit = gate.begin()
        gate.finish(submit, "keeps", 0)
        gate.finish(submit, "is", 1)
        messages = [choice["message"] for choice in response.result().json()["choices"]]
        assert [message["content"] for message in messages] == ["An apple a day, keeps", "An apple a day, is"]
        assert messages[0]["role"] == "assistant"

    def test_in_a_stream_it_is_an_event_of_its_own(self, gate: Gate) -> None:
        response = gate.post(CHAT_ECHO | {"n": 2, "stream": True})
        submit = gate.begin()
        gate.finish(submit, "keeps", 0)
        gate.finish(submit, "is", 1)
        choices = [event["choices"][0] for event in events_of(response.result().text)]
        for index, end in enumerate(("keeps", "is")):
            texts = [choice["delta"]["content"] for choice in choices if choice["index"] == index]
            assert texts == ["", "An apple a day, ", end]

    def test_messages_of_other_roles_and_other_requests_are_not_echoed(self, gate: Gate) -> None:
        for body in (CHAT | {"echo": True}, CHAT_ECHO | {"echo": False}):
            response = gate.post(body)
            gate.serve("Hello")
            assert response.result().json()["choices"][0]["message"]["content"] == "Hello"

    def test_without_a_generation_prompt_the_reply_has_the_role_of_the_last_message(self, gate: Gate) -> None:
        fields = {"add_generation_prompt": False, "echo": True}
        message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
        response = gate.post(CHAT | fields | {"messages": [message]})
        gate.serve("c")
        reply = response.result().json()["choices"][0]["message"]
        assert (reply["role"], reply["content"]) == ("user", "a\nbc")
        response = gate.post(CHAT | fields | {"messages": [message], "stream": True})
        gate.serve("c")
        assert events_of(response.result().text)[0]["choices"][0]["delta"] == {"role": "user", "content": ""}
