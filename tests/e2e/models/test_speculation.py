"""Complete servers with speculative decoding answer with the same texts, also if the executor dies meanwhile."""

import json
import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.compiled import link_kernels
from tests.e2e.server import Server
from tests.stages.execute.drafts.test_eagle import write_head
from tests.stages.gateway.peers import until

PROMPT = "one two three one two three one two"


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 60, "seed": 3, "ignore_eos": True, "logprobs": 1} | fields
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def small(model: Path) -> list[str]:
    """Models are prepared beside their folder."""
    memory = ["execute.kv_cache_bytes=16MiB", "execute.num_threads=1"]
    return [f"model={model}", f"cache_dir={link_kernels(model.parent / 'cache')}", *memory]


def texts(answer: dict[str, Any]) -> Any:
    return [(choice["text"], choice["logprobs"]) for choice in answer["choices"]]


def metric(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def accepted(server: Server) -> float:
    return metric(server, "vllm:spec_decode_num_accepted_tokens_total")


LOADS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "n": 3, "repetition_penalty": 1.1},
    {"temperature": 0, "stop": ["e"], "logprobs": None},
    # Greedy texts of a random model repeat, and a bias makes sure of it.
    {"temperature": 0, "logit_bias": {"300": 100}, "max_tokens": 200},
    {"temperature": 0.8},
]


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> list[Any]:
    """The texts of LOADS without speculation."""
    with Server(*small(tiny_model)) as server:
        found = [texts(complete(server, **load)) for load in LOADS]
        assert accepted(server) == 0
    return found


def test_texts_are_the_same_also_when_the_executor_dies(tiny_model: Path, expected: list[Any]) -> None:
    speculative = "speculative.method=ngram", "speculative.prompt_lookup_min=1", "speculative.adaptive=false"
    with Server(*small(tiny_model), *speculative) as server:
        for load, text in zip(LOADS, expected, strict=True):
            assert texts(complete(server, **load)) == text
        assert accepted(server) > 100
        counted = complete(server, temperature=0, prediction={"type": "content", "content": PROMPT})
        details = counted["usage"]["completion_tokens_details"]
        assert set(details) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        answers: list[Any] = []
        long = LOADS[3]
        stream = threading.Thread(target=lambda: answers.append(texts(complete(server, **long))), daemon=True)
        before = accepted(server)
        stream.start()
        until(lambda: accepted(server) > before or answers, "proposals are accepted")
        server.stage("execute").send_signal(signal.SIGKILL)
        stream.join(120)
        assert answers == [expected[3]]


def test_a_draft_model_and_an_eagle_head_are_served(tiny_model: Path, expected: list[Any], tmp_path: Path) -> None:
    config = json.loads((tiny_model / "config.json").read_text())
    head = write_head(tmp_path / "head", **{name: config[name] for name in ("hidden_size", "vocab_size")})
    for method, draft, least in (("draft_model", tiny_model, 30), ("eagle", head, -1)):  # the head is random
        speculative = f"speculative.method={method}", f"speculative.draft={draft}", "speculative.adaptive=false"
        with Server(*small(tiny_model), *speculative) as server:
            assert texts(complete(server, **LOADS[4])) == expected[4]
            assert accepted(server) > least
            assert metric(server, "vllm:spec_decode_num_draft_tokens_total") > 30
