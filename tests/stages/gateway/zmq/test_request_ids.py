"""Names and timings of requests over ZeroMQ."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from pipeline.client import protocol as p
from pipeline.client.blocking_client import Client
from pipeline.client.client import AsyncClient
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.errors import RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.admin.test_abort_requests import abort, counts, play_abort
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import RawPeer, address_of, all_of, do
from tests.stages.gateway.test_metrics import find
from tests.zmq_requests import generate


@pytest.fixture
async def client(gate: Gate) -> AsyncIterator[AsyncClient]:
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        yield client


async def test_an_abort_by_the_clients_name_ends_the_stream_with_a_finish_reason(
    gate: Gate, client: AsyncClient
) -> None:
    stream = client.generate("Hi", SamplingParams(n=2), name="user-7/story.3")
    other = client.generate("Hi", name="other")
    submit, untouched = await do(gate.begin), await do(gate.begin)
    gate.delta(submit, "Hel")
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(stream)).text == "Hel"
    assert stream.id == "cmpl-user-7/story.3"
    assert await do(abort, gate, "user-7/story.3", "unknown") == counts(1, 1)
    await do(play_abort, gate, submit, "lo")
    outputs = await all_of(stream)
    assert {(one.index, one.text, one.finish_reason) for one in outputs} == {(0, "lo", "abort"), (1, "lo", "abort")}
    assert await do(gate.closed) == (submit.request_id, 1)
    gate.finish(untouched, "all")
    assert [one.finish_reason for one in await all_of(other)] == ["stop"]
    await do(gate.rig.until, lambda load: load.num_open_requests == 0)
    assert await do(abort, gate, "user-7/story.3") == counts(0, 1), "a name is known only while its request is open"


async def test_an_abort_by_the_servers_id_ends_the_stream_too(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate([{"role": "user", "content": "Hi"}])
    assert stream.id is None
    submit = await do(gate.begin)
    async with asyncio.timeout(PATIENCE_S):
        await stream.accepted()
    assert stream.id is not None
    assert stream.id.startswith("chatcmpl-")
    assert await do(abort, gate, stream.id) == counts(1, 0)
    await do(play_abort, gate, submit)
    assert [one.finish_reason for one in await all_of(stream)] == ["abort"]


@pytest.mark.parametrize("sender", ["ingest.0", "detokenize.0"])
async def test_an_abort_before_acceptance_ends_the_stream_too(gate: Gate, client: AsyncClient, sender: str) -> None:
    stream = client.generate("Hi", name="mine")
    submit = await do(gate.submit)
    assert await do(abort, gate, "mine") == counts(1, 0)
    gate.reject(submit, m.Failure(499, "the request was aborted", code="aborted"), sender)
    async with asyncio.timeout(PATIENCE_S):
        await stream.accepted()
    assert (stream.prompt_token_ids, stream.id) == (None, None)
    assert await all_of(stream) == [OutputDelta(0, "", [], "abort")]
    await do(gate.rig.until, lambda load: load.num_open_requests == 0)


async def test_recent_requests_are_found_by_id(gate: Gate, client: AsyncClient) -> None:
    stream = client.generate("Hi", name="mine")
    submit = await do(gate.serve)
    await all_of(stream)
    found = await do(find, gate, "cmpl-mine")
    assert found is not None
    assert found.sequences[0].request_id == submit.request_id


@pytest.mark.parametrize("name", ["", "a b", "x" * 257, "tab\there", "ümlaut", "a\r\nb"])
async def test_a_name_has_the_same_limits_as_over_http(gate: Gate, client: AsyncClient, name: str) -> None:
    with pytest.raises(RequestError, match="'name' must be 1 to 256 visible ASCII characters") as raised:
        await all_of(client.generate("Hi", name=name))
    assert (raised.value.status, raised.value.param) == (400, "name")
    with pytest.raises(TypeError, match="name must be a string"):
        client.generate("Hi", name=5)  # type: ignore[arg-type]
    stream = client.generate("Hi", name="x" * 256)
    await do(gate.serve)
    assert [one.text for one in await all_of(stream)] == ["Hello"]


async def test_timings_are_sent_at_the_end_if_requested(gate: Gate, client: AsyncClient) -> None:
    for with_timings in (True, False):
        stream = client.generate("Hi", SamplingParams(n=2), timings=with_timings)
        submit = await do(gate.serve)
        await all_of(stream)
        if not with_timings:
            assert stream.timings is None
            continue
        response = gate.complete({"model": "tiny", "prompt": "Hi", "n": 2, "timings": True})
        await do(gate.serve)
        over_http = (await asyncio.wrap_future(response)).json()["timings"]
        assert stream.timings is not None
        assert stream.timings.keys() == over_http.keys()
        assert [one.keys() for one in stream.timings["choices"]] == [one.keys() for one in over_http["choices"]]
        assert [one["hops"].keys() for one in stream.timings["choices"]] == [
            one["hops"].keys() for one in over_http["choices"]
        ]
        assert [one["request_id"] for one in stream.timings["choices"]] == [f"{submit.request_id:x}"] * 2
        assert stream.timings["total_ms"] > 0


def test_a_request_that_the_client_aborts_has_no_timings(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.send(generate(1, "Hi", timings=True, credits=100))
        submit = gate.begin()
        assert peer.receive(p.Accepted).id.startswith("cmpl-")
        peer.send(p.Abort(1))
        peer.receive(p.Delta)
        assert peer.receive(p.Finished) == p.Finished(1, 3, 0, None)
        gate.finish(submit, finish=m.Finish.ABORT)


def test_the_shortest_message_is_accepted(gate: Gate) -> None:
    with RawPeer(gate) as peer:
        peer.send(["generate", 1, {"prompt": "Hi"}, 10])
        gate.serve()
        peer.receive(p.Accepted)
        peer.receive(p.Delta)
        assert peer.receive(p.Finished).timings is None


def test_the_blocking_client_has_names_and_timings_too(gate: Gate) -> None:
    with Client(address_of(gate)) as client:
        stream = client.generate("Hi", name="mine", timings=True)
        gate.serve()
        assert [one.text for one in stream] == ["Hello"]
        assert stream.id == "cmpl-mine"
        assert stream.timings is not None
        assert stream.timings["choices"][0]["output_tokens"] == 1
