"""Request features give the same results over HTTP, ZeroMQ and Python."""

import json
from typing import Any

import httpx
import pytest

from pipeline import LLM, Client, RequestError, SamplingParams, StructuredOutputsParams
from pipeline.errors import PromptError
from tests.e2e.server import Server

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "Name three colours, with an emoji each."}]


# --------------------------------------------------------------------------------------------- against the real model


def test_logprobs_equal_those_of_http_and_continue_after_a_resume(server: Server) -> None:
    fields: dict[str, Any] = {
        "temperature": 1.0,
        "seed": 7,
        "max_tokens": 24,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    with Client(server.zmq) as client:
        stream = client.generate(QUESTION, SamplingParams(**fields, logprobs=3, prompt_logprobs=1))
        outputs = list(stream)
        ids = [one for output in outputs for one in output.token_ids]
        logprobs = [one for output in outputs for one in output.logprobs or []]
        text = "".join(output.text for output in outputs)
        prompt, seed, model = stream.prompt_token_ids, stream.seed, client.info.model
        assert prompt is not None and stream.prompt_logprobs is not None
        again = client.generate(prompt, SamplingParams(**fields | {"seed": seed}, logprobs=3), received=[ids[:9]])
        resumed = [one for output in again for one in output.logprobs or []]
    assert len(logprobs) == len(ids) == 24
    joined = b"".join(each[one].bytes for one, each in zip(ids, logprobs, strict=True))
    assert joined.decode(errors="replace") == text
    assert resumed == logprobs[9:]

    body = fields | {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body | {"model": model}, timeout=60).json()
    content = reply["choices"][0]["logprobs"]["content"]
    assert [bytes(one["bytes"]) for one in content] == [each[i].bytes for i, each in zip(ids, logprobs, strict=True)]
    assert [one["logprob"] for one in content] == pytest.approx(
        [e[i].logprob for i, e in zip(ids, logprobs, strict=True)]
    )
    for one, each in zip(content, logprobs, strict=True):
        ranked = sorted((named for named in each.values() if named.rank is not None), key=lambda named: named.rank or 0)
        assert [bytes(top["bytes"]) for top in one["top_logprobs"]] == [named.bytes for named in ranked]
    over_http = reply.get("prompt_logprobs") or reply["choices"][0].get("prompt_logprobs")
    assert over_http[0] is None and stream.prompt_logprobs[0] is None
    for one, each_prompt in zip(over_http[1:], stream.prompt_logprobs[1:], strict=True):
        assert each_prompt is not None
        assert {int(key): value["logprob"] for key, value in one.items()} == pytest.approx(
            {key: value.logprob for key, value in each_prompt.items()}
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": -0.7, "bad_words": [" the"]},
        {"min_tokens": 8, "stop": ["e", "a"], "logit_bias": {28: 3.0}},
        {"structured_outputs": StructuredOutputsParams(regex="([a-z]{2,7}, )+[a-z]+\\.")},
    ],
    ids=["penalties", "min_tokens", "grammar"],
)
def test_a_resumed_stream_equals_the_uninterrupted_one(server: Server, fields: dict[str, Any]) -> None:
    """Features that depend on earlier ids work with the ids that the client sends, too."""
    params: dict[str, Any] = {"temperature": 0.9, "seed": 11, "max_tokens": 14, "n": 2, "logprobs": 1} | fields
    with Client(server.zmq) as client:
        whole = list(client.generate("Birds, trees,", SamplingParams(**params)))
        ids: list[list[int]] = [[one for o in whole if o.index == i for one in o.token_ids] for i in range(2)]
        logprobs = [[one for o in whole if o.index == i for one in o.logprobs or []] for i in range(2)]
        ends = [next(o.finish_reason for o in whole if o.index == i and o.finish_reason) for i in range(2)]
        for cut in (1, 4, 9):
            # If the sequence is over by then, the client has all its tokens but not its end.
            resumed = list(
                client.generate("Birds, trees,", SamplingParams(**params), received=[one[:cut] for one in ids])
            )
            for i in range(2):
                mine = [o for o in resumed if o.index == i]
                assert [one for o in mine for one in o.token_ids] == ids[i][cut:]
                assert [one for o in mine for one in o.logprobs or []] == logprobs[i][cut:]
                assert mine[-1].finish_reason == ends[i]


# --------------------------------------------------------------------------------------------- against the tiny model


def test_outputs_and_prompts_have_one_distribution(llm: LLM) -> None:
    (output,) = llm.generate([[5, 6, 7]], SamplingParams(**GREEDY, logprobs=2))
    (sequence,) = output.outputs
    assert sequence.logprobs is not None and sequence.cumulative_logprob is not None
    own = [each[one].logprob for one, each in zip(sequence.token_ids, sequence.logprobs, strict=True)]
    assert sequence.cumulative_logprob == pytest.approx(sum(own))
    assert [each[one].rank for one, each in zip(sequence.token_ids, sequence.logprobs, strict=True)] == [1] * 6
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    (read,) = llm.generate([[5, 6, 7, *sequence.token_ids]], params)
    assert read.prompt_logprobs is not None
    assert (len(read.prompt_logprobs), read.prompt_logprobs[0]) == (9, None)
    for token_id, known, each in zip(sequence.token_ids, own, read.prompt_logprobs[3:], strict=True):
        assert each is not None
        assert each[token_id].logprob == pytest.approx(known, abs=0.01)  # bfloat16 sums differ
    assert llm.generate([[5, 6, 7]], SamplingParams(**GREEDY))[0].outputs[0].logprobs is None


def test_logit_bias_allowed_token_ids_and_truncation_are_applied(llm: LLM) -> None:
    (free,) = llm.generate([[5, 6]], SamplingParams(**GREEDY))
    first = free.outputs[0].token_ids[0]
    (biased,) = llm.generate([[5, 6]], SamplingParams(**GREEDY, logit_bias={first: -100}))
    assert first not in biased.outputs[0].token_ids[:1]
    (allowed,) = llm.generate([[5, 6]], SamplingParams(**GREEDY, allowed_token_ids=[41, 43]))
    assert set(allowed.outputs[0].token_ids) <= {41, 43}
    (cut,) = llm.generate([[5, 6, 7, 8]], SamplingParams(**GREEDY, truncate_prompt_tokens=2))
    assert cut.prompt_token_ids == [7, 8]
    assert cut.outputs == llm.generate([[7, 8]], SamplingParams(**GREEDY))[0].outputs


def test_structured_outputs_match_their_constraints(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    constraints = [
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(regex="[ab]{3}"),
        StructuredOutputsParams(json=schema),
    ]
    each = [SamplingParams(max_tokens=64, n=2, seed=3, structured_outputs=one) for one in constraints]
    choice, regex, document = llm.generate(["x"] * 3, each)
    assert {one.text for one in choice.outputs} <= {"yes", "no"}
    assert all(len(one.text) == 3 and set(one.text) <= set("ab") for one in regex.outputs)
    for one in document.outputs:
        if one.finish_reason == "stop":
            assert set(json.loads(one.text)) == {"a"}
    with pytest.raises(PromptError, match=r"^prompts\[1\]: the regex can't be used: "):
        bad = StructuredOutputsParams(regex="[")
        llm.generate(["x", "y"], [SamplingParams(), SamplingParams(structured_outputs=bad)])


def test_a_chat_takes_template_kwargs_and_continuations(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}]
    (chat,) = llm.chat(
        messages,
        SamplingParams(**GREEDY),
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template_kwargs={"mood": "fine"},
    )
    (text,) = llm.generate("mood: fine\nuser: Hi\nassistant: Well", SamplingParams(**GREEDY))
    assert chat.prompt_token_ids == text.prompt_token_ids
    assert chat.outputs == text.outputs


def test_rejected_parameters_are_errors_that_name_the_parameter(llm: LLM) -> None:
    with Client(llm.address) as client:
        for params, param in (
            (SamplingParams(logprobs=21), "logprobs"),
            (SamplingParams(allowed_token_ids=[10**6]), "allowed_token_ids[0]"),
            (SamplingParams(stop=["x"] * 17), "stop"),
        ):
            with pytest.raises(RequestError) as caught:
                list(client.generate("Hi", params))
            assert (caught.value.status, caught.value.param) == (400, param)
