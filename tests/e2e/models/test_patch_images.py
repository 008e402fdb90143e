"""Images that come as patches, whose positions are lines and columns (Qwen-VL), end to end: the ids are those of
transformers, and the same in any batch, behind a prefix hit, after preemption, and after the death of each stage."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.media import config as media
from pipeline.media import images, processors
from tests.e2e.models.test_images import (
    CHATS,
    MAX_TOKENS,
    RESTARTED,
    Family,
    answer,
    assert_restarted,
    chat,
    choices,
    kill,
    make_folder,
    num_preemptions,
    pids,
    png,
    post,
    rules,
)
from tests.e2e.recovery.test_swap import counted
from tests.e2e.server import Server
from tests.stages.execute.vision.tiny_towers import QWEN, normalized

FLOATS = "execute.kernels=torch", "execute.dtype=float32"
CONVERSATIONS: list[tuple[str | bytes, ...]] = [
    ("What is it? ", png(1)),
    (png(2, (40, 30)), "and?"),
    (png(2, (40, 90)), "and", png(3), "differ in?"),
]


def theirs(model: Any, config: media.Qwen2VL, prompt: list[int], *data: bytes) -> list[int]:
    """The ids that transformers generates."""
    found = [processors.process(images.decode(one), config) for one in data]
    patches = torch.cat([normalized(one.pixels) for one in found])[:, :, None]
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=patches.expand(-1, -1, config.temporal_patch, -1, -1).reshape(len(patches), -1),
            image_grid_thw=torch.tensor([one.grid for one in found]),
            mm_token_type_ids=(ids == config.row_id).long(),
            max_new_tokens=MAX_TOKENS,
            min_new_tokens=MAX_TOKENS,
            do_sample=False,
        )
    return [int(one) for one in made[0, len(prompt) :]]


@pytest.mark.parametrize("name", QWEN)
def test_the_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, source = make_folder(tmp_path, Family(name, {}, {}))
    with Server(*rules(source), *FLOATS) as server:
        config = media.load(next((tmp_path / "cache").rglob("media.json")).parent)
        assert isinstance(config, media.Qwen2VL)
        for parts in CONVERSATIONS:
            for others in ((), ("Before: ", png(9, (60, 30)))):  # the image has other positions
                found = post(server, CHATS, **chat(*others, *parts))
                datas = [part for part in (*others, *parts) if isinstance(part, bytes)]
                expected = theirs(model, config, found["prompt_token_ids"], *datas)
                assert found["choices"][0]["token_ids"] == expected
                assert found["usage"]["prompt_tokens"] == len(found["prompt_token_ids"])


KV_BYTES = {"qwen2_vl": "64KiB", "qwen3_vl, deepstack": "96KiB", "qwen3_5": "256KiB"}
"""Of small servers, by the model. That of the last one has room for the states of its rows."""
FEW = "schedule.max_num_seqs=4"
BODIES = [
    chat("Which? ", png(20), max_tokens=60),
    chat(png(21, (30, 90)), png(20), "Are they the same, or is one of them another?", max_tokens=60),
    chat("No image."),
    chat(png(22), "And?", n=4, temperature=1, seed=5, max_tokens=120),
]
"""Together, they do not fit into the memory of some servers."""


@pytest.fixture(scope="module", params=KV_BYTES)
def name(request: Any) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def source(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("images"), Family(name, {}, {}))[1]


@pytest.fixture(scope="module")
def small(name: str) -> tuple[str, str]:
    return f"execute.kv_cache_bytes={KV_BYTES[name]}", FEW


@pytest.fixture(scope="module")
def server(source: Path, small: tuple[str, str]) -> Iterator[Server]:
    sets = "supervisor.max_restarts=100", "schedule.max_num_batched_tokens=16"
    with Server(*rules(source), *sets, *small) as server:
        yield server


@pytest.fixture(scope="module")
def alone(source: Path) -> list[list[list[int]]]:
    """What a server with room for all answers."""
    with Server(*rules(source)) as large:
        return [choices(large, body) for body in BODIES]


def test_nothing_changes_the_ids(server: Server, alone: list[list[list[int]]]) -> None:
    assert [choices(server, body) for body in BODIES] == alone
    assert num_preemptions(server) > 0
    for least in (-1, 16):  # at first, others may have evicted it
        ids, num_cached = answer(server, BODIES[1])
        assert [ids] == alone[1] and num_cached > least
    for stage in ("", *RESTARTED):
        before = pids(server)
        with ThreadPoolExecutor(8) as threads:
            asked = [{**body, "cache_salt": f"{stage} {turn % 2}"} for turn in range(3) for body in BODIES]
            found = threads.map(lambda body: choices(server, body), asked)
            if stage:
                kill(before[f"{stage}.0"])
            assert list(found) == alone * 3
        if not stage:
            continue
        server.until(lambda health: health["status"] == "ok")
        assert_restarted(before, pids(server), stage)


COMBINATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "tensor parallel": ((), ("--tp", "2"), ""),
    "pipeline parallel": (("execute.num_threads=1",), ("--pp", "2"), ""),
    "n-grams": (
        ("speculative.method=ngram", "speculative.adaptive=false", "speculative.prompt_lookup_min=1"),
        (),
        "vllm:spec_decode_num_draft_tokens_total",
    ),
    "swap space": (
        ("execute.swap_bytes=1MiB", "schedule.preemption=swap", "schedule.prefix_caching=false"),
        (),
        "pipeline_schedule_blocks_swapped_in_total",
    ),
    "steps in flight": (("schedule.max_steps_in_flight=3",), (), ""),
}


NOT_RECURRENT = "n-grams", "swap space"
"""Models with recurrent layers have no speculation, and their rows go on at snapshots."""
PAIRS = [
    (name, other) for name in KV_BYTES for other in COMBINATIONS if name != "qwen3_5" or other not in NOT_RECURRENT
]


@pytest.mark.parametrize(("name", "combination"), PAIRS, indirect=["name"], scope="module")
def test_the_ids_are_those_of_a_server_without_it(
    combination: str, source: Path, small: tuple[str, str], alone: list[list[list[int]]]
) -> None:
    sets, options, metric = COMBINATIONS[combination]
    sets += small if combination == "swap space" else ()
    with Server(*rules(source), *sets, options=options) as server:
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(lambda body: choices(server, body), BODIES * 2)) == alone * 2
        assert not metric or counted(server, metric) > 0
        server.until_idle()
