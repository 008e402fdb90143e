"""The blocking client and its threads."""

import gc
import subprocess
import sys
import threading

import pytest

from pipeline.client.blocking_client import Client
from pipeline.client.errors import ConnectionLost, RequestError
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.runtime import messages as m
from tests.rig import PATIENCE_S
from tests.stages.gateway.gate import MODEL, Gate
from tests.stages.gateway.peers import address_of, until


def client_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline-client")]


class TestBlockingClient:
    def test_requests_stream_abort_and_close(self, gate: Gate) -> None:
        with Client(address_of(gate)) as client:
            assert client.info.model == MODEL
            stream = client.generate("Hi", SamplingParams(seed=3))
            gate.serve("Hello")
            assert "".join(output.text for output in stream) == "Hello"
            assert (stream.prompt_token_ids, stream.seed, stream.num_output_tokens) == ([0, 1, 2], 3, 1)
            stream = client.generate("Hi")
            submit = gate.begin()
            stream.accepted()
            gate.delta(submit, "a")
            assert next(stream).text == "a"
            stream.abort()
            assert [output.finish_reason for output in stream] == ["abort"]
            with pytest.raises(RequestError):
                refused = client.generate("Hi")
                gate.reject(gate.submit(), m.Failure(400, "no"))
                list(refused)
        with pytest.raises(ConnectionLost):
            client.generate("Hi")
        client.close()

    def test_the_old_address_serves_and_is_warned_of_once(self, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            with Client(address_of(gate).replace("/zmq", "/door")) as client:
                stream = client.generate("Hi")
                gate.serve("Hello")
                assert "".join(output.text for output in stream) == "Hello"
        assert caplog.text.count("the old name of …/zmq") == 1

    def test_a_dropped_client_releases_its_connection_and_threads(self, gate: Gate) -> None:
        client = Client(address_of(gate))
        thread = client._thread
        stream = client.generate("Hi")
        submit = gate.begin()
        del client
        gc.collect()
        stream.accepted()
        gate.delta(submit, "a")
        assert next(stream).text == "a", "a stream keeps its client alive"
        del stream
        gc.collect()
        assert gate.rig.receive("schedule", m.Abort).request_id == submit.request_id
        until(lambda: thread.is_closed, "the thread has ended")
        until(lambda: not client_threads(), f"no thread is left: {client_threads()}")
        gate.finish(submit, finish=m.Finish.ABORT)

    def test_a_client_that_is_dropped_in_its_own_thread_is_closed_by_another(self, gate: Gate) -> None:
        clients = [Client(address_of(gate))]
        thread = clients[0]._thread

        async def drop() -> None:
            clients.clear()

        thread.run(drop())
        until(lambda: thread.is_closed, "the thread has ended")
        until(lambda: not client_threads(), f"no thread is left: {client_threads()}")

    def test_a_client_that_is_never_closed_does_not_block_exit(self, gate: Gate) -> None:
        program = f"from pipeline import Client\nclient = Client({address_of(gate)!r})\nprint(client.info.model)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{MODEL}\n", "")

    def test_a_missing_server_is_reported(self) -> None:
        with pytest.raises(ConnectionLost):
            Client.connect("ipc://@pipeline/missing/zmq", timeout_s=0.05)
