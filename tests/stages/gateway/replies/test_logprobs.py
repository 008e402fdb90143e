"""What replies tell of ids: every id once, in order, with its exact bytes; whole, streamed, and in repetitions."""

import json
import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import logprob_dtype
from pipeline.stages.gateway.replies.logprobs import IMPOSSIBLE
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of
from tests.stages.gateway.replies.test_text_offsets import cut, expected

TEXT = "aé😀"


def records(*scores: float, top: list[tuple[int, float]] | None = None) -> bytes:
    """Of ids of these log probabilities, each with the same likeliest ones."""
    table = np.zeros(len(scores), logprob_dtype(len(top or [])))
    table["logprob"] = scores
    if top:
        table["top_ids"] = [one for one, _ in top]
        table["top_logprobs"] = [score for _, score in top]
    return table.tobytes()


def with_tops(pieces: list[bytes], *tops: bytes) -> list[bytes]:
    return [named for piece in pieces for named in (piece, *tops)]


class TestChats:
    def test_every_cut_of_a_text_gives_its_bytes_back(self, gate: Gate) -> None:
        data = TEXT.encode()
        for num in (0, 1, 2, 6):
            for places in list(combinations(range(1, len(data)), num))[:8]:
                pieces = cut(data, places)
                response = gate.post(CHAT | {"logprobs": True})
                submit = gate.begin()
                scores = [-1.0 - i for i in range(len(pieces))]
                gate.delta(submit, TEXT, len(pieces), records=records(*scores), pieces=pieces, finish=m.Finish.LENGTH)
                content = response.result().json()["choices"][0]["logprobs"]["content"]
                assert [one["logprob"] for one in content] == scores
                assert [bytes(one["bytes"]) for one in content] == pieces
                assert [one["top_logprobs"] for one in content] == [[]] * len(pieces)

    def test_names_are_text_or_escaped_bytes(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 2})
        submit = gate.begin()
        assert submit.options.num_logprobs == 2
        top = [(7, -0.25), (8, -math.inf)]
        told = records(-0.5, -math.inf, math.nan, top=top)
        pieces = with_tops([b"a", b" \xf0\x9f", b"<|im_end|>"], b"b", b"\xff")
        gate.delta(submit, "a", 3, records=told, pieces=pieces, finish=m.Finish.STOP)
        choice = response.result().json()["choices"][0]
        tops = [
            {"token": "b", "logprob": -0.25, "bytes": [98]},
            {"token": "\\xff", "logprob": IMPOSSIBLE, "bytes": [255]},
        ]
        assert choice["logprobs"] == {
            "content": [
                {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": tops},
                {"token": " \\xf0\\x9f", "logprob": IMPOSSIBLE, "bytes": [32, 240, 159], "top_logprobs": tops},
                {"token": "<|im_end|>", "logprob": IMPOSSIBLE, "bytes": [*b"<|im_end|>"], "top_logprobs": tops},
            ],
            "refusal": None,
        }

    def test_tokens_may_be_named_by_their_ids(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True})
        submit = gate.begin()
        told = records(-0.5, top=[(7, -0.25)])
        gate.delta(submit, "é", records=told, pieces=[b"\xc3\xa9", b"b"], finish=m.Finish.STOP)
        (one,) = response.result().json()["choices"][0]["logprobs"]["content"]
        assert (one["token"], one["bytes"]) == ("token_id:0", [0xC3, 0xA9])
        assert one["top_logprobs"][0]["token"] == "token_id:7"

    def test_without_them_nothing_is_asked_and_nothing_told(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.serve()
        assert submit.options.num_logprobs == -1 and not submit.options.with_pieces
        assert response.result().json()["choices"][0]["logprobs"] is None

    def test_of_the_prompt_stand_with_the_reply(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"prompt_logprobs": 1, "n": 2})
        submit = gate.submit()
        assert submit.prompt_options.with_pieces
        gate.accept(submit, pieces=[b"<s>", b"\xf0\x9f", b"b"])
        gate.delta(submit, num_ids=0, prompt=(0, records(-3.0, top=[(1, -3.0)]), [b"\xf0\x9f"]))
        gate.delta(submit, num_ids=0, prompt=(1, records(-math.inf, top=[(7, -0.5)]), [b"c"]))
        gate.finish(submit, "x", 0)
        gate.finish(submit, "y", 1)
        body = response.result().json()
        assert body["prompt_logprobs"] == [
            None,
            {"1": {"logprob": -3.0, "rank": 1, "decoded_token": "\\xf0\\x9f"}},
            {
                "2": {"logprob": IMPOSSIBLE, "rank": None, "decoded_token": "b"},
                "7": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            },
        ]
        assert "prompt_token_ids" not in body

    def test_ids_stand_where_vllm_has_them(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"return_token_ids": True, "n": 2})
        submit = gate.begin()
        gate.delta(submit, "x", 2, finish=m.Finish.STOP)
        gate.delta(submit, "y", 1, index=1, finish=m.Finish.STOP)
        body = response.result().json()
        assert body["prompt_token_ids"] == [0, 1, 2]
        assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1], [0]]


class TestCompletions:
    def test_every_cut_of_a_text_has_its_offsets(self, gate: Gate) -> None:
        data = TEXT.encode()
        for num in (0, 1, 2, 6):
            for places in list(combinations(range(1, len(data)), num))[:8]:
                pieces = cut(data, places)
                response = gate.complete(COMPLETION | {"logprobs": 0})
                submit = gate.begin()
                told = records(*[-1.0] * len(pieces))
                gate.delta(submit, TEXT, len(pieces), records=told, pieces=pieces, finish=m.Finish.LENGTH)
                choice = response.result().json()["choices"][0]
                assert choice["logprobs"]["text_offset"] == expected(pieces)
                assert choice["logprobs"]["token_logprobs"] == [-1.0] * len(pieces)
                names = choice["logprobs"]["tokens"]
                for name, piece in zip(names, pieces, strict=True):
                    assert name == piece.decode(errors="ignore") or name.startswith("bytes:")
                assert [list(one) for one in choice["logprobs"]["top_logprobs"]] == [[name] for name in names]

    def test_the_likeliest_come_first_and_the_token_itself_is_among_them(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"logprobs": 2})
        submit = gate.begin()
        told = records(-2.0, -0.25, top=[(0, -0.25), (8, -1.5)])
        pieces = [b"z", b"b", b"\xff", b"b", b"b", b"b"]  # of the last, two ids are called the same
        gate.delta(submit, "zb", 2, records=told, pieces=pieces, finish=m.Finish.STOP)
        logprobs = response.result().json()["choices"][0]["logprobs"]
        assert [list(one.items()) for one in logprobs["top_logprobs"]] == [
            [("b", -0.25), ("bytes:\\xff", -1.5), ("z", -2.0)],
            [("b", -0.25)],
        ]

    def test_a_prompt_that_is_repeated_has_its_own(self, gate: Gate) -> None:
        for streams in (False, True):
            response = gate.complete(COMPLETION | {"prompt": "Hé", "echo": True, "logprobs": 1, "stream": streams})
            submit = gate.submit()
            gate.accept(submit, pieces=[b"<s>", b"H", b"\xc3", b"\xa9"])
            top = [(7, -0.5)]
            gate.delta(submit, num_ids=0, prompt=(0, records(-1.0, top=top), [b"x"]))
            gate.delta(submit, num_ids=0, prompt=(1, records(-2.0, -3.0, top=top), [b"x", b"x"]))
            gate.delta(submit, "!", records=records(-4.0, top=top), pieces=[b"!", b"x"], finish=m.Finish.STOP)
            if streams:
                events = events_of(response.result().text)
                choices = [event["choices"][0] for event in events]
                text = "".join(choice["text"] for choice in choices)
                parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                told = {name: [one for part in parts for one in part[name]] for name in parts[0]}
                assert parts[0]["tokens"][0] == "<s>"
            else:
                choice = response.result().json()["choices"][0]
                text, told = choice["text"], choice["logprobs"]
            assert text == "Hé!"
            assert told["tokens"] == ["<s>", "H", "bytes:\\xc3", "bytes:\\xa9", "!"]
            assert told["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
            assert told["text_offset"] == [0, 0, 1, 1, 2]
            assert told["top_logprobs"][0] is None and told["top_logprobs"][4] == {"x": -0.5, "!": -4.0}

    def test_a_prompt_alone_is_scored_and_what_is_drawn_is_not_shown(self, gate: Gate) -> None:
        for streams in (False, True):
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            body = {"prompt": [0, 1], "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
            response = gate.complete(COMPLETION | body | options)
            submit = gate.submit()
            assert submit.options.max_tokens == 1
            ids = np.arange(2, dtype=np.int32).tobytes()
            gate.rig.send(m.Accepted(submit.request_id, 1, ids, "ab", pieces=[b"a", b"b"]), "ingest.0")
            gate.delta(submit, num_ids=0, prompt=(0, records(-1.0), []))
            gate.delta(submit, "drawn", records=records(-9.0), pieces=[b"drawn"], finish=m.Finish.STOP, stop_reason=5)
            events = events_of(response.result().text) if streams else [response.result().json()]
            choices = [event["choices"][0] for event in events if event["choices"]]
            assert "".join(choice["text"] for choice in choices) == "ab"
            told = choices[0]["logprobs"]
            assert (told["tokens"], told["token_logprobs"], told["text_offset"]) == (["a", "b"], [None, -1.0], [0, 1])
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
            assert choices[0]["prompt_token_ids"] == [0, 1]
            assert [one for choice in choices for one in choice["token_ids"]] == []
            assert events[-1]["usage"]["completion_tokens"] == 0

    def test_each_prompt_has_its_own(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "prompt_logprobs": 0, "return_token_ids": True})
        for score in (-1.0, -2.0):
            submit = gate.submit()
            gate.accept(submit, pieces=[b"x", b"y"])
            gate.delta(submit, "!", prompt=(0, records(score), []), finish=m.Finish.LENGTH)
        choices = response.result().json()["choices"]
        found = {choice["prompt_logprobs"][1]["1"]["logprob"] for choice in choices}
        assert found == {-1.0, -2.0}
        assert [choice["prompt_token_ids"] for choice in choices] == [[0, 1], [0, 1]]

    def test_best_of_ranks_with_the_likeliest_in_between(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"best_of": 2, "logprobs": 1})
        submit = gate.begin()
        for index, score in ((0, -3.0), (1, -1.0)):
            told = records(score, top=[(5, -0.5 if index == 0 else -7.0)])
            gate.delta(submit, f"{index}", index=index, records=told, pieces=[b"p", b"q"], finish=m.Finish.STOP)
        (choice,) = response.result().json()["choices"]
        assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("1", [-1.0])


class TestStreams:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_each_id_is_told_once_in_order_though_text_is_held_back(self, gate: Gate, path: str) -> None:
        is_chat = "chat" in path
        body = (CHAT | {"logprobs": True}) if is_chat else (COMPLETION | {"logprobs": 0})
        response = gate.post(body | {"stream": True, "return_token_ids": True}, path)
        submit = gate.begin()
        pieces = cut("a😀b".encode(), (1, 2, 4, 5))
        texts = ["a", "", "", "😀", "b"]
        for place, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
            gate.delta(submit, text, records=records(-1.0 - place), pieces=[piece])
        gate.delta(submit, "", records=records(-6.0), pieces=[b"<e>"])
        gate.delta(submit, "", num_ids=0, finish=m.Finish.LENGTH)
        events = events_of(response.result().text)
        choices = [event["choices"][0] for event in events]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if is_chat:
            scores = [one["logprob"] for part in told for one in part["content"]]
            assert [bytes(one["bytes"]) for part in told for one in part["content"]] == [*pieces, b"<e>"]
            assert events[0]["prompt_token_ids"] == [0, 1, 2]
            assert sum("prompt_token_ids" in event for event in events) == 1
        else:
            scores = [one for part in told for one in part["token_logprobs"]]
            assert [one for part in told for one in part["text_offset"]] == [0, 1, 1, 1, 2, 3]
            assert choices[0]["prompt_token_ids"] == [0, 1, 2]
            assert sum("prompt_token_ids" in choice for choice in choices) == 1
        assert scores == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
        assert [one for choice in choices for one in choice.get("token_ids", [])] == [0, 1, 2, 3, 4, 5]

    def test_repetitions_are_told_once(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 1})
        submit = gate.begin()
        top = [(7, -0.5)]
        gate.delta(submit, "ab", 2, records=records(-1.0, -2.0, top=top), pieces=[b"a", b"x", b"b", b"x"])
        told = records(-2.0, -3.0, top=top)
        pieces = [b"b", b"x", b"c", b"x"]
        gate.delta(submit, "bc", 2, back=1, records=told, pieces=pieces, finish=m.Finish.STOP)
        content = response.result().json()["choices"][0]["logprobs"]["content"]
        assert [(one["token"], one["logprob"]) for one in content] == [("a", -1.0), ("b", -2.0), ("c", -3.0)]

    def test_usage_is_in_every_event_where_it_is_asked_for(self, gate: Gate) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = gate.complete(COMPLETION | {"stream": True, "n": 2, "stream_options": options})
        submit = gate.begin()
        gate.delta(submit, "a", 2)
        gate.delta(submit, "b", 1, index=1, finish=m.Finish.STOP)
        gate.delta(submit, "c", 1, finish=m.Finish.STOP)
        events = events_of(response.result().text)
        used: dict[int, list[int]] = {0: [], 1: []}
        for event in events[:-1]:
            assert event["usage"]["prompt_tokens"] == 3
            used[event["choices"][0]["index"]].append(event["usage"]["completion_tokens"])
        assert used[0] == sorted(used[0]) and used[0][-1] == 3 and used[1][-1] == 1
        assert events[-1]["usage"]["completion_tokens"] == 4

    def test_json_has_no_infinity(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"logprobs": 1})
        submit = gate.begin()
        told = records(-math.inf, top=[(5, math.nan)])
        gate.delta(submit, "a", records=told, pieces=[b"a", b"b"], finish=m.Finish.STOP)

        def fail(name: str) -> None:
            raise AssertionError(name)

        json.loads(response.result().text, parse_constant=fail)


class TestMuchAtOnce:
    """Making it takes a while, in which others are served: whole in a thread, streamed by and by."""

    NUM_IDS = 400

    def give(self, gate: Gate, submit: m.Submit) -> None:
        top = [(place, -1.0 - place) for place in range(20)]
        told = records(*[-0.5] * self.NUM_IDS, top=top)
        pieces = with_tops([b"a"] * self.NUM_IDS, *[b"b"] * 20)
        for index in range(submit.options.n):
            text = "a" * self.NUM_IDS
            gate.delta(submit, text, self.NUM_IDS, index=index, records=told, pieces=pieces, finish=m.Finish.LENGTH)

    def test_whole(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 20, "n": 4})
        self.give(gate, gate.begin())
        for choice in response.result().json()["choices"]:
            assert [len(one["top_logprobs"]) for one in choice["logprobs"]["content"]] == [20] * self.NUM_IDS

    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/inference/v1/generate"])
    def test_streamed(self, gate: Gate, path: str) -> None:
        params = {"n": 8, "logprobs": 20}
        chat = CHAT | {"logprobs": True, "top_logprobs": 20, "n": 8}
        body = chat if "chat" in path else {"token_ids": [1], "sampling_params": params}
        response = gate.post(body | {"stream": True}, path)
        self.give(gate, gate.begin())
        told = dict.fromkeys(range(8), 0)
        for event in events_of(response.result().text):
            (choice,) = event["choices"]
            told[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
        assert told == dict.fromkeys(range(8), self.NUM_IDS)


class TestManyOfPrompts:
    """A reply repeats them with each choice, and so may be many times larger than what was computed."""

    MOST = 2**20
    """limits.max_prompt_logprobs"""

    @pytest.mark.parametrize(
        ("asked", "each"),
        [
            ({"prompt_logprobs": 20, "n": 128}, 21 * 128),
            ({"echo": True, "logprobs": 3, "n": 100}, 4 * 100),
            ({"echo": True, "logprobs": 3, "n": 100, "stream": True}, 4 * 100),
            ({"echo": True, "logprobs": 3, "prompt_logprobs": 0}, 5),
        ],
    )
    def test_no_more_are_told_than_may_be(self, gate: Gate, asked: dict[str, Any], each: int) -> None:
        num_ids = self.MOST // each
        response = gate.complete(COMPLETION | asked)
        submit = gate.submit()
        gate.accept(submit, num_ids + 1)
        refused = response.result()
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (400, "invalid_value")
        assert error["param"] == ("prompt_logprobs" if "prompt_logprobs" in asked else "logprobs")
        assert f"{(num_ids + 1) * each} log probabilities" in error["message"]
        assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id

    def test_prompts_count_together(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "prompt_logprobs": 0})
        first, second = gate.submit(), gate.submit()
        gate.accept(first, self.MOST // 2)
        gate.accept(second, self.MOST // 2 + 1)
        assert response.result().status_code == 400

    def test_a_chat_tells_them_once(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"prompt_logprobs": 0, "n": 2})
        submit = gate.submit()
        gate.accept(submit, self.MOST)
        for index in range(2):
            gate.finish(submit, "a", index)
        assert response.result().status_code == 200

    def test_of_ids_alone_the_field_is_named_where_it_stands(self, gate: Gate) -> None:
        body = {"token_ids": [1, 2], "sampling_params": {"prompt_logprobs": 1}}
        response = gate.post(body, "/inference/v1/generate")
        gate.reject(gate.submit(), m.Failure(400, "'bad_words[0]' is empty", "bad_words"))
        error = response.result().json()["error"]
        assert error["param"] == "sampling_params.bad_words"
        assert error["message"] == "'sampling_params.bad_words[0]' is empty"
        response = gate.post(body, "/inference/v1/generate")
        gate.accept(gate.submit(), self.MOST)
        assert response.result().json()["error"]["param"] == "sampling_params.prompt_logprobs"


def test_where_a_model_has_fewer_ids_than_are_asked_for_those_are_told(gate: Gate) -> None:
    response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 3})
    told = records(-0.5, top=[(1, -0.5), (0, -1.0), (-1, -math.inf)])
    gate.delta(gate.begin(), "a", records=told, pieces=[b"a", b"a", b"b", b""], finish=m.Finish.STOP)
    (one,) = response.result().json()["choices"][0]["logprobs"]["content"]
    assert [top["token"] for top in one["top_logprobs"]] == ["a", "b"]
