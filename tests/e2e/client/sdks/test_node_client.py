"""The JavaScript client, installed from its lock file: it replays the vectors and uses the real server."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pipeline.client.blocking_client import Client
from pipeline.client.connection.wire import OutputDelta
from pipeline.client.inputs.pooling_params import PoolingParams
from pipeline.client.inputs.sampling_params import SamplingParams
from pipeline.client.logprobs import Logprob
from tests.e2e.client.conftest import NODE_CLIENT
from tests.e2e.client.packages import run
from tests.e2e.server import Server

ROOT = Path(__file__).parents[4]
RUN_S = 120.0
TWO_STREAMS = """
import { Client } from "./pipeline-client.mjs";
const client = await Client.connect(process.argv[1], { reconnectTimeoutMs: 1000 });
const read = async () => {
  try {
    for await (const _ of client.generate("x", { logprobs: 1 }));
    return "ended";
  } catch (error) {
    return error.name;
  }
};
console.log(JSON.stringify(await Promise.all([read(), read()])));
await client.close();
"""
WELCOME = ["welcome", 2, "x", "m", 256, 100, 64, 2**22, 64, 5.0, 15.0]
BAD_MESSAGES: dict[str, Callable[[int], bytes]] = {
    "timings that are no JSON": lambda number: packed("finished", number, 1, 1, "{"),
    "null for an array": lambda number: packed("finished", number, 1, 1, None, None),
    "a number for text": lambda number: packed("delta", number, [[0, 5, b"", 0, 0]]),
    "null for an offset": lambda number: packed("delta", number, [[0, "", b"", None, None]]),
    "part of an id": lambda number: packed("delta", number, [[0, "a", b"abc", 0, 0]]),
    "text for bytes": lambda number: packed("delta", number, [[0, "a", b"abcd", 0, 0, None, None, "x"]]),
    "digits for a seed": lambda number: packed("accepted", number, b"", "9" * 100_000),
    "a message that is cut": lambda number: packed("finished", number, 1, 1)[:-1],
    "nothing": lambda number: b"",
    "arrays of arrays": lambda number: (b"\xdd" + (30_000_000).to_bytes(4, "big")) * 40,
}


def packed(*message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


@contextmanager
def hostile_server(bad: Callable[[int], bytes]) -> Iterator[str]:
    """The address of a server that answers a client's first request with a bad message, and the second with nothing."""
    router = zmq.Context.instance().socket(zmq.ROUTER)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    is_over = threading.Event()

    def serve() -> None:
        num = 0
        while not is_over.is_set():
            if not router.poll(50):
                continue
            peer, data = router.recv_multipart()
            kind, *fields = msgspec.msgpack.decode(data)
            if kind == "hello":
                router.send_multipart([peer, packed(*WELCOME)])
            elif kind == "generate":
                num += 1
                if num == 2:  # both are open
                    router.send_multipart([peer, bad(fields[0] - 1)])
        router.close(0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        is_over.set()
        thread.join()


def zip_logprobs(output: OutputDelta) -> list[tuple[int, dict[int, Logprob]]]:
    return list(zip(output.token_ids, output.logprobs or [], strict=True))


def test_the_lock_file_names_no_registry() -> None:
    lock = (NODE_CLIENT / "package-lock.json").read_text()
    assert "resolved" not in lock and "://" not in lock
    assert lock.count('"integrity"') == 4


def test_all_vectors_are_decoded_and_encoded(node_client: Path) -> None:
    vectors = ROOT / "tests" / "protocol" / "vectors.json"
    results = run(["node", "replay.mjs", str(vectors)], node_client, RUN_S)
    assert results == f"{len(json.loads(vectors.read_text())['vectors'])} vectors are read and written\n"


@pytest.mark.parametrize("what", BAD_MESSAGES)
def test_a_message_that_is_none_ends_all_streams_with_an_error(node_client: Path, what: str) -> None:
    """With 128 MiB: arrays of arrays in 200 bytes had taken all memory."""
    with hostile_server(BAD_MESSAGES[what]) as address:
        command = ["node", "--max-old-space-size=128", "--input-type=module", "-e", TWO_STREAMS, address]
        assert json.loads(run(command, node_client, RUN_S)) == ["ConnectionLost", "ConnectionLost"]


def test_it_streams_resumes_aborts_and_reports_errors(node_client: Path, server: Server) -> None:
    lines = [json.loads(line) for line in run(["node", "example.mjs", server.zmq], node_client, RUN_S).splitlines()]
    results: dict[str, Any] = dict(lines)
    assert results["info"]["version"] == 2
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=2**64 - 59, max_tokens=24, ignore_eos=True)
    with Client(server.zmq) as client:
        stream = client.generate([{"role": "user", "content": "Name three colours, with an emoji each."}], params)
        outputs = list(stream)
        greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=1)
        reply = client.generate("One, two,", greedy)
        vector = client.embed("One, two,", PoolingParams(dimensions=4, pooling="mean"))
        each = [(one, logprobs) for output in reply for one, logprobs in zip_logprobs(output)]
    num_cached = results["stream"]["usage"].pop("num_cached_tokens")
    assert num_cached is not None and 0 <= num_cached < stream.num_prompt_tokens  # other tests sent this prompt before
    assert results["stream"] == {
        "text": "".join(output.text for output in outputs),
        "ids": [token_id for output in outputs for token_id in output.token_ids],
        "seed": str(2**64 - 59),
        "usage": {"num_prompt_tokens": stream.num_prompt_tokens, "num_output_tokens": 24},
        "finish": "length",
    }
    assert [value for what, value in lines if what == "resumed"] == [
        {"cut": cut, "same": True} for cut in (1, 7, 13, 24)
    ]
    assert results["n"] == {"indexes": [0, 1], "other": True}
    pooled = {"numbers": vector.tolist(), "tasks": ["generate", "embed"], "refused": "unsupported_task"}
    assert results["pooled"] == pooled
    logprobs = results["logprobs"]
    assert logprobs["ids"] == [one for one, _ in each]
    for row, (one, known) in zip(logprobs["output"], each, strict=True):
        assert row[0] == [one, pytest.approx(known[one].logprob, abs=0.01), known[one].bytes.decode()]
        assert [named for named, *_ in row[1:]] == [named for named, two in known.items() if two.rank is not None]
    prompt = reply.prompt_logprobs
    assert prompt is not None and logprobs["prompt"][0] is None is prompt[0]
    for row, of_prompt in zip(logprobs["prompt"][1:], prompt[1:], strict=True):
        assert of_prompt is not None
        assert {one: pytest.approx(logprob, abs=0.01) for one, logprob, _ in row} == {
            one: known_prompt.logprob for one, known_prompt in of_prompt.items()
        }
    assert results["abort"] == {"finish": "abort"}
    assert results["error"] == {"status": 400, "param": "temperature"}
    assert results["name"] == {"id": "cmpl-counting/1", "tokens": 4, "without": None}
    assert results["too large"]["why"].endswith("the server reads at most 4194304")
    assert results["too large"]["served"], "the connection stays open"
    assert results["no server"] == {"lost": True}
    server.until_idle()
