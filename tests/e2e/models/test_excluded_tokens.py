"""What a model's generation_config.json excludes is never sampled: in any kind of request, also if a stage dies."""

import json
import shutil
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.stages.gateway.gate import events_of
from tests.stages.gateway.peers import until

PROMPT = "one two three one two three one two"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def sets(model: Path, *others: str) -> list[str]:
    """Models are prepared beside their folder."""
    small = ["execute.kv_cache_bytes=16MiB", "execute.num_threads=1"]
    return [f"model={model}", f"cache_dir={link_kernels(model.parent / 'cache')}", *small, *others]


def post(server: Server, route: str, **body: Any) -> Any:
    request = urllib.request.Request(f"{server.url}{route}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read().decode()
    return events_of(text) if body.get("stream") else json.loads(text)


def ids_of(server: Server, **fields: Any) -> list[list[int]]:
    answer = post(server, "/v1/completions", **{"prompt": PROMPT, "max_tokens": 12, **GREEDY, **fields})
    return [choice["token_ids"] for choice in answer["choices"]]


def chat_ids(server: Server, **fields: Any) -> list[int]:
    body = {"messages": [{"role": "user", "content": "one two"}], "max_tokens": 12, **GREEDY, **fields}
    ids: list[int] = post(server, "/v1/chat/completions", **body)["choices"][0]["token_ids"]
    return ids


PREFILL: dict[str, Any] = {
    "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two three"}],
    "add_generation_prompt": False,
    "continue_final_message": True,
}


@pytest.fixture(scope="module")
def firsts(tiny_model: Path) -> Iterator[dict[str, int]]:
    """The first ids of replies without the file, by the kind of request; and an id that comes later."""
    with Server(*sets(tiny_model)) as server:
        (text,) = ids_of(server)
        yield {
            "text": text[0],
            "later": next(one for one in text[2:] if one != text[0]),
            "chat": chat_ids(server)[0],
            "prefill": chat_ids(server, **PREFILL)[0],
            "clock": post(server, "/tokenize", prompt="clock")["tokens"][0],
        }


@pytest.fixture(scope="module")
def model(tiny_model: Path, firsts: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("excluding") / "tiny"
    shutil.copytree(tiny_model, folder)
    path = folder / "generation_config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    begin = [firsts[kind] for kind in ("text", "chat", "prefill", "clock")]
    config |= {"begin_suppress_tokens": begin, "suppress_tokens": [firsts["later"]]}
    path.write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with Server(*sets(model)) as server:
        yield server


def test_a_reply_begins_with_another_token_which_may_come_later(server: Server, firsts: dict[str, int]) -> None:
    for kind, ids in (
        ("text", ids_of(server)[0]),
        ("chat", chat_ids(server)),
        ("prefill", chat_ids(server, **PREFILL)),
    ):
        assert ids[0] != firsts[kind] and firsts["later"] not in ids
    assert ids_of(server) == ids_of(server), "also behind cached blocks"
    (forced,) = ids_of(server, logit_bias={str(firsts["text"]): 100})
    assert forced[0] != firsts["text"] and forced[1:] == [firsts["text"]] * 11
    for first, *_ in ids_of(server, n=4, temperature=1.5, logit_bias={str(firsts["text"]): 5}):
        assert first != firsts["text"]
    (best, *_) = ids_of(server, n=3, use_beam_search=True)
    assert best[0] != firsts["text"] and firsts["later"] not in best


def test_a_grammar_that_needs_such_a_token_is_an_error_that_names_the_file(
    server: Server, firsts: dict[str, int]
) -> None:
    only = {"allowed_token_ids": [firsts["text"]]}
    with pytest.raises(urllib.error.HTTPError) as refused:
        ids_of(server, **only)
    with refused.value as response:
        assert response.code == 400 and "generation_config.json" in json.load(response)["error"]["message"]
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 40, "logit_bias": {str(firsts["clock"]): 100}}
    (choice,) = post(server, "/v1/completions", **body, structured_outputs={"choice": ["clock", "brown"]})["choices"]
    assert choice["text"] in ("clock", "brown") and choice["token_ids"][0] != firsts["clock"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, "/v1/completions", **body, structured_outputs={"choice": ["clock"]})
    with refused.value as response:
        message = json.load(response)["error"]["message"]
        assert response.code == 400 and "after 0 output tokens" in message and "generation_config.json" in message


@pytest.mark.parametrize("stage", ["execute", "schedule", "ingest"])
def test_a_reply_that_goes_on_after_a_death_is_not_at_its_begin_again(
    server: Server, firsts: dict[str, int], stage: str
) -> None:
    fields = {"max_tokens": 200, "logit_bias": {str(firsts["text"]): 100}}
    (expected,) = ids_of(server, **fields)
    assert expected[1:] == [firsts["text"]] * 199
    answers: list[Any] = []
    request = threading.Thread(target=lambda: answers.append(ids_of(server, **fields, prompt=PROMPT)), daemon=True)
    request.start()
    until(lambda: answers or running(server), "the reply runs")
    server.stage(stage).send_signal(signal.SIGKILL)
    request.join(120)
    assert answers == [[expected]]


def running(server: Server) -> bool:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return any(line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in lines)


def test_speculation_proposes_no_such_token_first(server: Server, model: Path, firsts: dict[str, int]) -> None:
    loads: list[dict[str, Any]] = [{}, {"temperature": 0.9, "n": 3, "seed": 4}, {"prediction": None, "max_tokens": 60}]
    loads[2]["prediction"] = {"type": "content", "content": PROMPT}
    expected = [ids_of(server, **{**load, "prediction": None}) for load in loads]
    speculative = "speculative.method=ngram", "speculative.prompt_lookup_min=1", "speculative.adaptive=false"
    with Server(*sets(model, *speculative)) as speculating:
        assert [ids_of(speculating, **load) for load in loads] == expected


def test_the_setting_turns_it_off(tiny_model: Path, model: Path, firsts: dict[str, int]) -> None:
    with Server(*sets(model, "generation_config=none")) as server:
        assert ids_of(server)[0][0] == firsts["text"] and chat_ids(server)[0] == firsts["chat"]
