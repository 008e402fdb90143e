"""Beam search over every interface, and while stages die."""

import json
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from pipeline.cli.replay.replaying import replay
from pipeline.replay.compare import compare
from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.stages.gateway.gate import events_of
from tests.stages.gateway.peers import until

PROMPT = "one two three one two three one two"
WIDTH = 3
LONG: dict[str, Any] = {"max_tokens": 150, "ignore_eos": True}


def sets(tiny_model: Path) -> list[str]:
    """Models are prepared beside their folder."""
    model = [f"model={tiny_model}", f"cache_dir={link_kernels(tiny_model.parent / 'cache')}"]
    return [*model, "execute.kv_cache_bytes=16MiB", "execute.num_threads=1"]


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    with Server(*sets(tiny_model)) as server:
        yield server


def request_of(server: Server, **fields: Any) -> urllib.request.Request:
    body = {"prompt": PROMPT, "max_tokens": 20, "n": WIDTH, "use_beam_search": True, "logprobs": 1} | fields
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    return request


def complete(server: Server, **fields: Any) -> Any:
    with urllib.request.urlopen(request_of(server, **fields), timeout=120) as reply:
        return json.load(reply)


def num_running(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:num_requests_running"))


def texts(answer: Any) -> Any:
    return [(choice["text"], choice["finish_reason"], choice["logprobs"]) for choice in answer["choices"]]


def scores(answer: Any) -> list[float]:
    each = [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]
    return [sum(logprobs) / len(logprobs) for logprobs in each]


def test_choices_are_different_and_the_best_comes_first(server: Server) -> None:
    answer = complete(server)
    assert len({choice["text"] for choice in answer["choices"]}) == WIDTH
    assert scores(answer) == sorted(scores(answer), reverse=True)
    wider = complete(server, n=8)
    assert scores(wider)[0] >= scores(answer)[0] - 1e-6
    greedy = complete(server, use_beam_search=False, n=1, temperature=0, repetition_penalty=1.0)
    assert scores(answer)[0] >= scores(greedy)[0]
    assert answer["usage"]["completion_tokens"] <= WIDTH * 20


def test_a_stream_has_the_same_choices(server: Server) -> None:
    expected = {index: choice["text"] for index, choice in enumerate(complete(server)["choices"])}
    with urllib.request.urlopen(request_of(server, stream=True), timeout=60) as reply:
        events = events_of(reply.read().decode())
    found: dict[int, str] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert found == expected


def test_a_stop_string_ends_the_text(server: Server) -> None:
    first = complete(server)["choices"][0]["text"]
    stop = first[len(first) // 2 :][:2]
    cut = complete(server, stop=stop)["choices"][0]
    assert (cut["text"], cut["finish_reason"]) == (first[: first.index(stop)], "stop")


def test_llm_finds_the_same(server: Server) -> None:
    answer = complete(server, length_penalty=0.5, early_stopping=True)
    params = BeamSearchParams(WIDTH, 20, length_penalty=0.5, early_stopping=True)
    with LLM.attach(server.zmq) as llm:
        (found,) = llm.beam_search(PROMPT, params, progress=False)
        (output,) = llm.generate(PROMPT, params.sampling_params(), progress=False)
        with pytest.raises(ValueError, match="beam_width"):
            BeamSearchParams(0, 20)
    assert [one.text for one in found.sequences] == [choice["text"] for choice in answer["choices"]]
    for sequence, completion in zip(found.sequences, output.outputs, strict=True):
        assert sequence.tokens == output.prompt_token_ids + completion.token_ids
        assert sequence.cum_logprob == completion.cumulative_logprob
        assert sequence.score == pytest.approx(sequence.cum_logprob / len(completion.token_ids) ** 0.5)


async def test_async_llm_finds_the_same(server: Server) -> None:
    answer = complete(server)
    async with AsyncLLM.attach(server.zmq) as llm:
        found = await llm.beam_search(PROMPT, BeamSearchParams(WIDTH, 20))
    assert [one.text for one in found.sequences] == [choice["text"] for choice in answer["choices"]]


def test_what_it_is_not_combined_with_is_refused(server: Server) -> None:
    for fields in ({"best_of": 5}, {"presence_penalty": 1}, {"n": 128, "max_tokens": 200}):
        with pytest.raises(urllib.error.HTTPError) as refused:
            complete(server, **fields)
        with refused.value as response:
            error = json.load(response)
        assert response.code == 400
        assert error.get("error", error)["param"] in ("best_of", "presence_penalty", "n", "max_tokens")
    with LLM.attach(server.zmq) as llm, pytest.raises(Exception, match="use_beam_search"):
        llm.generate(PROMPT, SamplingParams(n=2, use_beam_search=True, bad_words=["x"]), progress=False)


@pytest.fixture(scope="module")
def expected(server: Server) -> Any:
    return texts(complete(server, **LONG))


@pytest.mark.parametrize("stage", ["execute", "schedule", "detokenize"])
def test_a_search_survives_the_death_of_a_stage(server: Server, expected: Any, stage: str) -> None:
    answers: list[Any] = []
    search = threading.Thread(target=lambda: answers.append(texts(complete(server, **LONG))), daemon=True)
    search.start()
    until(lambda: num_running(server) > 0 or answers, "the search runs")
    server.stage(stage).send_signal(signal.SIGKILL)
    search.join(120)
    assert answers == [expected]


@pytest.fixture(scope="module")
def recordings(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a server from start to end, with a search beside samples."""
    folder = tmp_path_factory.mktemp("recordings")
    files = {stage: folder / f"{stage}.rec" for stage in ("execute", "schedule")}
    options = [part for stage, path in files.items() for part in ("--record", f"{stage}={path}")]
    with Server(*sets(tiny_model), options=tuple(options)) as server:
        bodies: list[dict[str, Any]] = [{}, {"use_beam_search": False, "n": 2, "temperature": 1.0, "seed": 5}]
        threads = [threading.Thread(target=complete, args=(server,), kwargs=body) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        server.until_idle()
    return files


@pytest.mark.parametrize("stage", ["execute", "schedule"])
def test_the_replay_of_a_search_is_bit_identical(stage: str, recordings: dict[str, Path], tmp_path: Path) -> None:
    replay(stage, recordings[stage], tmp_path / "out", paced=False, inline=False)
    comparison = compare(tmp_path / "out", recordings[stage])
    assert comparison.are_same, comparison.difference
    assert comparison.num_same == sum(comparison.sent.values()) > 3
