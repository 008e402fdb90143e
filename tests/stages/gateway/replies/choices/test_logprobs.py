"""Replies report each token once, in order, with its exact bytes: complete, streamed and with repetitions."""

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.stages.gateway.replies.logprobs import IMPOSSIBLE
from tests.stages.gateway.gate import CHAT, COMPLETION, Gate, events_of
from tests.stages.gateway.replies.choices.scored import TEXT, token_outputs, with_tops
from tests.stages.gateway.replies.choices.test_text_offsets import cut, expected


class TestChats:
    def test_tokens_have_their_exact_bytes_however_the_text_is_split(self, gate: Gate) -> None:
        data = TEXT.encode()
        for num in (0, 1, 2, 6):
            for cuts in list(combinations(range(1, len(data)), num))[:8]:
                pieces = cut(data, cuts)
                response = gate.post(CHAT | {"logprobs": True})
                submit = gate.begin()
                scores = [-1.0 - i for i in range(len(pieces))]
                gate.delta(
                    submit,
                    TEXT,
                    len(pieces),
                    token_outputs=token_outputs(*scores),
                    pieces=pieces,
                    finish=m.Finish.LENGTH,
                )
                content = response.result().json()["choices"][0]["logprobs"]["content"]
                assert [one["logprob"] for one in content] == scores
                assert [bytes(one["bytes"]) for one in content] == pieces
                assert [one["top_logprobs"] for one in content] == [[]] * len(pieces)

    def test_tokens_are_text_or_escaped_bytes(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 2})
        submit = gate.begin()
        assert submit.options.num_logprobs == 2
        top = [(7, -0.25), (8, -math.inf)]
        payload = token_outputs(-0.5, -math.inf, math.nan, top=top)
        pieces = with_tops([b"a", b" \xf0\x9f", b"<|im_end|>"], b"b", b"\xff")
        gate.delta(submit, "a", 3, token_outputs=payload, pieces=pieces, finish=m.Finish.STOP)
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

    def test_tokens_can_be_reported_as_ids(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True})
        submit = gate.begin()
        payload = token_outputs(-0.5, top=[(7, -0.25)])
        gate.delta(submit, "é", token_outputs=payload, pieces=[b"\xc3\xa9", b"b"], finish=m.Finish.STOP)
        (one,) = response.result().json()["choices"][0]["logprobs"]["content"]
        assert (one["token"], one["bytes"]) == ("token_id:0", [0xC3, 0xA9])
        assert one["top_logprobs"][0]["token"] == "token_id:7"

    @pytest.mark.parametrize("given", [[7], [7, 0]])
    def test_the_sampled_token_stands_before_the_ids_that_the_client_names(self, gate: Gate, given: list[int]) -> None:
        """Once, also if the client names it."""
        body = CHAT | {"logprobs": True, "logprob_token_ids": given, "return_tokens_as_token_ids": True}
        response = gate.post(body)
        top = [(7, -9.0), (0, -0.5)][: len(given)]
        pieces = [b"a", *(b"b", b"a")[: len(given)]]
        gate.delta(gate.begin(), "a", token_outputs=token_outputs(-0.5, top=top), pieces=pieces, finish=m.Finish.STOP)
        (one,) = response.result().json()["choices"][0]["logprobs"]["content"]
        assert [(other["token"], other["logprob"]) for other in one["top_logprobs"]] == [
            ("token_id:0", -0.5),
            ("token_id:7", -9.0),
        ]

    def test_no_logprobs_are_requested_or_returned_by_default(self, gate: Gate) -> None:
        response = gate.post(CHAT)
        submit = gate.serve()
        assert submit.options.num_logprobs == -1 and not submit.options.with_pieces
        assert response.result().json()["choices"][0]["logprobs"] is None

    def test_prompt_logprobs_are_a_field_of_the_response(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"prompt_logprobs": 1, "n": 2})
        submit = gate.submit()
        assert submit.prompt_options.with_pieces
        gate.accept(submit, pieces=[b"<s>", b"\xf0\x9f", b"b"])
        gate.delta(submit, num_ids=0, prompt=(0, token_outputs(-3.0, top=[(1, -3.0)]), [b"\xf0\x9f"]))
        gate.delta(submit, num_ids=0, prompt=(1, token_outputs(-math.inf, top=[(7, -0.5)]), [b"c"]))
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
        assert body["prompt_token_ids"] is None

    def test_token_ids_are_where_vllm_has_them(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"return_token_ids": True, "n": 2})
        submit = gate.begin()
        gate.delta(submit, "x", 2, finish=m.Finish.STOP)
        gate.delta(submit, "y", 1, index=1, finish=m.Finish.STOP)
        body = response.result().json()
        assert body["prompt_token_ids"] == [0, 1, 2]
        assert [choice["token_ids"] for choice in body["choices"]] == [[0, 1], [0]]


class TestCompletions:
    def test_offsets_are_correct_however_the_text_is_split(self, gate: Gate) -> None:
        data = TEXT.encode()
        for num in (0, 1, 2, 6):
            for cuts in list(combinations(range(1, len(data)), num))[:8]:
                pieces = cut(data, cuts)
                response = gate.complete(COMPLETION | {"logprobs": 0})
                submit = gate.begin()
                payload = token_outputs(*[-1.0] * len(pieces))
                gate.delta(submit, TEXT, len(pieces), token_outputs=payload, pieces=pieces, finish=m.Finish.LENGTH)
                choice = response.result().json()["choices"][0]
                assert choice["logprobs"]["text_offset"] == expected(pieces)
                assert choice["logprobs"]["token_logprobs"] == [-1.0] * len(pieces)
                names = choice["logprobs"]["tokens"]
                for name, piece in zip(names, pieces, strict=True):
                    assert name == piece.decode(errors="ignore") or name.startswith("bytes:")
                assert [list(one) for one in choice["logprobs"]["top_logprobs"]] == [[name] for name in names]

    def test_a_special_token_takes_no_text_of_the_ordinary_ones_that_spell_it(self, tmp_path: Path) -> None:
        added = [{"id": index, "content": text, "special": True} for index, text in ((0, "<s>"), (4, "</s>"))]
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        pieces = [b"<s>", b"<s", b">", b"a", b"</s>", b"b"]
        with Gate(tmp_path) as gate:
            for skips, text, offsets in (
                (True, "<s>ab", [0, 0, 2, 3, 4, 4]),
                (False, "<s><s>a</s>b", [0, 3, 5, 6, 7, 11]),
            ):
                response = gate.complete(COMPLETION | {"logprobs": 0, "skip_special_tokens": skips})
                submit = gate.begin()
                gate.delta(
                    submit, text, 6, token_outputs=token_outputs(*[-1.0] * 6), pieces=pieces, finish=m.Finish.LENGTH
                )
                logprobs = response.result().json()["choices"][0]["logprobs"]
                assert (logprobs["text_offset"], logprobs["tokens"][0]) == (offsets, "<s>")

    def test_top_logprobs_are_sorted_and_include_the_token(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"logprobs": 2})
        submit = gate.begin()
        payload = token_outputs(-2.0, -0.25, top=[(0, -0.25), (8, -1.5)])
        pieces = [b"z", b"b", b"\xff", b"b", b"b", b"b"]  # the last two ids have the same text
        gate.delta(submit, "zb", 2, token_outputs=payload, pieces=pieces, finish=m.Finish.STOP)
        logprobs = response.result().json()["choices"][0]["logprobs"]
        assert [list(one.items()) for one in logprobs["top_logprobs"]] == [
            [("b", -0.25), ("bytes:\\xff", -1.5), ("z", -2.0)],
            [("b", -0.25)],
        ]

    def test_an_echoed_prompt_has_logprobs(self, gate: Gate) -> None:
        for streams in (False, True):
            response = gate.complete(COMPLETION | {"prompt": "Hé", "echo": True, "logprobs": 1, "stream": streams})
            submit = gate.submit()
            gate.accept(submit, pieces=[b"<s>", b"H", b"\xc3", b"\xa9"])
            top = [(7, -0.5)]
            gate.delta(submit, num_ids=0, prompt=(0, token_outputs(-1.0, top=top), [b"x"]))
            gate.delta(submit, num_ids=0, prompt=(1, token_outputs(-2.0, -3.0, top=top), [b"x", b"x"]))
            gate.delta(
                submit, "!", token_outputs=token_outputs(-4.0, top=top), pieces=[b"!", b"x"], finish=m.Finish.STOP
            )
            if streams:
                events = events_of(response.result().text)
                choices = [event["choices"][0] for event in events]
                text = "".join(choice["text"] for choice in choices)
                parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
                merged = {name: [one for part in parts for one in part[name]] for name in parts[0]}
                assert parts[0]["tokens"][0] == "<s>"
            else:
                choice = response.result().json()["choices"][0]
                text, merged = choice["text"], choice["logprobs"]
            assert text == "Hé!"
            assert merged["tokens"] == ["<s>", "H", "bytes:\\xc3", "bytes:\\xa9", "!"]
            assert merged["token_logprobs"] == [None, -1.0, -2.0, -3.0, -4.0]
            assert merged["text_offset"] == [0, 0, 1, 1, 2]
            assert merged["top_logprobs"][0] is None and merged["top_logprobs"][4] == {"x": -0.5, "!": -4.0}

    def test_a_prompt_alone_is_scored_and_the_sampled_token_is_hidden(self, gate: Gate) -> None:
        for streams in (False, True):
            options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streams else {}
            body = {"prompt": [0, 1], "echo": True, "logprobs": 0, "max_tokens": 0, "return_token_ids": True}
            response = gate.complete(COMPLETION | body | options)
            submit = gate.submit()
            assert submit.options.max_tokens == 1
            ids = np.arange(2, dtype=np.int32).tobytes()
            gate.rig.send(m.Accepted(submit.request_id, 1, ids, "ab", pieces=[b"a", b"b"]), "ingest.0")
            gate.delta(submit, num_ids=0, prompt=(0, token_outputs(-1.0), []))
            gate.delta(
                submit,
                "sampled",
                token_outputs=token_outputs(-9.0),
                pieces=[b"sampled"],
                finish=m.Finish.STOP,
                stop_reason=5,
            )
            events = events_of(response.result().text) if streams else [response.result().json()]
            choices = [event["choices"][0] for event in events if event["choices"]]
            assert "".join(choice["text"] for choice in choices) == "ab"
            logprobs = choices[0]["logprobs"]
            assert (logprobs["tokens"], logprobs["token_logprobs"], logprobs["text_offset"]) == (
                ["a", "b"],
                [None, -1.0],
                [0, 1],
            )
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
            assert choices[0]["prompt_token_ids"] == [0, 1]
            assert [one for choice in choices for one in choice["token_ids"]] == []
            assert events[-1]["usage"]["completion_tokens"] == 0

    def test_each_prompt_has_its_own_logprobs(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "prompt_logprobs": 0, "return_token_ids": True})
        for score in (-1.0, -2.0):
            submit = gate.submit()
            gate.accept(submit, pieces=[b"x", b"y"])
            gate.delta(submit, "!", prompt=(0, token_outputs(score), []), finish=m.Finish.LENGTH)
        choices = response.result().json()["choices"]
        found = {choice["prompt_logprobs"][1]["1"]["logprob"] for choice in choices}
        assert found == {-1.0, -2.0}
        assert [choice["prompt_token_ids"] for choice in choices] == [[0, 1], [0, 1]]

    def test_best_of_ranks_correctly_with_top_logprobs(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"best_of": 2, "logprobs": 1})
        submit = gate.begin()
        for index, score in ((0, -3.0), (1, -1.0)):
            payload = token_outputs(score, top=[(5, -0.5 if index == 0 else -7.0)])
            gate.delta(
                submit, f"{index}", index=index, token_outputs=payload, pieces=[b"p", b"q"], finish=m.Finish.STOP
            )
        (choice,) = response.result().json()["choices"]
        assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("1", [-1.0])


class TestStreams:
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
    def test_each_id_is_reported_once_in_order_while_text_is_held_back(self, gate: Gate, path: str) -> None:
        is_chat = "chat" in path
        body = (CHAT | {"logprobs": True}) if is_chat else (COMPLETION | {"logprobs": 0})
        response = gate.post(body | {"stream": True, "return_token_ids": True}, path)
        submit = gate.begin()
        pieces = cut("a😀b".encode(), (1, 2, 4, 5))
        texts = ["a", "", "", "😀", "b"]
        for index, (text, piece) in enumerate(zip(texts, pieces, strict=True)):
            gate.delta(submit, text, token_outputs=token_outputs(-1.0 - index), pieces=[piece])
        gate.delta(submit, "", token_outputs=token_outputs(-6.0), pieces=[b"<e>"])
        gate.delta(submit, "", num_ids=0, finish=m.Finish.LENGTH)
        events = events_of(response.result().text)
        choices = [event["choices"][0] for event in events]
        parts = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        if is_chat:
            scores = [one["logprob"] for part in parts for one in part["content"]]
            assert [bytes(one["bytes"]) for part in parts for one in part["content"]] == [*pieces, b"<e>"]
            assert events[0]["prompt_token_ids"] == [0, 1, 2]
            assert sum("prompt_token_ids" in event for event in events) == 1
        else:
            scores = [one for part in parts for one in part["token_logprobs"]]
            assert [one for part in parts for one in part["text_offset"]] == [0, 1, 1, 1, 2, 3]
            assert choices[0]["prompt_token_ids"] == [0, 1, 2]
            assert sum(choice["prompt_token_ids"] is not None for choice in choices) == 1
        assert scores == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
        assert [one for choice in choices for one in choice.get("token_ids", [])] == [0, 1, 2, 3, 4, 5]

    def test_repeated_ids_are_reported_once(self, gate: Gate) -> None:
        response = gate.post(CHAT | {"logprobs": True, "top_logprobs": 1})
        submit = gate.begin()
        top = [(7, -0.5)]
        gate.delta(submit, "ab", 2, token_outputs=token_outputs(-1.0, -2.0, top=top), pieces=[b"a", b"x", b"b", b"x"])
        payload = token_outputs(-2.0, -3.0, top=top)
        pieces = [b"b", b"x", b"c", b"x"]
        gate.delta(submit, "bc", 2, back=1, token_outputs=payload, pieces=pieces, finish=m.Finish.STOP)
        content = response.result().json()["choices"][0]["logprobs"]["content"]
        assert [(one["token"], one["logprob"]) for one in content] == [("a", -1.0), ("b", -2.0), ("c", -3.0)]

    def test_usage_is_in_every_event_if_requested(self, gate: Gate) -> None:
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
        payload = token_outputs(-math.inf, top=[(5, math.nan)])
        gate.delta(submit, "a", token_outputs=payload, pieces=[b"a", b"b"], finish=m.Finish.STOP)

        def fail(name: str) -> None:
            raise AssertionError(name)

        json.loads(response.result().text, parse_constant=fail)
