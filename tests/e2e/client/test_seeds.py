"""A seed samples the same output for a prompt, alone or in a list, over every interface."""

from typing import Any

import httpx
import pytest

from pipeline import LLM, SamplingParams
from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = ["The harbour was", "Once upon a time", "The harbour was", "1, 2, 3,"]
SAMPLING: dict[str, Any] = {"max_tokens": 10, "seed": 77, "n": 2, "ignore_eos": True}

Sample = tuple[list[int], list[float] | None]


def complete(server: Server, prompt: Any, **fields: Any) -> list[list[Sample]]:
    """For each prompt its n samples: ids and logprobs."""
    body = {"model": MODEL, "prompt": prompt, "logprobs": 1, "return_token_ids": True} | SAMPLING | fields
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    samples = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in response.json()["choices"]]
    n = body["n"]
    return [samples[i : i + n] for i in range(0, len(samples), n)]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_a_list_of_prompts_samples_what_each_samples_alone(server: Server, temperature: float) -> None:
    together = complete(server, PROMPTS, temperature=temperature)
    alone = [complete(server, prompt, temperature=temperature)[0] for prompt in PROMPTS]
    assert together == alone
    assert together[0] == together[2], "equal prompts, equal seeds"
    assert together[0][0] != together[0][1], "samples of one prompt differ"


def test_a_list_of_token_ids_samples_the_same(server: Server) -> None:
    prompts = [[1, 2, 3], [50, 60, 70, 80]]
    assert complete(server, prompts, temperature=1.5) == [complete(server, ids, temperature=1.5)[0] for ids in prompts]


def test_best_of_chooses_the_same(server: Server) -> None:
    fields = {"temperature": 1.5, "n": 1, "best_of": 3}
    assert complete(server, PROMPTS, **fields) == [complete(server, prompt, **fields)[0] for prompt in PROMPTS]


def test_zeromq_and_python_sample_the_same(server: Server) -> None:
    over_http = complete(server, PROMPTS, temperature=1.0)
    params = SamplingParams(temperature=1.0, logprobs=1, **SAMPLING)
    with LLM.attach(server.zmq) as llm:
        outputs = llm.generate(PROMPTS, params, progress=False)
        alone = [llm.generate(prompt, params, progress=False)[0] for prompt in PROMPTS]
    ids = [[list(one.token_ids) for one in output.outputs] for output in outputs]
    assert ids == [[list(one.token_ids) for one in output.outputs] for output in alone]
    assert ids == [[sample[0] for sample in samples] for samples in over_http]
    assert [[one.cumulative_logprob for one in output.outputs] for output in outputs] == [
        [one.cumulative_logprob for one in output.outputs] for output in alone
    ]


def test_without_a_seed_equal_prompts_differ(server: Server) -> None:
    samples = complete(server, ["Once upon a time"] * 4, temperature=2.0, seed=None, n=1, max_tokens=16)
    assert len({tuple(ids) for ((ids, _),) in samples}) == 4
