"""Servers of tiny encoders: whichever stage dies, each client gets what it would have got: vectors, scores, labels."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.replay.compare import compare
from tests.compiled import link_kernels
from tests.e2e.recovery.test_recovery import RESTARTED, assert_restarted, kill, pids, post
from tests.e2e.server import Server
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, make
from tests.stages.prepare.checkpoints import save_folder

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
TOKENIZER = {"tokenizer_class": "PreTrainedTokenizerFast"}
KINDS = {"bert": EMBEDS, "bert, sequence": LABELS}


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    save_folder(folder / "tiny", make(VARIANTS[request.param]), tokenizer_config=TOKENIZER)
    rules = (f"model={folder / 'tiny'}", f"cache_dir={link_kernels(folder / 'cache')}", "supervisor.max_restarts=100")
    with Server(*rules) as server:
        server.requests = KINDS[request.param]  # type: ignore[attr-defined]
        yield server


def answer(server: Server, number: int) -> Any:
    requests = server.requests  # type: ignore[attr-defined]
    path, body = requests[number % len(requests)]
    found = post(server, path, **body)
    return {key: value for key, value in found.items() if key not in ("id", "created")}


@pytest.mark.parametrize("stage", RESTARTED)
def test_no_client_notices_the_death_of_a_stage(server: Server, stage: str) -> None:
    alone = [answer(server, number) for number in range(len(server.requests))]  # type: ignore[attr-defined]
    before, killed = pids(server), threading.Event()
    lock, num_answers = threading.Lock(), 0

    def client(first: int) -> None:
        nonlocal num_answers
        number = first
        while num_answers < BEFORE + AFTER:
            assert answer(server, number) == alone[number % len(alone)]
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


def test_nothing_is_kept_of_texts(server: Server) -> None:
    for number in range(len(EMBEDS)):
        answer(server, number)
    server.until_idle()
    health = server.health()
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


STAGES = ("gateway", "ingest", "schedule", "execute", "detokenize")


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
