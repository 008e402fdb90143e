"""Replies with many log probabilities are complete, and are made in a thread or in parts."""

import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import ChatSettings
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.responses.reply import ResponseEvents
from pipeline.stages.gateway.replies import logprobs as logprobs_module
from pipeline.stages.gateway.replies.token_details import MAX_ENTRIES_AT_ONCE
from tests.stages.gateway.gate import CHAT, COMPLETION, MODEL, Gate, events_of
from tests.stages.gateway.replies.choices.scored import flat, token_outputs, with_tops


class TestLargeReplies:
    """Large replies do not block others: complete ones are built in a thread, streamed ones in parts."""

    NUM_IDS = 400

    def give(self, gate: Gate, submit: m.Submit) -> None:
        top = [(rank, -1.0 - rank) for rank in range(20)]
        payload = token_outputs(*[-0.5] * self.NUM_IDS, top=top)
        pieces = with_tops([b"a"] * self.NUM_IDS, *[b"b"] * 20)
        for index in range(submit.options.n):
            text = "a" * self.NUM_IDS
            gate.delta(
                submit, text, self.NUM_IDS, index=index, token_outputs=payload, pieces=pieces, finish=m.Finish.LENGTH
            )

    def test_a_large_reply_is_complete(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 20, "n": 4})
        self.give(gate, gate.begin())
        for choice in response.result().json()["choices"]:
            assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [20] * self.NUM_IDS

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 20}),
            ("/v1/completions", COMPLETION | {"logprobs": 20}),
            ("/inference/v1/generate", {"token_ids": [1], "sampling_params": {"logprobs": 20}}),
            ("/api/chat", CHAT | {"logprobs": True, "top_logprobs": 20, "stream": False}),
        ],
    )
    def test_log_probabilities_are_not_encoded_in_one_call(
        self, gate: Gate, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The encoder holds Python's lock while it works, and the event loop waits for it."""
        encoded: list[bytes] = []
        encode = msgspec.json.encode

        def noted(value: Any, **options: Any) -> bytes:
            encoded.append(data := encode(value, **options))
            return data

        monkeypatch.setattr(msgspec.json, "encode", noted)
        response = gate.post(body, path)
        self.give(gate, gate.begin())
        top = b'"token_id:0"' if "generate" in path else b'"b"'
        assert response.result().content.count(top) >= self.NUM_IDS
        assert encoded and not any(top in data for data in encoded)

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate"])
    def test_a_large_stream_is_complete(self, gate: Gate, path: str) -> None:
        params = {"n": 8, "logprobs": 20}
        chat = CHAT | {"logprobs": True, "top_logprobs": 20, "n": 8}
        body = chat if "chat" in path else {"token_ids": [1], "sampling_params": params}
        response = gate.post(body | {"stream": True}, path)
        self.give(gate, gate.begin())
        num_ids = dict.fromkeys(range(8), 0)
        for event in events_of(response.result().text):
            (choice,) = event["choices"]
            num_ids[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
        assert num_ids == dict.fromkeys(range(8), self.NUM_IDS)


class TestManyOfOneSequence:
    """A slow client's output and an echoed prompt have many log probabilities at once: a stream has them in parts, each
    of which takes a turn of the event loop, and is the same as a complete reply."""

    NUM_IDS = 500
    NUM_ENTRIES = 21
    """Of each"""

    def give(self, gate: Gate, *, is_echoed: bool = False) -> None:
        """Output of NUM_IDS, and as many log probabilities of the prompt, with a special token in it."""
        submit = gate.submit()
        top = [(rank, -1.0 - rank) for rank in range(20)]
        tops = [b"%d" % rank for rank in range(20)]
        each = [b"<s>" if i == 2 else b"%d " % i for i in range(self.NUM_IDS)]
        gate.accept(submit, pieces=each if submit.prompt_options.with_pieces else None)
        scores = [-0.5 - i / 1024 for i in range(self.NUM_IDS)]
        if is_echoed:
            prompt = token_outputs(*scores[1:], top=top)
            gate.delta(submit, num_ids=0, prompt=(0, prompt, tops * (self.NUM_IDS - 1)))
        text = "".join(f"{i} " for i in range(self.NUM_IDS) if i != 2)
        data, pieces = token_outputs(*scores, top=top), with_tops(each, *tops)
        gate.delta(submit, text, self.NUM_IDS, token_outputs=data, pieces=pieces, finish=m.Finish.LENGTH)

    @staticmethod
    def chat(body: dict[str, Any]) -> dict[str, Any]:
        return CHAT | {"logprobs": True, "top_logprobs": 20} | body

    @pytest.mark.parametrize("more", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
    def test_chats(self, tmp_path: Path, more: dict[str, Any]) -> None:
        with Gate(tmp_path, chat=ChatSettings(tool_call_parser="hermes")) as gate:
            self.check_chat(gate, more)

    def check_chat(self, gate: Gate, more: dict[str, Any]) -> None:
        whole = gate.post(self.chat(more))
        self.give(gate)
        stream = gate.post(self.chat(more | {"stream": True}))
        self.give(gate)
        (expected_choice,) = whole.result().json()["choices"]
        events = [event["choices"][0] for event in events_of(stream.result().text)]
        parts = [event["logprobs"]["content"] for event in events if event.get("logprobs")]
        assert max(map(len, parts)) * self.NUM_ENTRIES <= MAX_ENTRIES_AT_ONCE
        assert flat(parts) == expected_choice["logprobs"]["content"] and len(flat(parts)) == self.NUM_IDS
        assert "".join(event["delta"].get("content") or "" for event in events) == expected_choice["message"]["content"]
        assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]

    @pytest.mark.parametrize("is_echoed", [False, True])
    def test_completions(self, gate: Gate, is_echoed: bool) -> None:
        prompt = "".join("<s>" if i == 2 else f"{i} " for i in range(self.NUM_IDS))
        body = COMPLETION | {"prompt": prompt, "logprobs": 20, "echo": is_echoed, "return_token_ids": True}
        whole = gate.complete(body)
        self.give(gate, is_echoed=is_echoed)
        stream = gate.complete(body | {"stream": True})
        self.give(gate, is_echoed=is_echoed)
        (expected_choice,) = whole.result().json()["choices"]
        events = [event["choices"][0] for event in events_of(stream.result().text)]
        parts = [event["logprobs"] for event in events if event["logprobs"]]
        assert max(len(part["tokens"]) for part in parts) * self.NUM_ENTRIES <= MAX_ENTRIES_AT_ONCE
        joined = {name: flat(part[name] for part in parts) for name in parts[0]}
        assert joined == expected_choice["logprobs"]
        assert len(joined["tokens"]) == self.NUM_IDS * (1 + is_echoed)
        assert "".join(event["text"] for event in events) == expected_choice["text"]
        assert flat(event["token_ids"] for event in events) == expected_choice["token_ids"]

    def test_ids(self, gate: Gate) -> None:
        body = {"token_ids": [1], "sampling_params": {"logprobs": 20}, "stream": True}
        stream = gate.post(body, "/inference/v1/generate")
        self.give(gate)
        events = [event["choices"][0] for event in events_of(stream.result().text)]
        assert flat(event["token_ids"] for event in events) == list(range(self.NUM_IDS))
        assert max(len(event["token_ids"]) for event in events) * self.NUM_ENTRIES <= MAX_ENTRIES_AT_ONCE
        assert all(len(event["token_ids"]) == len(event["logprobs"]["content"]) for event in events)
        assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]

    def test_ollama(self, gate: Gate) -> None:
        stream = gate.post(CHAT | {"logprobs": True, "top_logprobs": 20}, "/api/chat")
        self.give(gate)
        lines = [json.loads(line) for line in stream.result().text.splitlines()]
        parts = [line["logprobs"] for line in lines if "logprobs" in line]
        assert max(map(len, parts)) * self.NUM_ENTRIES <= MAX_ENTRIES_AT_ONCE
        assert [one["logprob"] for one in flat(parts)] == [-0.5 - i / 1024 for i in range(self.NUM_IDS)]
        assert "".join(line["message"]["content"] for line in lines).startswith("0 1 3 ") and lines[-1]["done"]

    @pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "background": True}])
    def test_responses(self, gate: Gate, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """The text's event has all of them; they are formatted in parts."""
        nums: list[int] = []
        of_chat = logprobs_module.of_chat

        def counted(*args: Any, **kwargs: Any) -> Any:
            found = of_chat(*args, **kwargs)
            nums.append(len(found.content))
            return found

        monkeypatch.setattr(logprobs_module, "of_chat", counted)
        body = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20}
        reply = gate.post(body | more, "/v1/responses")
        self.give(gate)
        text = reply.result().text
        if more:
            last = text.removesuffix("\n\n").rpartition("data: ")[2]
            response = json.loads(last)["response"]
        else:
            response = json.loads(text)
        found = response["output"][0]["content"][0]["logprobs"]
        assert [one["logprob"] for one in found] == [-0.5 - i / 1024 for i in range(self.NUM_IDS)]
        assert max(nums) * self.NUM_ENTRIES <= MAX_ENTRIES_AT_ONCE

    def test_events_that_repeat_them_are_made_in_a_thread(self, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
        threads: dict[str, set[int]] = {}
        framed = ResponseEvents._framed

        def noted(events: ResponseEvents, event: Any) -> bytes:
            threads.setdefault(event.type, set()).add(threading.get_ident())
            return framed(events, event)

        monkeypatch.setattr(ResponseEvents, "_framed", noted)
        body = {"model": MODEL, "input": "Hi", "include": ["message.output_text.logprobs"], "top_logprobs": 20}
        reply = gate.post(body | {"stream": True}, "/v1/responses")
        self.give(gate)
        types = [line.removeprefix("event: ") for line in reply.result().text.splitlines() if line.startswith("event")]
        assert types[-4:] == [
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]
        assert not any(threads["response.created"] & threads[kind] for kind in types[-4:])
