"""Log probabilities over ZeroMQ: each id has them once, with credits, merges, repetitions and resumption."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from pipeline import AsyncLLM, Logprob, RequestOutput
from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import messages as m
from pipeline.stages.gateway.replies.token_details import MAX_ENTRIES_AT_ONCE
from tests.fakes import logprob, record
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer, address_of, all_of, do
from tests.stages.gateway.replies.choices.scored import flat
from tests.zmq_requests import generate


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        yield client


def token_outputs(ids: Any, num_top: int) -> bytes:
    return b"".join(record(one, num_top) for one in ids)


def pieces(ids: Any, num_top: int, *, tops_alone: bool = False) -> list[bytes]:
    """The bytes of each id, then of its top ids."""
    return [b"<%d>" % named for one in ids for named in ([] if tops_alone else [one]) + list(range(one, one + num_top))]


def send_delta(gate: Gate, submit: m.Submit, ids: range, num_top: int, text: str = "", **more: Any) -> None:
    """Send a delta of these ids, which must be the next ones, with their records."""
    gate.delta(submit, text, len(ids), token_outputs=token_outputs(ids, num_top), pieces=pieces(ids, num_top), **more)


def expected(token_id: int, num_top: int) -> dict[int, Logprob]:
    """The logprobs that a client decodes for an id."""
    ids = range(token_id, token_id + max(1, num_top))
    return {
        one: Logprob(logprob(token_id) - index, index + 1 if num_top else None, f"<{one}>", b"<%d>" % one)
        for index, one in enumerate(ids)
    }


@pytest.mark.parametrize("num_top", [0, 3])
async def test_each_id_comes_with_its_record(gate: Gate, client: AsyncClient, num_top: int) -> None:
    stream = client.generate("Hi", SamplingParams(logprobs=num_top))
    submit = await do(gate.begin)
    assert (submit.options.num_logprobs, submit.options.with_pieces) == (num_top, True)
    send_delta(gate, submit, range(2), num_top, "Hel")
    send_delta(gate, submit, range(2, 3), num_top, "lo", finish=m.Finish.LENGTH)
    outputs = await all_of(stream)
    assert [one for output in outputs for one in output.token_ids] == [0, 1, 2]
    assert [one for output in outputs for one in output.logprobs or []] == [expected(i, num_top) for i in range(3)]
    assert stream.prompt_logprobs is None


async def test_there_are_no_records_by_default(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi")
    submit = await do(gate.serve)
    assert submit.options.num_logprobs == -1
    assert [output.logprobs for output in await all_of(stream)] == [None]


def test_deltas_without_credit_are_merged_with_their_records(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, num_credits=1, logprobs=1, n=2)
        submit = gate.begin()
        peer.receive(p.Accepted)
        send_delta(gate, submit, range(1), 1, "a")
        assert peer.receive(p.Delta).outputs == [
            p.Output(0, "a", bytes(4), 0, 0, None, None, record(0, 1), [b"<0>"] * 2)
        ]
        send_delta(gate, submit, range(1, 2), 1, "b")
        send_delta(gate, submit, range(1), 1, "x", index=1)
        send_delta(gate, submit, range(2, 4), 1, "cd")
        send_delta(gate, submit, range(1, 2), 1, index=1, finish=m.Finish.STOP)
        send_delta(gate, submit, range(4, 5), 1, finish=m.Finish.LENGTH)
        assert peer.receives_nothing()
        peer.send(p.Credit(1, 1))
        first, second = peer.receive(p.Delta).outputs
        assert (first.text, first.token_offset, first.finish_reason) == ("bcd", 1, "length")
        assert (first.records, first.pieces) == (token_outputs(range(1, 5), 1), pieces(range(1, 5), 1))
        assert (second.text, second.records, second.pieces) == ("x", token_outputs(range(2), 1), pieces(range(2), 1))
        peer.receive(p.Finished)


def test_repeated_ids_are_sent_once(gate: Gate) -> None:
    """A request that is retried repeats known ids."""
    with RawPeer(gate) as peer:
        peer.generate(1, logprobs=2)
        submit = gate.begin()
        peer.receive(p.Accepted)
        send_delta(gate, submit, range(3), 2, "abc")
        assert peer.receive(p.Delta).outputs[0].records == token_outputs(range(3), 2)
        send_delta(gate, submit, range(1, 5), 2, "bcde", back=2, finish=m.Finish.LENGTH)
        (output,) = peer.receive(p.Delta).outputs
        assert (output.text, output.token_offset, output.records) == ("de", 3, token_outputs(range(3, 5), 2))
        assert output.pieces == pieces(range(3, 5), 2)


def test_a_resumed_request_has_records_of_new_ids_only(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        received = b"".join(i.to_bytes(4, "little") for i in range(2))
        peer.send(generate(1, "Hi", {"logprobs": 1, "prompt_logprobs": 0, "seed": 5}, 9, [received]))
        submit = gate.submit()
        assert submit.outputs == [received]
        gate.accept(submit, pieces=[b"a", b"b"])
        assert peer.receive(p.Accepted).prompt_pieces == [b"a", b"b"]
        gate.continue_at(submit, 2, 2)
        send_delta(gate, submit, range(2, 4), 1, "cd", finish=m.Finish.LENGTH, prompt=(0, token_outputs([1], 0), []))
        delta = peer.receive(p.Delta)
        assert (delta.prompt_records, delta.prompt_record_offset) == (token_outputs([1], 0), 0)
        (output,) = delta.outputs
        assert (output.token_offset, output.text_offset) == (2, 2)
        assert (output.records, output.pieces) == (token_outputs(range(2, 4), 1), pieces(range(2, 4), 1))


def test_an_abort_returns_the_records_so_far(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, num_credits=0, logprobs=1, prompt_logprobs=1)
        submit = gate.submit()
        gate.accept(submit, pieces=[b"a", b"b"])
        peer.receive(p.Accepted)
        send_delta(gate, submit, range(2), 1, "ab", prompt=(0, token_outputs([1], 1), [b"<1>"]))
        gate.rig.send(m.Ping(5), "supervisor")
        gate.rig.receive("supervisor", m.Pong)  # the gateway has read all earlier messages
        peer.send(p.Abort(1))
        delta = peer.receive(p.Delta)
        assert (delta.prompt_records, delta.prompt_record_pieces) == (token_outputs([1], 1), [b"<1>"])
        (output,) = delta.outputs
        assert (output.finish_reason, output.records) == ("abort", token_outputs(range(2), 1))
        peer.receive(p.Finished)


def test_best_of_returns_the_records_of_the_best(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, n=1, best_of=2, logprobs=1)
        submit = gate.begin()
        peer.receive(p.Accepted)
        send_delta(gate, submit, range(4), 1, "worst", finish=m.Finish.LENGTH)  # later ids are less likely
        send_delta(gate, submit, range(2), 1, "best", index=1, finish=m.Finish.LENGTH)
        (output,) = peer.receive(p.Delta).outputs
        assert (output.index, output.text, output.records) == (0, "best", token_outputs(range(2), 1))
        peer.receive(p.Finished)


def test_logprobs_for_best_of_are_not_returned_unless_requested(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.generate(1, n=1, best_of=2)
        submit = gate.begin()
        peer.receive(p.Accepted)
        for index in range(2):
            gate.delta(submit, "x", 1, index=index, logprobs=[-1.0 - index], finish=m.Finish.LENGTH)
        (output,) = peer.receive(p.Delta).outputs
        assert (output.text, output.records, output.pieces) == ("x", b"", [])


class TestPrompts:
    async def test_a_prompts_records_are_complete_however_they_are_split(self, gate: Gate, client: AsyncClient) -> None:
        stream = client.generate("Hi", SamplingParams(prompt_logprobs=2, n=2))
        submit = await do(gate.submit)
        assert submit.prompt_options.with_pieces
        assert (submit.options.num_prompt_logprobs, submit.options.num_logprobs) == (2, -1)
        own = [b"<%d>" % i for i in range(6)]
        gate.accept(submit, pieces=own)
        gate.delta(submit, "", 0, prompt=(0, token_outputs([1, 2], 2), pieces([1, 2], 2, tops_alone=True)))
        await asyncio.wait_for(stream.accepted(), PATIENCE_S)
        gate.delta(submit, "x", 1, index=1)  # a sequence may be ahead of the first
        # Only the end of a repetition is new.
        gate.delta(submit, "a", 1, prompt=(1, token_outputs(range(2, 6), 2), pieces(range(2, 6), 2, tops_alone=True)))
        gate.finish(submit)
        gate.finish(submit, index=1)
        outputs = await all_of(stream)
        assert {output.logprobs for output in outputs} == {None}
        assert stream.prompt_logprobs == [None, *(expected(i, 2) for i in range(1, 6))]

    def test_a_delta_of_prompt_records_takes_a_credit_and_may_have_no_output(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1, num_credits=1, prompt_logprobs=0, n=1, best_of=2)
            submit = gate.submit()
            gate.accept(submit, pieces=[b"a", b"b", b"c", b"d"])
            peer.receive(p.Accepted)
            gate.delta(submit, "", 0, prompt=(0, token_outputs([1], 0), []))
            assert peer.receive(p.Delta) == p.Delta(1, [], token_outputs([1], 0), 0, [])
            gate.delta(submit, "", 0, prompt=(1, token_outputs([2], 0), []))
            gate.delta(submit, "", 0, prompt=(2, token_outputs([3], 0), []))
            for index in range(2):
                gate.delta(submit, "x", 1, index=index, logprobs=[-1.0], finish=m.Finish.LENGTH)
            assert peer.receives_nothing()
            peer.send(p.Credit(1, 1))
            delta = peer.receive(p.Delta)
            assert (delta.prompt_records, delta.prompt_record_offset) == (token_outputs([2, 3], 0), 1)
            assert [output.text for output in delta.outputs] == ["x"]
            peer.receive(p.Finished)

    def test_there_are_no_records_by_default(self, gate: Gate) -> None:
        with RawPeer(gate) as peer:
            peer.generate(1, logprobs=1)
            submit = gate.begin()
            assert not submit.prompt_options.with_pieces
            assert peer.receive(p.Accepted).prompt_pieces == []
            send_delta(gate, submit, range(1), 1, "a", finish=m.Finish.LENGTH)
            delta = peer.receive(p.Delta)
            assert (delta.prompt_records, delta.prompt_record_pieces) == (b"", [])


class TestRequestOutputs:
    async def outputs(self, gate: Gate, kind: Any) -> list[RequestOutput]:
        async with AsyncLLM.attach(address_of(gate), timeout_s=PATIENCE_S) as llm:

            async def read() -> list[RequestOutput]:
                params = SamplingParams(logprobs=1, prompt_logprobs=1)
                return [output async for output in llm.generate("Hi", params, output_kind=kind)]

            task = asyncio.create_task(read())
            submit = await do(gate.submit)
            gate.accept(submit, pieces=[b"<0>", b"<1>"])
            send_delta(gate, submit, range(2), 1, "ab", prompt=(0, token_outputs([1], 1), [b"<1>"]))
            send_delta(gate, submit, range(2, 3), 1, "c", finish=m.Finish.LENGTH)
            return await asyncio.wait_for(task, PATIENCE_S)

    @pytest.mark.parametrize("kind", ["cumulative", "final"])
    async def test_request_outputs_have_vllms_shape(self, gate: Gate, kind: str) -> None:
        output = (await self.outputs(gate, kind))[-1]
        assert output.prompt_logprobs == [None, expected(1, 1)]
        (completion,) = output.outputs
        assert completion.logprobs == [expected(i, 1) for i in range(3)]
        assert completion.cumulative_logprob == sum(logprob(i) for i in range(3))

    async def test_deltas_have_new_logprobs_and_the_cumulative_sum(self, gate: Gate) -> None:
        outputs = [one for output in await self.outputs(gate, "delta") for one in output.outputs]
        assert [each for one in outputs for each in one.logprobs or []] == [expected(i, 1) for i in range(3)]
        assert all(len(one.logprobs or []) == len(one.token_ids) for one in outputs)
        assert outputs[-1].cumulative_logprob == sum(logprob(i) for i in range(3))

    async def test_request_outputs_have_no_logprobs_by_default(self, gate: Gate) -> None:
        async with AsyncLLM.attach(address_of(gate), timeout_s=PATIENCE_S) as llm:
            stream = llm.generate("Hi")
            task = asyncio.ensure_future(anext(stream))
            await do(gate.serve)
            output = await asyncio.wait_for(task, PATIENCE_S)
        (completion,) = output.outputs
        assert (completion.logprobs, completion.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_many_records_come_in_several_deltas(gate: Gate, is_aborted: bool) -> None:
    """A delta is made in one turn of the event loop, and a connection takes one whatever its size."""
    num_ids, num_top = 1000, 20
    most = MAX_ENTRIES_AT_ONCE // (1 + num_top)
    with RawPeer(gate) as peer:
        peer.generate(1, num_credits=0, logprobs=num_top, prompt_logprobs=num_top, n=2)
        submit = gate.submit()
        gate.accept(submit, num_ids + 1)
        peer.receive(p.Accepted)
        prompt = range(1, num_ids + 1)
        gate.delta(
            submit, num_ids=0, prompt=(0, token_outputs(prompt, num_top), pieces(prompt, num_top, tops_alone=True))
        )
        for index in range(2):
            send_delta(gate, submit, range(num_ids), num_top, f"text {index}", index=index)
        gate.rig.load()
        peer.send(p.Abort(1) if is_aborted else p.Credit(1, 1000))
        if not is_aborted:
            gate.finish(submit, "a", 0)
            gate.finish(submit, "b", 1)
        deltas = []
        while isinstance(message := peer.receive(), p.Delta):
            deltas.append(message)
        assert isinstance(message, p.Finished)
    for delta in deltas:
        assert sum(len(one.token_ids) for one in delta.outputs) // 4 <= most
        assert len(delta.prompt_records) <= most * (4 + 8 * num_top)
    for index in range(2):
        outputs = [one for delta in deltas for one in delta.outputs if one.index == index]
        assert b"".join(one.token_ids for one in outputs)[: 4 * num_ids] == packed(range(num_ids))
        assert b"".join(one.records for one in outputs)[: num_ids * (4 + 8 * num_top)] == token_outputs(
            range(num_ids), num_top
        )
        assert flat(one.pieces for one in outputs)[: num_ids * (1 + num_top)] == pieces(range(num_ids), num_top)
        assert "".join(one.text for one in outputs) == f"text {index}" + ("" if is_aborted else "ab"[index])
        assert [one.finish_reason for one in outputs if one.finish_reason] == ["abort" if is_aborted else "stop"]
        assert outputs[-1].finish_reason
        assert [one.token_offset for one in outputs][:2] == [0, len(outputs[0].token_ids) // 4]
    if not is_aborted:
        assert b"".join(delta.prompt_records for delta in deltas) == token_outputs(prompt, num_top)
        assert flat(delta.prompt_record_pieces for delta in deltas) == pieces(prompt, num_top, tops_alone=True)


def packed(ids: Any) -> bytes:
    return np.array(ids, "<i4").tobytes()
