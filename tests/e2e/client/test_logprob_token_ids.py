"""`logprob_token_ids` over every interface: the logprobs of given ids, whatever their rank."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from pipeline import LLM, AsyncClient, SamplingParams
from tests.e2e.server import Server
from tests.stages.gateway.gate import events_of

MODEL = "SmolLM2-135M-Instruct"
GIVEN = [40000, 28, 40000, 17, 5]
"""Includes unlikely ids and a duplicate."""
FIELDS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 3, "return_tokens_as_token_ids": True}
CHAT = {"messages": [{"role": "user", "content": "Say a word."}], "logprobs": True}
COMPLETION = {"prompt": "The harbour was", "logprobs": 1}

Scores = list[dict[int, float]]


def post(server: Server, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json=FIELDS | body, timeout=60)
    assert response.status_code == 200, response.text
    return events_of(response.text) if body.get("stream") else response.json()


def id_of(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def of_chat(logprobs: Any) -> Iterator[tuple[int, list[tuple[int, float]]]]:
    for one in logprobs["content"]:
        yield id_of(one["token"]), [(id_of(top["token"]), top["logprob"]) for top in one["top_logprobs"]]


def of_text(logprobs: Any) -> Iterator[tuple[int, dict[int, float]]]:
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        yield id_of(token), {id_of(name): score for name, score in top.items()}


@pytest.fixture(scope="module")
def natural(server: Server) -> Scores:
    """At each position of the completion, the logprobs of the 20 most likely ids."""
    (choice,) = post(server, "/v1/completions", **COMPLETION | {"logprobs": 20})["choices"]
    return [top for _, top in of_text(choice["logprobs"])]


def test_they_equal_the_logprobs_of_the_most_likely_ids(server: Server, natural: Scores) -> None:
    given = list(natural[0])[:7]
    (choice,) = post(server, "/v1/completions", **COMPLETION, logprob_token_ids=given)["choices"]
    found = list(of_text(choice["logprobs"]))
    assert {one: natural[0][one] for one in given} == found[0][1]
    for token, top in found:
        assert set(top) == {*given, token}


def test_chats_return_them_in_the_given_order_behind_the_sampled_id_whole_and_streamed(server: Server) -> None:
    body = CHAT | {"logprob_token_ids": GIVEN}
    (choice,) = post(server, "/v1/chat/completions", **body)["choices"]
    whole = list(of_chat(choice["logprobs"]))
    assert len(whole) == 3
    for token, top in whole:
        assert [one for one, _ in top] == list(dict.fromkeys([token, *GIVEN]))
    given = dict(whole[0][1])
    body["logprob_token_ids"] = repeated = [GIVEN[0], whole[0][0]]
    (choice,) = post(server, "/v1/chat/completions", **body)["choices"]
    token, top = next(of_chat(choice["logprobs"]))
    assert [one for one, _ in top] == [token, GIVEN[0]] and set(repeated) == dict(top).keys()
    assert dict(top)[GIVEN[0]] == given[GIVEN[0]]
    body["logprob_token_ids"] = GIVEN
    streamed = []
    for event in post(server, "/v1/chat/completions", **body, stream=True):
        for one in event["choices"]:
            streamed += of_chat(one["logprobs"]) if one["logprobs"] else []
    assert streamed == whole


def test_completions_return_them_whole_streamed_and_per_prompt(server: Server) -> None:
    body = COMPLETION | {"logprob_token_ids": GIVEN}
    (choice,) = post(server, "/v1/completions", **body)["choices"]
    whole = list(of_text(choice["logprobs"]))
    assert len(whole) == 3 and all(set(GIVEN) <= set(top) for _, top in whole)
    streamed = []
    for event in post(server, "/v1/completions", **body, stream=True):
        for one in event["choices"]:
            streamed += of_text(one["logprobs"]) if one["logprobs"] else []
    assert streamed == whole
    # With an echo, the prompt's tokens keep the most likely ids.
    (echoed,) = post(server, "/v1/completions", **body, echo=True)["choices"]
    each = list(of_text({name: echoed["logprobs"][name][1:] for name in ("tokens", "top_logprobs")}))
    assert each[-3:] == whole and all(1 <= len(top) <= 2 for _, top in each[:-3])
    both = post(server, "/v1/completions", **body | {"prompt": ["The harbour was", "1, 2,"], "n": 2, "temperature": 1})
    assert len(both["choices"]) == 4
    for one in both["choices"]:
        assert all(set(GIVEN) <= set(top) for _, top in of_text(one["logprobs"]))


def test_python_and_zeromq_return_them_without_ranks(server: Server) -> None:
    (choice,) = post(server, "/v1/completions", **COMPLETION, logprob_token_ids=GIVEN)["choices"]
    expected = [top for _, top in of_text(choice["logprobs"])]
    params = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=GIVEN)
    with LLM.attach(server.zmq) as llm:
        (output,) = llm.generate(["The harbour was"], params)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert [{one: score.logprob for one, score in each.items()} for each in logprobs] == expected
    assert all(score.rank is None and score.decoded_token for each in logprobs for score in each.values())


async def test_a_resumed_stream_continues_with_them(server: Server) -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=4, ignore_eos=True, logprob_token_ids=GIVEN)
    async with await AsyncClient.connect(server.zmq) as client:
        whole = [output async for output in client.generate("Once upon", params)]
        ids = [token for output in whole for token in output.token_ids]
        each = [one for output in whole for one in output.logprobs or ()]
        rest = [output async for output in client.generate("Once upon", params, received=ids[:2])]
    assert [one for output in rest for one in output.logprobs or ()] == each[2:]


def test_token_in_token_out_returns_them(server: Server) -> None:
    params = {"temperature": 0, "max_tokens": 2, "logprob_token_ids": GIVEN}
    body = {"token_ids": [1, 2, 3], "sampling_params": params}
    response = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    assert [[one for one, _ in top] for _, top in of_chat(choice["logprobs"])] == [
        list(dict.fromkeys([token, *GIVEN])) for token in choice["token_ids"]
    ]


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/completions", COMPLETION | {"logprobs": None, "logprob_token_ids": [1]}, "together with 'logprobs'"),
        ("/v1/chat/completions", CHAT | {"logprobs": False, "logprob_token_ids": [1]}, "together with 'logprobs'"),
        ("/v1/completions", COMPLETION | {"logprob_token_ids": [49152]}, "logprob_token_ids[0]"),
        ("/v1/completions", COMPLETION | {"logprob_token_ids": [-1]}, "logprob_token_ids"),
        ("/v1/completions", COMPLETION | {"logprob_token_ids": list(range(129))}, "128"),
        ("/v1/completions", COMPLETION | {"logprob_token_ids": [1], "echo": True, "max_tokens": 0}, "no output"),
    ],
)
def test_invalid_combinations_are_rejected(server: Server, path: str, fields: dict[str, Any], words: str) -> None:
    response = httpx.post(f"{server.url}{path}", content=json.dumps(FIELDS | fields), headers=JSON, timeout=60)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"].startswith("logprob_token_ids") and words in error["message"]


JSON = {"Content-Type": "application/json"}
