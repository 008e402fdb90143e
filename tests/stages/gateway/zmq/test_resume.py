"""Streams that resume after ids that the client already has."""

import numpy as np
import pytest

from pipeline.client import protocol as p
from pipeline.client.client import AsyncClient
from pipeline.client.inputs.sampling_params import SamplingParams
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer, all_of, do
from tests.zmq_requests import generate


class TestResuming:
    async def test_the_received_ids_are_submitted_and_only_new_output_is_sent(
        self, gate: Gate, client: AsyncClient
    ) -> None:
        stream = client.generate([5, 6], SamplingParams(seed=9, max_tokens=8), received=[20, 21])
        submit = await do(gate.begin)
        assert submit.outputs == [np.array([20, 21], "<i4").tobytes()]
        assert submit.options.seed == 9
        gate.continue_at(submit, num_chars=30, num_ids=2)
        gate.delta(submit, "x", 1)
        gate.finish(submit, "y")
        outputs = await all_of(stream)
        assert "".join(output.text for output in outputs) == "xy"
        assert outputs[0].text_offset == 30
        assert outputs[0].token_offset == 2
        assert outputs[-1].finish_reason == "stop"
        assert stream.num_output_tokens == 4

    async def test_each_of_n_sequences_has_its_own_ids(self, gate: Gate, client: AsyncClient) -> None:
        client_params = SamplingParams(n=2)
        stream = client.generate("Hi", client_params, received=[[20, 21], []])
        submit = await do(gate.begin)
        assert submit.outputs == [np.array([20, 21], "<i4").tobytes(), b""]
        gate.continue_at(submit, num_chars=5, num_ids=2)
        for index in range(2):
            gate.finish(submit, "z", index)
        outputs = await all_of(stream)
        assert {(output.index, output.text_offset, output.token_offset) for output in outputs} == {(0, 5, 2), (1, 0, 0)}

    @pytest.mark.parametrize(("received", "n"), [([b"abcd"], 2), ([b"abcd", b""], 1), ([b"abc"], 1)])
    def test_invalid_received_ids_are_rejected(self, gate: Gate, received: list[bytes], n: int) -> None:
        with RawPeer(gate) as peer:
            peer.send(generate(1, "Hi", {"n": n}, 10, received))
            failure = peer.receive(p.Failed).failure
            assert failure.status == 400
            assert (failure.param or "").startswith("received")

    async def test_the_client_rejects_invalid_input_before_sending(self, client: AsyncClient) -> None:
        with pytest.raises(ValueError, match="each of n = 2"):
            client.generate("Hi", SamplingParams(n=2), received=[1])
        with pytest.raises(TypeError, match="integers"):
            client.generate(["a", 1])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="2147483647"):
            client.generate([2**31])
        with pytest.raises(ValueError, match="bytes"):
            client.generate("x" * 5_000_000)
