"""`LLM.embed`, `encode` and `score`: vLLM's shapes, the vectors of POST /v1/embeddings, and what is not supported."""

import json
import re
import urllib.request
from typing import Any

import numpy as np
import pytest

from pipeline import LLM, AsyncLLM, Client, EmbeddingRequestOutput, PoolingParams, SamplingParams
from pipeline.client.inputs.prompts import Prompt
from pipeline.errors import PromptError, ServerFailed, UserError
from tests.e2e.embedded import load_of, until_idle

TEXTS = ["a", "b a c", "The capital of Greece"]


def over_http(llm: LLM, **body: Any) -> list[list[float]]:
    """The vectors of POST /v1/embeddings."""
    load_of(llm)  # the server has logged its address
    assert llm.server is not None
    (url,) = re.findall(r"ready on (http://\S+)", llm.server.log())
    request = urllib.request.Request(
        f"{url}/v1/embeddings",
        json.dumps({"model": llm.info.model, **body}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return [one["embedding"] for one in json.load(response)["data"]]


def test_embeddings_have_the_shape_of_vllm_s_and_the_values_of_http(llm: LLM) -> None:
    outputs = llm.embed(TEXTS)
    assert all(isinstance(one, EmbeddingRequestOutput) and one.finished for one in outputs)
    assert [one.outputs.embedding for one in outputs] == over_http(llm, input=TEXTS)
    assert {one.outputs.hidden_size for one in outputs} == {len(outputs[0].outputs.embedding)}
    assert len({one.request_id for one in outputs}) == len(TEXTS)
    (prompt,) = llm.generate(TEXTS[2], SamplingParams(max_tokens=1))
    assert outputs[2].prompt_token_ids == prompt.prompt_token_ids
    (ids,) = llm.embed([prompt.prompt_token_ids])
    assert ids.outputs.embedding == outputs[2].outputs.embedding
    (again,) = llm.embed(TEXTS[2])
    assert again.outputs.embedding == outputs[2].outputs.embedding


def test_pooling_parameters_apply_to_all_prompts_or_each(llm: LLM) -> None:
    short = [one.outputs.embedding for one in llm.embed(TEXTS, PoolingParams(dimensions=3, pooling="mean"))]
    assert short == over_http(llm, input=TEXTS, dimensions=3, pooling="mean")
    each = llm.embed(TEXTS, [PoolingParams(), PoolingParams(dimensions=2), PoolingParams(pooling="mean")])
    assert len(each[1].outputs.embedding) == 2
    assert each[2].outputs.embedding == over_http(llm, input=TEXTS[2], pooling="mean")[0]
    (cut,) = llm.embed(TEXTS[2], truncate_prompt_tokens=1)
    assert len(cut.prompt_token_ids) == 1


def test_encode_returns_arrays_of_length_1(llm: LLM) -> None:
    outputs = llm.encode(iter(TEXTS), pooling_task="embed")
    for output, expected in zip(outputs, llm.embed(TEXTS), strict=True):
        assert output.outputs.data.dtype == np.float32 and output.outputs.data.ndim == 1
        assert np.linalg.norm(output.outputs.data) == pytest.approx(1.0, abs=1e-5)
        assert output.outputs.data.tolist() == expected.outputs.embedding


def test_scores_are_cosine_similarities_of_one_text_with_many_or_of_pairs(llm: LLM) -> None:
    vectors = np.array([one.outputs.embedding for one in llm.embed(TEXTS)])
    one = llm.score(TEXTS[0], TEXTS)
    assert [each.outputs.score for each in one] == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)
    assert one[0].outputs.score == pytest.approx(1.0, abs=1e-5)
    pairs = llm.score(TEXTS, TEXTS[::-1])
    expected = [float(left @ right) for left, right in zip(vectors, vectors[::-1], strict=True)]
    assert [each.outputs.score for each in pairs] == pytest.approx(expected, abs=1e-5)
    first, last = (llm.embed(text)[0].prompt_token_ids for text in (TEXTS[0], TEXTS[2]))
    assert pairs[0].prompt_token_ids == first + last
    assert re.fullmatch(r"\w+_\w+", pairs[0].request_id)


def test_errors_name_the_prompt_and_what_is_valid(llm: LLM) -> None:
    with pytest.raises(
        PromptError, match=r"^prompts\[[01]\]: 'dimensions' must be at most \d+, the length of an embedding"
    ):
        llm.embed(["a", "b"], PoolingParams(dimensions=10**6))
    second: list[Prompt] = ["b", {"prompt_token_ids": [-1]}]
    with pytest.raises(PromptError, match=r"^data_2\[1\]\['prompt_token_ids'\]\[0\]: token id -1 is out of vocabulary"):
        llm.score("a", second)
    with pytest.raises(PromptError, match="data_1 has 2 texts and data_2 has 3: give one text as data_1, or as many"):
        llm.score(["a", "b"], ["a", "b", "c"])
    with pytest.raises(PromptError, match="pooling_params has 1 entries for 2 prompts"):
        llm.embed(["a", "b"], [PoolingParams()])
    with pytest.raises(PromptError, match="pooling_params must be PoolingParams, not SamplingParams"):
        llm.embed("a", SamplingParams())  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="truncate_prompt_tokens must be from -1"):
        llm.embed("a", truncate_prompt_tokens=-2)
    until_idle(llm)
    assert llm.embed("a")


@pytest.mark.parametrize("task", ["classify", "score", "token_embed", "token_classify", "other"])
def test_other_tasks_are_refused_by_name(llm: LLM, task: str) -> None:
    words = (
        "the task must be one of embed, .*, not 'other'"
        if task == "other"
        else f"no task {task}: its tasks are generate"
    )
    with pytest.raises(UserError, match=words):
        llm.encode("a", pooling_task=task)


def test_methods_that_need_another_model_say_what_to_use(llm: LLM) -> None:
    with pytest.raises(UserError, match="the model has no task classify: its tasks are generate, embed"):
        llm.classify("a")
    with pytest.raises(UserError, match=r"LLM\.reward needs a reward model.*prompt_logprobs"):
        llm.reward("a")


async def test_async_embeddings(llm: LLM) -> None:
    async with AsyncLLM.attach(llm.address) as streams:
        output = await streams.embed("a", PoolingParams(dimensions=4), "mine")
        assert (output.request_id, output.outputs.hidden_size) == ("mine", 4)
        (encoded,) = [one async for one in streams.encode("a", PoolingParams(dimensions=4))]
        assert encoded.outputs.data.tolist() == output.outputs.embedding
        with pytest.raises(ServerFailed, match="aborted"):
            await streams.embed("a " * 40, timeout_s=1e-6)


def test_the_blocking_client_can_embed(llm: LLM) -> None:
    with Client(llm.address) as client:
        assert client.embed("a").tolist() == llm.embed("a")[0].outputs.embedding
