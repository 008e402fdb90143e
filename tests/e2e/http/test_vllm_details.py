"""Details of vLLM's HTTP API that its clients rely on, with the real model."""

import json
import re
from typing import Any

import httpx
import pytest

from tests.e2e.embedded import until
from tests.e2e.server import Server

GREEDY = {"temperature": 0, "max_tokens": 4}
VOCAB_SIZE = 49152


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Server, path: str, body: dict[str, Any]) -> str:
    response = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


def chunks(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    response = httpx.post(f"{server.url}{path}", json=body | {"stream": True}, timeout=60)
    lines = re.findall("^data: ({.+)$", response.text, re.MULTILINE)
    return [json.loads(line)["choices"][0] for line in lines]


def test_a_prompt_is_truncated_on_either_side(server: Server) -> None:
    ids = [4013, 28, 827, 28, 1296, 28]
    for side, kept in ((None, ids[-2:]), ("left", ids[-2:]), ("right", ids[:2])):
        body = {"prompt": ids, "truncate_prompt_tokens": 2, "truncation_side": side, "return_token_ids": True}
        reply = post(server, "/v1/completions", body | GREEDY)
        assert reply["choices"][0]["prompt_token_ids"] == kept
        embedding = {"input": ids, "truncate_prompt_tokens": 2, "truncation_side": side}
        assert post(server, "/v1/embeddings", embedding)["usage"]["prompt_tokens"] == 2
    assert (
        post(server, "/v1/embeddings", embedding)["data"] == post(server, "/v1/embeddings", {"input": ids[:2]})["data"]
    )


def test_a_continued_message_is_echoed_before_its_continuation(server: Server) -> None:
    saying = "Here is a common saying about apples. An apple a day, keeps"
    body = GREEDY | {
        "messages": [{"role": "user", "content": "Tell me a saying"}, {"role": "assistant", "content": saying}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    plain = post(server, "/v1/chat/completions", body)["choices"][0]["message"]
    echoed = post(server, "/v1/chat/completions", body | {"echo": True})["choices"][0]["message"]
    assert echoed == plain | {"content": saying + plain["content"], "role": "assistant"}
    deltas = [
        choice["delta"].get("content", "") for choice in chunks(server, "/v1/chat/completions", body | {"echo": True})
    ]
    assert deltas[1] == saying and "".join(deltas) == echoed["content"]


def test_other_roles_are_written_as_the_template_writes_them(server: Server) -> None:
    replies = []
    for content in ("what is 1+1?", [{"type": "text", "text": "what is 1+1?"}]):
        body = {"messages": [{"role": "my-custom-role", "content": content}]}
        replies.append(post(server, "/v1/chat/completions", body | GREEDY)["choices"][0]["message"])
        rendered = post(server, "/v1/chat/completions/render", body)
        assert "<|im_start|>my-custom-role\nwhat is 1+1?<|im_end|>" in rendered["prompt"]
    assert replies[0] == replies[1]


def test_errors_have_the_words_that_clients_look_for(server: Server) -> None:
    bias = {str(VOCAB_SIZE): 1, "5": 1, str(VOCAB_SIZE + 7): 1}
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ):
        message = refused(server, path, body | {"logit_bias": bias})
        for number in (VOCAB_SIZE, VOCAB_SIZE + 7):
            assert f"'logit_bias.{number}'" in message
        assert message.endswith(f"vocabulary size {VOCAB_SIZE}")
    assert "out of vocabulary" in refused(server, "/v1/completions", {"prompt": [999_999]})
    words = "Either prompt or prompt_embeds must be provided and non-empty."
    for fields in ({}, {"prompt": None}, {"prompt": ""}, {"prompt": "", "prompt_embeds": []}):
        assert words in refused(server, "/v1/completions", fields)


def test_the_last_text_of_a_stream_has_its_finish_reason(server: Server) -> None:
    fields = GREEDY | {"ignore_eos": True}
    chat = chunks(server, "/v1/chat/completions", fields | {"messages": [{"role": "user", "content": "Count to ten"}]})
    completion = chunks(server, "/v1/completions", fields | {"prompt": "One, two,"})
    for choices, last in ((chat, chat[-1]["delta"]["content"]), (completion, completion[-1]["text"])):
        assert last and [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
        assert choices[-1]["finish_reason"] == "length"


def test_integral_floats_are_integers_and_other_types_of_bodies_get_415(server: Server) -> None:
    body = {"prompt": "One, two,", "max_tokens": 3.0, "seed": 1.0, "n": 2.0}
    assert post(server, "/v1/completions", body)["usage"]["completion_tokens"] <= 6
    assert "'max_tokens' must be an integer" in refused(server, "/v1/completions", body | {"max_tokens": 3.5})
    url, text = f"{server.url}/v1/completions", json.dumps(body)
    for kind in ("application/x-www-form-urlencoded", "text/plain", "multipart/form-data"):
        assert httpx.post(url, content=text, headers={"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_load_counts_requests_while_they_run(server: Server, path: str) -> None:
    load = f"{server.url}/load"
    until(lambda: httpx.get(load).json()["server_load"] == 0, "earlier requests to end")
    body: dict[str, Any] = {"max_tokens": 1000, "ignore_eos": True, "stream": True}
    body |= {"prompt": "Hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        assert httpx.get(load).json()["server_load"] == 1
    metrics = httpx.get(f"{server.url}/metrics").text
    for reason in ("capacity", "deferred"):
        assert re.search(rf'^vllm:num_requests_waiting_by_reason{{.*reason="{reason}"}} 0$', metrics, re.MULTILINE)
