"""Tasks of a model's pooler over ZeroMQ, with the Python client: what it computes, and what is refused."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline import AsyncLLM, PoolingParams
from pipeline.client.client import AsyncClient
from pipeline.client.errors import RequestError
from pipeline.client.inputs.pooling_params import with_task
from pipeline.client.inputs.prompts import Prompt
from pipeline.errors import PromptError
from pipeline.runtime import messages as m
from pipeline.runtime.model.pooler import Pooler
from pipeline.stages.gateway.apis.pooling.reply import PoolingDialect
from pipeline.stages.gateway.open_requests.request import Request
from tests.rig import PATIENCE_S
from tests.stages.gateway.apis.poolers import CLASSIFIER, CROSS_ENCODER, EMBEDDER, TAGGER, TEMPLATED, gate_of, give
from tests.stages.gateway.gate import Gate
from tests.stages.gateway.peers import address_of, do

AXIS_OF = {"a": np.eye(8)[0], "b": np.eye(8)[1], "c": np.eye(8)[2], "d": np.eye(8)[1]}
VECTOR = [3.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 12.0]


async def numbers(
    gate: Gate, params: PoolingParams, result: Any, prompt: Any = "Hi", num_ids: int = 3
) -> tuple[m.Submit, np.ndarray[Any, Any]]:
    """What ingest gets of a request, and what the client gets for this result."""
    async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
        stream = client.embed(prompt, params)
        submit = await do(gate.submit)
        gate.accept(submit, num_ids)
        give(gate, submit, result)
        return submit, await stream.embedded()


@pytest.mark.parametrize(
    ("pooler", "fields", "pooling", "result", "expected"),
    [
        (None, {}, m.Pooling.LAST, VECTOR, np.array(VECTOR) / 13),
        (EMBEDDER, {}, m.Pooling.MEAN, VECTOR, np.array(VECTOR) / 13),
        (EMBEDDER, {"pooling": "cls", "dimensions": 2}, m.Pooling.CLS, VECTOR, [1, 0]),
        (EMBEDDER, {"use_activation": False}, m.Pooling.MEAN, VECTOR, VECTOR),
        (EMBEDDER, {"normalize": False}, m.Pooling.MEAN, VECTOR, VECTOR),
        (EMBEDDER, {"task": "token_embed", "dimensions": 2}, m.Pooling.ALL, VECTOR * 3, [1, 0] * 3),
        (CLASSIFIER, {"task": "classify"}, m.Pooling.CLS, [0, 0, 1e9], [0, 0, 1]),
        (CLASSIFIER, {"task": "classify", "use_activation": False}, m.Pooling.CLS, [0, 0, 5], [0, 0, 5]),
        (TAGGER, {"task": "token_classify"}, m.Pooling.ALL, [0, 0, 0, 1e9], [0.5, 0.5, 0, 1]),
        (CROSS_ENCODER, {"task": "score"}, m.Pooling.CLS, [0], [0.5]),
    ],
)
async def test_a_task_has_its_pooling_and_its_activation(
    tmp_path: Path, pooler: Pooler | None, fields: dict[str, Any], pooling: m.Pooling, result: Any, expected: Any
) -> None:
    with Gate(tmp_path, pooler=pooler) as gate:
        submit, found = await numbers(gate, PoolingParams(**fields), result)
        assert submit.options.pooling == pooling
        assert np.allclose(found, expected)


@pytest.mark.parametrize("num_tokens", [3, 4000])
async def test_numbers_of_a_long_text_are_made_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Those of 8,192 tokens with 768 numbers each took 0.2 s, in the loop of all connections."""
    threads: list[str] = []
    made = PoolingDialect.result

    def result(dialect: PoolingDialect, request: Request) -> bytes:
        threads.append(threading.current_thread().name)
        return made(dialect, request)

    monkeypatch.setattr(PoolingDialect, "result", result)
    with gate_of(tmp_path, EMBEDDER) as gate:
        _, found = await numbers(gate, PoolingParams(task="token_embed"), VECTOR * num_tokens)
        assert found.size == num_tokens * 8
    assert len(threads) == 1 and threads[0].startswith("building large replies") == (num_tokens == 4000)


async def test_a_pair_and_a_named_prompt_reach_ingest(tmp_path: Path) -> None:
    with gate_of(tmp_path, CROSS_ENCODER) as gate:
        prompt = {"prompt": "q", "pair": "a"}
        submit, _ = await numbers(gate, PoolingParams(task="score"), [0], prompt)
        assert submit.prompt == m.TextPrompt("q", "a")
    for params, kwargs in (
        (PoolingParams(task="score"), ""),
        (PoolingParams(task="score", instruction="Find it."), '{"instruction":"Find it."}'),
        (PoolingParams(task="score", prompt_name="web"), '{"instruction":"Look."}'),
    ):
        with gate_of(tmp_path, TEMPLATED) as gate:
            submit, _ = await numbers(gate, params, [0], prompt)
            assert submit.prompt == m.TextPrompt("q", "a", kwargs)
    with gate_of(tmp_path, EMBEDDER) as gate:
        submit, _ = await numbers(gate, PoolingParams(prompt_name="query"), VECTOR)
        assert submit.prompt == m.TextPrompt("search: Hi")


async def test_async_llm_scores_and_classifies(tmp_path: Path) -> None:
    with gate_of(tmp_path, CROSS_ENCODER) as gate:
        async with AsyncLLM(address=address_of(gate)) as llm:
            scoring = asyncio.create_task(llm.score("q", ["a", "b"], PoolingParams(use_activation=False)))
            for _ in range(2):
                submit = await do(gate.submit)
                gate.accept(submit, 3)
                give(gate, submit, [{"a": -1, "b": 2}[submit.prompt.pair]])
            assert [one.outputs.score for one in await scoring] == [-1, 2]
            with pytest.raises(PromptError, match=r"data_2\[1\] must be a text, not list"):
                given: list[Prompt] = ["a", [7]]
                await llm.score("q", given)
    with gate_of(tmp_path, EMBEDDER) as gate:
        async with AsyncLLM(address=address_of(gate)) as llm:
            scoring = asyncio.create_task(llm.score(["a", "b"], ["c", "d"]))
            for _ in range(4):
                submit = await do(gate.submit)
                gate.accept(submit, 3)
                give(gate, submit, AXIS_OF[submit.prompt.text])
            assert [one.outputs.score for one in await scoring] == [0, 1]
    with gate_of(tmp_path, CLASSIFIER) as gate:
        async with AsyncLLM(address=address_of(gate)) as llm:
            classifying = asyncio.create_task(llm.classify("Hi"))
            submit = await do(gate.submit)
            gate.accept(submit, 3)
            give(gate, submit, [0, 0, 1e9])
            assert (await classifying).outputs.probs == [0, 0, 1]
            with pytest.raises(PromptError, match="the model has no task embed: its tasks are classify"):
                await llm.embed("Hi")


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ("Hi", PoolingParams(prompt_name="title"), "the model has Clustering, document, query"),
        ({"prompt": "Hi", "pair": "a", "prompt_token_ids": b""}, PoolingParams(), "not allowed together"),
        ([1, 2], PoolingParams(prompt_name="query"), "not allowed with token ids"),
        ("Hi", PoolingParams(task="token_embed", pooling="cls"), "not allowed with task = token_embed"),
        ("Hi", PoolingParams(dimensions=3), "one of 2, 4, not 3"),
        ("Hi", PoolingParams(instruction="Find it."), "'instruction' needs 'pair'"),
    ],
)
async def test_the_server_refuses_what_http_refuses(tmp_path: Path, prompt: Any, params: Any, words: str) -> None:
    with gate_of(tmp_path, EMBEDDER) as gate:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            with pytest.raises(RequestError, match=words):
                await client.embed(prompt, params).embedded()


async def test_a_task_that_the_model_lacks_is_refused_before_sending(tmp_path: Path) -> None:
    with gate_of(tmp_path, CLASSIFIER) as gate:
        async with await AsyncClient.connect(address_of(gate), timeout_s=PATIENCE_S) as client:
            assert client.info.tasks == ["classify"]
            with pytest.raises(ValueError, match="no task embed: its tasks are classify"):
                client.embed("Hi")
            with pytest.raises(RequestError, match="its tasks are classify"):
                await client.generate("Hi").closed()


@pytest.mark.parametrize(
    ("params", "task", "tasks", "expected"),
    [
        (PoolingParams(), None, ["generate", "embed"], "embed"),
        (PoolingParams(), None, ["token_classify"], "token_classify"),
        (PoolingParams(task="score"), None, ["classify", "score"], "score"),
        (PoolingParams(), "embed", [], "embed"),
    ],
)
def test_a_method_has_its_task_or_the_first_of_the_model(
    params: PoolingParams, task: str | None, tasks: list[str], expected: str
) -> None:
    assert with_task(params, task, tasks, "params").task == expected


@pytest.mark.parametrize(
    ("params", "task", "tasks", "words"),
    [
        (PoolingParams(), "embed", ["classify"], "the model has no task embed: its tasks are classify"),
        (PoolingParams(), "plugin", ["embed"], "the task must be one of embed, .*, not 'plugin'"),
        (PoolingParams(task="embed"), "score", ["embed", "score"], "params has task = embed, and this is for score"),
        (PoolingParams(), "classify", [], "its tasks are embed"),
    ],
)
def test_a_wrong_task_is_named(params: PoolingParams, task: str, tasks: list[str], words: str) -> None:
    with pytest.raises(PromptError, match=words):
        with_task(params, task, tasks, "params")
