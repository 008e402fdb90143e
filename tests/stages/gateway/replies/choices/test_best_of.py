"""`best_of` generates more sequences than `n` and returns the best of them."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import messages as m
from pipeline.stages.gateway.apis.openai.parsing import parse_completion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.open_requests.prompt_request import SequenceOutput
from pipeline.stages.gateway.replies.best_of import best
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import CHAT, COMPLETION, NONE_CACHED, Gate
from tests.stages.gateway.parsing.bodies import LIMITS, completion, refused
from tests.stages.gateway.peers import RawPeer
from tests.zmq_requests import chat, generate, parsed

SCORES = {0: [-1.0, -1.0], 1: [-0.25, -0.5, -3.0], 2: [-0.5], 3: [-0.75, -0.75, -0.75]}
"""Log probabilities of each sequence's ids. By the mean their order is 2, 3, 0, 1."""


def play(gate: Gate, submit: m.Submit, order: tuple[int, ...] = (1, 3, 0, 2)) -> None:
    """Finish the four sequences in this order, each in two deltas."""
    for index in order:
        scores = SCORES[index]
        gate.delta(submit, f"{index}", len(scores) - 1, index=index, logprobs=scores[:-1])
        finish = m.Finish.LENGTH if index == 3 else m.Finish.STOP
        reason = "." if index == 2 else None
        gate.delta(submit, "!", index=index, logprobs=scores[-1:], finish=finish, stop_reason=reason)


class TestChoice:
    def sequence(self, *logprobs: float) -> SequenceOutput:
        return SequenceOutput(token_outputs=bytearray(np.array(logprobs, "<f4").tobytes()))

    def test_sequences_are_ranked_by_the_mean_logprob(self) -> None:
        long, short = self.sequence(*[-0.5] * 100), self.sequence(-0.6)
        assert best([short, long], 1) == [long]

    def test_equal_sequences_keep_their_order(self) -> None:
        each = [self.sequence(-1.0, -2.0), self.sequence(-1.5), self.sequence(-0.5), self.sequence(-2.0, -1.0)]
        assert list(map(id, best(each, 4))) == [id(each[index]) for index in (2, 0, 1, 3)]

    def test_sequences_without_ids_rank_last(self) -> None:
        each = [self.sequence(), self.sequence(-900.0), self.sequence(-float("inf"))]
        assert best(each, 3)[0] is each[1]


class TestParse:
    def test_best_of_sets_the_number_of_sequences_and_requests_logprobs(self) -> None:
        parsed = completion(best_of=4, n=2)
        assert (parsed.n, parsed.options.n, parsed.num_sequences, parsed.is_best_of) == (2, 4, 4, True)
        assert parsed.options.num_logprobs == 0
        assert completion(best_of=3).num_sequences == 3

    @pytest.mark.parametrize("fields", [{}, {"best_of": 1}, {"n": 3, "best_of": 3}, {"n": 2, "best_of": None}])
    def test_best_of_equal_to_n_has_no_effect(self, fields: dict[str, Any]) -> None:
        plain = completion(**{name: value for name, value in fields.items() if name == "n"})
        assert completion(**fields) == plain
        assert completion(**fields, stream=True) == msgspec.structs.replace(plain, stream=True)
        assert plain.options.num_logprobs == -1 and not plain.is_best_of

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"best_of": 2, "n": 3}, "at least n = 3"),
            ({"best_of": 2, "stream": True}, "must equal n = 1"),
            ({"best_of": 0}, ">= 1"),
            ({"best_of": 129}, "at most 128"),
            ({"best_of": "2"}, "integer"),
            ({"best_of": 2.5}, "integer"),
            ({"best_of": 65}, "best_of = 65 exceeds the limit of 64 open sequences"),
        ],
    )
    def test_an_invalid_value_is_rejected_by_name(self, fields: dict[str, Any], words: str) -> None:
        error = refused(COMPLETION | fields, parse_completion)
        assert (error.status, error.param) == (400, "best_of")
        assert words in error.message

    def test_the_limit_counts_all_sequences_of_all_prompts(self) -> None:
        error = refused(COMPLETION | {"prompt": ["a"] * 17, "best_of": 4}, parse_completion)
        assert error.param == "prompt" and "17 prompts × best_of = 4 sequences" in error.message

    def test_chats_over_http_do_not_support_best_of(self) -> None:
        assert refused(CHAT | {"best_of": 2}).param == "best_of"

    def test_zmq_supports_best_of_for_chats_but_not_for_resumed_requests(self) -> None:
        two_of_five = parsed(generate(1, chat([p.MessageParam("user", "Hi")]), {"n": 2, "best_of": 5}), LIMITS)
        assert (two_of_five.n, two_of_five.num_sequences) == (2, 5)
        with pytest.raises(ApiError) as error:
            parsed(generate(1, "a", {"n": 2, "best_of": 5}, 1, [b"", b""]), LIMITS)
        assert (error.value.status, error.value.param) == (400, "received")
        same = parsed(generate(1, "a", {"n": 2, "best_of": 2}, 1, [b"", b""]), LIMITS)
        assert same.num_sequences == 2


class TestHttp:
    @pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
    def test_the_best_are_sorted_and_usage_counts_all_sequences(self, gate: Gate, order: tuple[int, ...]) -> None:
        response = gate.complete(COMPLETION | {"best_of": 4, "n": 3, "seed": 7})
        submit = gate.begin()
        assert submit.options.n == 4 and submit.options.num_logprobs == 0
        play(gate, submit, order)
        body = response.result().json()
        assert [(c["index"], c["text"], c["finish_reason"], c["stop_reason"]) for c in body["choices"]] == [
            (0, "2!", "stop", "."),
            (1, "3!", "length", None),
            (2, "0!", "stop", None),
        ]
        assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12, **NONE_CACHED}

    def test_each_prompt_has_its_own_best(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"prompt": ["a", "b"], "best_of": 2, "echo": True})
        for good, name in ((1, "x"), (0, "y")):
            submit = gate.begin()
            for index in (0, 1):
                score = -1.0 if index == good else -2.0
                gate.delta(submit, f"{name}{index}", index=index, logprobs=[score], finish=m.Finish.STOP)
        choices = response.result().json()["choices"]
        assert [(c["index"], c["text"]) for c in choices] == [(0, "ax1"), (1, "by0")]

    def test_repeated_ids_are_scored_once(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"best_of": 2})
        submit = gate.begin()
        gate.delta(submit, "ab", 2, logprobs=[-1.0, -1.0])
        gate.delta(submit, "bc", 2, back=1, logprobs=[-1.0, -4.0])
        gate.delta(submit, "", 0, finish=m.Finish.STOP)
        gate.delta(submit, "d", index=1, logprobs=[-1.9], finish=m.Finish.STOP)
        body = response.result().json()
        assert body["choices"][0]["text"] == "d", "-2 is the mean of the other's three ids, and -1.75 of four"
        assert body["usage"]["completion_tokens"] == 4

    def test_timings_list_the_returned_choices_first(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"best_of": 4, "n": 2, "timings": True})
        play(gate, gate.begin())
        choices = response.result().json()["timings"]["choices"]
        assert [(c["index"], c["output_tokens"]) for c in choices] == [(0, 1), (1, 3), (2, 2), (3, 3)]

    def test_all_generated_sequences_count_as_open(self, tmp_path: Any) -> None:
        with Gate(tmp_path, max_open_sequences=5) as gate:
            first = gate.complete(COMPLETION | {"best_of": 4, "n": 2})
            submit = gate.begin()
            full = gate.complete(COMPLETION | {"best_of": 2}).result()
            assert full.status_code == 503 and "needs 2" in full.json()["error"]["message"]
            play(gate, submit)
            assert first.result().status_code == 200
            again = gate.complete(COMPLETION | {"best_of": 5})
            submit_again = gate.begin()
            play(gate, submit_again)
            assert not again.done()
            gate.delta(submit_again, "best", index=4, logprobs=[-0.1], finish=m.Finish.STOP)
            assert [choice["text"] for choice in again.result().json()["choices"]] == ["best"]

    def test_a_stream_is_rejected_before_it_is_submitted(self, gate: Gate) -> None:
        response = gate.complete(COMPLETION | {"best_of": 4, "stream": True}).result()
        assert (response.status_code, response.json()["error"]["param"]) == (400, "best_of")
        streamed = gate.complete(COMPLETION | {"best_of": 1, "stream": True})
        gate.serve("Hi")
        assert "[DONE]" in streamed.result().text


class TestZmq:
    def test_the_best_are_sent_at_the_end_in_one_delta(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(n=2, best_of=4, seed=7)
            submit = gate.begin()
            assert (submit.options.n, submit.options.seed) == (4, 7)
            assert peer.receive(p.Accepted).seed == 7
            play(gate, submit)
            delta = peer.receive(p.Delta)
            assert [(o.index, o.text, o.text_offset, o.token_offset, o.finish_reason) for o in delta.outputs] == [
                (0, "2!", 0, 0, "stop"),
                (1, "3!", 0, 0, "length"),
            ]
            assert [len(o.token_ids) // 4 for o in delta.outputs] == [1, 3]
            finished = peer.receive(p.Finished)
            assert (finished.num_prompt_tokens, finished.num_output_tokens) == (3, 9)

    def test_nothing_is_sent_before_the_end_or_without_credit(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(n=1, best_of=4, num_credits=0)
            submit = gate.begin()
            peer.receive(p.Accepted)
            gate.delta(submit, "x", logprobs=[-1.0])
            assert peer.is_still_served()
            play(gate, submit, (1, 3, 2))
            gate.finish(submit, "y")
            assert peer.is_still_served()
            peer.send(p.Credit(1, 1))
            assert [o.text for o in peer.receive(p.Delta).outputs] == ["2!"]
            peer.receive(p.Finished)

    def test_an_abort_returns_the_best_so_far(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(n=2, best_of=3)
            submit = gate.begin()
            peer.receive(p.Accepted)
            gate.delta(submit, "bad", index=0, logprobs=[-5.0])
            gate.delta(submit, "good", index=1, logprobs=[-1.0], finish=m.Finish.STOP)
            gate.delta(submit, "fair", index=2, logprobs=[-2.0])
            other = gate.complete(COMPLETION)  # earlier messages are handled before it
            gate.serve()
            other.result()
            peer.send(p.Abort(1))
            delta = peer.receive(p.Delta)
            assert [(o.index, o.text, o.finish_reason) for o in delta.outputs] == [
                (0, "good", "stop"),
                (1, "fair", "abort"),
            ]
            peer.receive(p.Finished)

    async def test_the_client_gets_n_sequences(self, gate: Gate) -> None:
        address = f"ipc://@pipeline/{gate.address[1]}/zmq"
        async with (
            asyncio.timeout(PATIENCE_S),
            await AsyncClient.connect(address, timeout_s=PATIENCE_S) as client,
        ):
            stream = client.generate("Hi", SamplingParams(n=2, best_of=4))
            play(gate, await asyncio.to_thread(gate.begin))
            outputs = [output async for output in stream]
            assert [(o.index, o.text) for o in outputs] == [(0, "2!"), (1, "3!")]
            assert stream.num_output_tokens == 9


def test_parameters_are_checked_at_construction() -> None:
    assert SamplingParams(best_of=3).num_sequences == 3
    assert SamplingParams(n=2, best_of=2).num_sequences == SamplingParams(n=2).num_sequences == 2
    for wrong, error in ((1, ValueError), (65537, ValueError), ("3", TypeError), (True, TypeError)):
        with pytest.raises(error, match="best_of"):
            SamplingParams(n=2, best_of=wrong)  # type: ignore[arg-type]
