"""`best_of` on the real model: the best of the same sequences that n would return."""

import re
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import OpenAI

from pipeline import LLM, SamplingParams
from tests.e2e.server import Server
from tests.stages.execute.driver import Driver, row_add, settings

MODEL = "SmolLM2-135M-Instruct"
PROMPT = "On the seventh floor of the old tower, where nobody had been for sixty years, they found"  # words: ok
SAMPLED: dict[str, Any] = {"seed": 31, "temperature": 1.2, "max_tokens": 12, "ignore_eos": True}
NUM_FORKS = re.compile(r"^pipeline_schedule_forks_total\S* ([0-9.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def llm(server: Server) -> Iterator[LLM]:
    with LLM.attach(server.zmq) as llm:
        yield llm


def num_forks(server: Server) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        return sum(float(found) for found in NUM_FORKS.findall(response.read().decode()))


def mean_logprobs(folder: Path, prompt: list[int], outputs: list[list[int]]) -> list[float]:
    """The mean logprob of each output, by the same kernels: a row for each of its prefixes, all in one step."""
    driver = Driver(folder, settings(dtype="bfloat16", kv_mib=128, max_num_seqs=64, tokens=2048, threads=2))
    rows = [prompt + output[:length] for output in outputs for length in range(len(output))]
    adds = [row_add(row, ids, driver.take_blocks(len(ids) + 1)) for row, ids in enumerate(rows)]
    driver.step([(row, 0, len(ids), True) for row, ids in enumerate(rows)], adds=adds)
    logits = driver.logits().astype(np.float64)
    driver.runner.close()
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    sampled_logprobs = logits[np.arange(len(rows)), [token for output in outputs for token in output]]
    return [
        float(part.mean()) for part in np.split(sampled_logprobs, np.cumsum([len(output) for output in outputs])[:-1])
    ]


def test_the_two_best_of_four_are_among_the_four_that_n_returns(llm: LLM, server: Server, smollm2_dir: Path) -> None:
    forks = num_forks(server)
    (chosen,) = llm.generate(PROMPT, SamplingParams(n=2, best_of=4, **SAMPLED), progress=False)
    assert num_forks(server) == forks + 3, "the prompt is computed once"
    (four,) = llm.generate(PROMPT, SamplingParams(n=4, **SAMPLED), progress=False)
    outputs = [one.token_ids for one in four.outputs]
    assert len({tuple(ids) for ids in outputs}) == 4 and all(len(ids) == 12 for ids in outputs)
    means = mean_logprobs(smollm2_dir, four.prompt_token_ids, outputs)
    order = sorted(range(4), key=lambda index: -means[index])
    assert all(means[one] - means[next_] > 0.01 for one, next_ in pairwise(order)), means
    assert order[:2] != [0, 1], "the choice is not the first two"
    assert [one.token_ids for one in chosen.outputs] == [outputs[index] for index in order[:2]]
    assert [one.text for one in chosen.outputs] == [four.outputs[index].text for index in order[:2]]
    assert [(one.index, one.finish_reason) for one in chosen.outputs] == [(0, "length"), (1, "length")]


def test_openai_s_client_gets_the_same_and_is_billed_for_all(llm: LLM, server: Server) -> None:
    (four,) = llm.generate(PROMPT, SamplingParams(n=4, **SAMPLED), progress=False)
    (ranked,) = llm.generate(PROMPT, SamplingParams(n=3, best_of=4, **SAMPLED), progress=False)
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    for n in (1, 2, 3):
        reply = client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            n=n,
            best_of=4,
            seed=31,
            temperature=1.2,
            max_tokens=12,
            extra_body={"ignore_eos": True},
        )
        assert [choice.text for choice in reply.choices] == [one.text for one in ranked.outputs[:n]]
        assert [choice.index for choice in reply.choices] == list(range(n))
        assert reply.usage is not None
        assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in four.outputs) == 48
        assert reply.usage.prompt_tokens == len(four.prompt_token_ids)


def test_a_stop_string_scores_the_ids_up_to_it_whatever_the_steps(llm: LLM) -> None:
    """The choice is the same, alone and in a batch, though the number of tokens behind the stop string differs."""
    params = SamplingParams(n=3, best_of=6, stop=["e", "."], **SAMPLED | {"max_tokens": 40})
    alone = llm.generate(PROMPT, params, progress=False)[0]
    assert any(one.finish_reason == "stop" for one in alone.outputs)
    others = [SamplingParams(temperature=0, max_tokens=20 + index, ignore_eos=True) for index in range(6)]
    for _ in range(3):
        beside = llm.generate([PROMPT] * 7, [*others, params], progress=False)[-1]
        assert beside.outputs == alone.outputs
