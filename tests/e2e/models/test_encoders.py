"""Servers of tiny encoders: whichever stage dies, each client gets what it would have got: vectors, scores, labels."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError

import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.replay.compare import compare
from tests.compiled import link_kernels
from tests.e2e.recovery.test_recovery import RESTARTED, assert_restarted, kill, pids, post
from tests.e2e.server import Server
from tests.stages.execute.encoders import test_cross_encoders, test_rerankers
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, make
from tests.stages.prepare.checkpoints import save_folder, tiny

STORY = "Whichever stage dies, a text that a client has sent is computed again and has the same bits."
WORDS = STORY.split()
BEFORE, AFTER = 40, 80
"""Answers that clients have got at the kill, and those that they then get in addition."""


def text(number: int) -> str:
    return " ".join(WORDS[(number * 7 + i) % len(WORDS)] for i in range(1 + number % 9))


TEXTS = [text(number) for number in range(40)]
EMBEDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"input": TEXTS}),
    ("/v1/embeddings", {"input": TEXTS[3], "encoding_format": "base64"}),
    ("/v1/embeddings", {"input": [[5, 6, 7], [8] * 60], "pooling": "cls", "dimensions": 24}),
    ("/rerank", {"query": TEXTS[5], "documents": TEXTS[:9], "top_n": 4}),
    ("/pooling", {"input": TEXTS[:3], "task": "token_embed"}),
]
LABELS: list[tuple[str, dict[str, Any]]] = [("/classify", {"input": TEXTS}), ("/classify", {"input": TEXTS[2]})]
QUERIES, DOCUMENTS = TEXTS[:3], [*TEXTS[3:12], " ".join(TEXTS)]
RERANKS: list[tuple[str, dict[str, Any]]] = [
    ("/rerank", {"query": QUERIES[0], "documents": DOCUMENTS[:9], "top_n": 4}),
    ("/v1/rerank", {"query": QUERIES[0], "documents": [{"text": DOCUMENTS[1]}], "return_documents": False}),
    ("/v2/rerank", {"query": QUERIES[1], "documents": DOCUMENTS}),
    ("/score", {"text_1": QUERIES[2], "text_2": DOCUMENTS, "truncate_prompt_tokens": 100}),
    ("/score", {"queries": QUERIES, "documents": DOCUMENTS[:3], "use_activation": False}),
]
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}


def save_tiny(folder: Path, variant: str) -> Path:
    return save_folder(folder, make(VARIANTS[variant]), tokenizer_config=TOKENIZER)


class Kind(NamedTuple):
    save: Callable[[Path], Path]
    requests: list[tuple[str, dict[str, Any]]]
    options: tuple[str, ...] = ()


KINDS = {
    "bert": Kind(partial(save_tiny, variant="bert"), EMBEDS),
    "bert, sequence": Kind(partial(save_tiny, variant="bert, sequence"), LABELS),
    "cross-encoder": Kind(partial(test_cross_encoders.save, kind="bert"), RERANKS),
    "Qwen3-Reranker": Kind(
        lambda folder: test_rerankers.save(folder, tiny("qwen3", head_dim=16, max_position_embeddings=1024)),
        RERANKS,
        ("--hf-overrides", json.dumps(test_rerankers.OVERRIDES)),
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder, kind = tmp_path_factory.mktemp("models"), KINDS[request.param]
    model = kind.save(folder / "tiny")
    rules = (f"model={model}", f"cache_dir={link_kernels(folder / 'cache')}", "supervisor.max_restarts=100")
    with Server(*rules, options=kind.options) as server:
        server.requests, server.is_decoder = kind.requests, bool(kind.options)  # type: ignore[attr-defined]
        yield server


def answer(server: Server, number: int) -> Any:
    requests = server.requests  # type: ignore[attr-defined]
    path, body = requests[number % len(requests)]
    found = post(server, path, **body)
    return {key: value for key, value in found.items() if key not in ("id", "created")}


def answer_at_last(server: Server, number: int) -> Any:
    """The same from a client that asks again if its connection ends: the gateway holds it."""
    for _ in range(1000):
        try:
            return answer(server, number)
        except HTTPError:
            raise
        except (URLError, http.client.HTTPException, ConnectionError):
            server.until(lambda health: health["status"] == "ok")
    raise AssertionError("no answer")


@pytest.mark.parametrize("stage", (*RESTARTED, "gateway"))
def test_no_client_notices_the_death_of_a_stage(server: Server, stage: str) -> None:
    ask = answer_at_last if stage == "gateway" else answer
    alone = [answer(server, number) for number in range(len(server.requests))]  # type: ignore[attr-defined]
    before, killed = pids(server), threading.Event()
    lock, num_answers = threading.Lock(), 0

    def client(first: int) -> None:
        nonlocal num_answers
        number = first
        while num_answers < BEFORE + AFTER:
            assert ask(server, number) == alone[number % len(alone)]
            number += 1
            with lock:
                num_answers += 1
                if num_answers >= BEFORE and not killed.is_set():
                    killed.set()
                    kill(before[f"{stage}.0"])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(client, range(8)))
    assert killed.is_set()
    server.until(lambda health: health["status"] == "ok")
    assert_restarted(before, pids(server), stage)
    server.look()


def test_nothing_is_kept_of_texts_but_by_decoders(server: Server) -> None:
    """A decoder computes what its prompts of one query begin with once."""
    for number in range(len(server.requests)):  # type: ignore[attr-defined]
        answer(server, number)
    server.until_idle()
    health = server.health()
    if server.is_decoder:  # type: ignore[attr-defined]
        assert health["counters"]["cached_tokens"] > 0
        return
    assert health["counters"]["cached_tokens"] == 0
    assert health["kv_blocks"]["free"] == health["kv_blocks"]["total"], "blocks were scratch"


def test_the_executor_has_no_process_for_grammars(server: Server) -> None:
    server.look()
    assert server.stage("execute").children() == []


def test_generation_is_refused_and_names_the_tasks(server: Server) -> None:
    with pytest.raises(HTTPError) as error:
        post(server, "/v1/completions", prompt="Hello", max_tokens=4)
    with error.value as response:
        refused = json.load(response)["error"]
    assert refused["code"] == "unsupported_task" and "its tasks are" in refused["message"]


STAGES = ("gateway", "ingest", "schedule", "execute")
"""Those that a request passes: vectors have no text."""


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each stage, from the start to the end of a server, while three clients send requests."""
    folder = tmp_path_factory.mktemp("recordings")
    save_folder(folder / "tiny", make(VARIANTS["bert"]), tokenizer_config=TOKENIZER)
    files = {stage: folder / f"{stage}.rec" for stage in STAGES}
    options = tuple(part for stage, path in files.items() for part in ("--record", f"{stage}={path}"))
    rules = (f"model={folder / 'tiny'}", f"cache_dir={link_kernels(folder / 'cache')}")
    with Server(*rules, options=options) as server, ThreadPoolExecutor(3) as clients:
        for path, body in EMBEDS:
            for reply in [clients.submit(post, server, path, **body) for _ in range(3)]:
                reply.result(60)
        server.until_idle()
    return files


@pytest.mark.parametrize("stage", STAGES)
def test_a_replay_of_a_stage_sends_the_same(recordings: dict[str, Path], tmp_path: Path, stage: str) -> None:
    replay(stage, recordings[stage], tmp_path / "out", paced=False, inline=True)
    comparison = compare(tmp_path / "out", recordings[stage])
    assert comparison.are_same, comparison.difference
    assert comparison.num_same == sum(comparison.sent.values()) > 3
