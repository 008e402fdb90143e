"""A reply that is cut anywhere and continued, as after a crash or at another replica, has the ids and the logprobs of
the uncut one. With the real scheduler, on the native library and in torch.

PIPELINE_ALL_CASES=1 cuts longer replies, and those of the default model, at every position.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.messages import BEGIN
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import checkpoints
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner

ALL = bool(os.environ.get("PIPELINE_ALL_CASES"))
MAX_TOKENS = 40 if ALL else 9
NUM_BLOCKS = 80

PROGRAMS: dict[str, dict[str, Any]] = {
    "native": {},
    "native, int8": {"kv_dtype": "int8"},
    "native, proposals": {"num_speculative_tokens": 4},
    "torch": {"kernels": "torch"},
    "torch, float32": {"kernels": "torch", "dtype": "float32"},
    "torch, int8": {"kernels": "torch", "kv_dtype": "int8"},
    "torch, proposals": {"kernels": "torch", "num_speculative_tokens": 4},
}


@contextmanager
def runner_of(folder: Path, how: dict[str, Any]) -> Iterator[CpuRunner]:
    config = ModelConfig.load(folder)
    item_bytes = {"int8": 1, "float32": 4}.get(how.get("kv_dtype") or how.get("dtype", ""), 2)
    each = block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, item_bytes)
    runner = make_runner(folder, each, NUM_BLOCKS, **how)
    assert isinstance(runner.program, TorchProgram if how.get("kernels") == "torch" else NativeProgram)
    try:
        yield runner
    finally:
        runner.close()


def make_requests(max_tokens: int) -> list[Request]:
    """Greedy and sampled, hot and cold, with filters, penalties and logprobs; one repeats itself, for proposals."""

    def request(prompt: list[int], seed: int = GREEDY, n: int = 1, **fields: Any) -> Request:
        return Request(tuple(prompt), max_tokens, seed, n, fields=tuple({"num_logprobs": 3, **fields}.items()))

    return [
        request(random_ids(5, 1)),
        request(random_ids(16, 2), 3, temperature=0.4),
        request(random_ids(33, 3), 4, 2, temperature=1.0, top_p=0.9),
        request(random_ids(3, 4) * 9, 5, temperature=1.8, top_k=40),
        request(random_ids(50, 5), 6, frequency_penalty=0.7, repetition_penalty=1.2),
        request(random_ids(21, 6), bad_words_ids=[[BEGIN, token] for token in range(150)]),
    ]


def check_cuts(runner: CpuRunner, requests: list[Request]) -> None:
    """Every request is continued after each number of ids, beside others that are cut elsewhere."""
    whole = Pair(runner, adaptive_speculation=False)
    texts = whole.run(requests)
    assert len({tuple(text) for samples in texts for text in samples}) == sum(request.n for request in requests)
    max_tokens = requests[0].max_tokens
    assert all(request.max_tokens == max_tokens for request in requests)
    for cut in range(1, max_tokens):
        cuts = [1 + (cut + 5 * i) % (max_tokens - 1) for i in range(len(requests))]
        continued = [
            msgspec.structs.replace(request, outputs=tuple(tuple(text[:at]) for text in samples), at_step=i % 3)
            for i, (request, samples, at) in enumerate(zip(requests, texts, cuts, strict=True))
        ]
        pair = Pair(runner, adaptive_speculation=False, max_num_batched_tokens=(16, 33, 256)[cut % 3])
        found = pair.run(continued)
        for i, (request, at) in enumerate(zip(requests, cuts, strict=True)):
            assert found[i] == texts[i], f"request {i}, cut behind {at} ids"
            for index in range(request.n):
                token_outputs = whole.token_outputs[i + 1, index]
                behind = at * request.token_output_bytes(runner.facts)
                assert pair.token_outputs[i + 1, index] == token_outputs[behind:] != b"", (
                    f"request {i}, cut behind {at} ids"
                )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("llama", "sliding window"):
        found[name] = tmp_path_factory.mktemp("tiny")
        write(found[name], checkpoints.config_of(**checkpoints.VARIANTS[name]))
    return found


@pytest.mark.parametrize(
    ("model", "program"),
    [("llama", program) for program in PROGRAMS]
    + [("sliding window", program) for program in (PROGRAMS if ALL else ["native", "torch"])],
)
def test_a_continued_reply_is_the_uncut_one(folders: dict[str, Path], model: str, program: str) -> None:
    with runner_of(folders[model], PROGRAMS[program]) as runner:
        check_cuts(runner, make_requests(MAX_TOKENS))


@pytest.mark.skipif(not ALL, reason="minutes; with PIPELINE_ALL_CASES=1")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_continued_reply_of_the_default_model_is_the_uncut_one(program: str) -> None:
    with runner_of(prepare(Settings(quantization="none")), PROGRAMS[program]) as runner:
        check_cuts(runner, make_requests(28))
