"""The JavaScript client, installed from its lock file: it replays the vectors and uses the real server."""

import json
from pathlib import Path
from typing import Any

import pytest

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
