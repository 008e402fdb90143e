"""An encoder computes a text to the same bits alone, beside any others, and in memory that all layers share. Uses the
real scheduler, the CPU library and torch, with a tiny GPT-2 and a tiny Gemma 3 whose attention is not causal."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.sections.stages import ENCODER_STEP_TOKENS
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.messages import Pooling
from pipeline.runtime.model import kv_groups
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute import kv
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import tiny_architectures
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import Pair, Request, make_runner

NUM_BLOCKS = 60
LENGTHS = (1, 25, 7, 90, 64, 16, 33, 128, 5, 48, 2, 70)
BACK_ENDS: dict[str, dict[str, Any]] = {"native": {}, "torch": {"kernels": "torch", "dtype": "float32"}}


def folder_of(name: str, folder: Path) -> Path:
    path, _ = tiny_architectures.write(folder, tiny_architectures.VARIANTS[name])
    config = msgspec.structs.replace(ModelConfig.load(path), causal=False)
    config.save(path)
    return path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: folder_of(name, tmp_path_factory.mktemp(name)) for name in ("gpt2", "gemma3")}


@pytest.fixture(params=[(name, back_end) for name in ("gpt2", "gemma3") for back_end in BACK_ENDS], ids="-".join)
def runner(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[CpuRunner]:
    name, back_end = request.param
    made = runner_of(folders[name], back_end)
    yield made
    made.close()


def runner_of(folder: Path, back_end: str) -> CpuRunner:
    config, how = ModelConfig.load(folder), BACK_ENDS[back_end]
    item_bytes = 4 if "dtype" in how else 2
    size = block_bytes(1, config.num_kv_heads, config.head_dim, item_bytes)
    return make_runner(folder, size, NUM_BLOCKS, **how)


def texts(seed: int = 0) -> list[Request]:
    fields = (("pooling", Pooling.MEAN),)
    return [Request(tuple(random_ids(length, seed + i)), 1, fields=fields) for i, length in enumerate(LENGTHS)]


def embeddings(runner: CpuRunner, requests: list[Request], **limits: Any) -> list[bytes]:
    pair = Pair(runner, **limits)
    pair.run(requests)
    return list(pair.token_outputs.values())


def test_a_text_has_the_same_bits_in_any_batch(runner: CpuRunner) -> None:
    requests = texts()
    alone = [one for request in requests for one in embeddings(runner, [request])]
    assert len({*alone}) == len(requests) and all(np.isfinite(np.frombuffer(one, np.float32)).all() for one in alone)
    for step_tokens in (16, 128, 256):
        assert embeddings(runner, requests, max_num_batched_tokens=step_tokens) == alone
    assert embeddings(runner, requests[::-1], depth=2)[::-1] == alone


def test_tokens_see_those_behind_them(runner: CpuRunner) -> None:
    """The mean without the last token differs by more than that token, which a causal model's would not."""
    (request,) = texts()[1:2]
    shorter = msgspec.structs.replace(request, prompt=request.prompt[:-1])
    last = msgspec.structs.replace(request, fields=(("pooling", Pooling.LAST),))
    (whole,), (part,), (end,) = (
        [np.frombuffer(one, np.float32) for one in embeddings(runner, [each])] for each in (request, shorter, last)
    )
    num = len(request.prompt)
    assert np.abs(whole * num - end - part * (num - 1)).max() > 0.01


def test_layers_may_share_their_memory(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, runner: CpuRunner, request: pytest.FixtureRequest
) -> None:
    """What one layer writes, no other layer and no other step reads."""
    name, back_end = request.node.callspec.params["runner"]
    assert (runner.facts.num_blocks, runner.facts.is_encoder, len(runner.facts.kv_groups)) == (NUM_BLOCKS, True, 1)
    shared = embeddings(runner, texts())
    config, item_bytes = ModelConfig.load(folders[name]), 4 if "dtype" in BACK_ENDS[back_end] else 2
    size = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, item_bytes)
    monkeypatch.setattr(kv, "scratch", kv_groups.undivided)
    apart = make_runner(folders[name], size, NUM_BLOCKS, **BACK_ENDS[back_end])
    assert embeddings(apart, texts()) == shared
    apart.close()


def test_back_ends_agree(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        found = []
        for back_end in BACK_ENDS:
            runner = runner_of(folder, back_end)
            found.append([np.frombuffer(one, np.float32) for one in embeddings(runner, texts())])
            runner.close()
        for native, torch in zip(*found, strict=True):
            assert native @ torch / np.linalg.norm(native) / np.linalg.norm(torch) > 0.999


def test_an_encoder_reserves_what_its_steps_can_use(folders: dict[str, Path]) -> None:
    config = ModelConfig.load(folders["gpt2"])
    size = block_bytes(1, config.num_kv_heads, config.head_dim, 2)
    most = kv.MAX_STEPS * (ENCODER_STEP_TOKENS // 16 + 16)
    runner = make_runner(folders["gpt2"], size, most)
    assert runner.facts.max_num_prefill_tokens == ENCODER_STEP_TOKENS
    runner.close()
    with pytest.raises(AssertionError):  # it has no more with more memory
        make_runner(folders["gpt2"], size, most + 50)
