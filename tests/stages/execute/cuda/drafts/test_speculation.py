"""Speculative decoding on a GPU runner, with interpreted kernels: the texts and logprobs are those without it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import IntArray
from pipeline.runtime.messages import Pooling
from pipeline.runtime.model.draft_link import draft_link
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.execute.rows import RowTable
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.drafts.test_speculation import Oracle
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import GREEDY, Pair, Request
from tests.stages.execute.structured import EOS, ids_of, lark, write

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
"""Keys and values x layers x tokens x heads x dimensions x bytes of a number."""
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32}


def speculating(num_blocks: int) -> Settings:
    config = on_device(max_num_seqs=4, tokens=32, kv_bytes=num_blocks * BLOCK_BYTES)
    return msgspec.structs.replace(config, speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=3))


WARM = ("temperature", 0.8)
NUM_BLOCKS = 40


def request(seed: int, length: int, max_tokens: int, *fields: tuple[str, Any], n: int = 1) -> Request:
    return Request(tuple(random_ids(length, 50 + length)), max_tokens, seed, n, fields=fields)


SAMPLED = [
    request(GREEDY, 5, 8),
    request(1, 9, 6, WARM, ("top_p", 0.8), ("min_p", 0.01), ("num_logprobs", 0)),
    request(2, 4, 7, ("repetition_penalty", 1.3), ("frequency_penalty", 0.2), ("num_logprobs", 2)),
    request(3, 7, 6, WARM, ("bad_words_ids", [[token] for token in range(3, 300, 5)]), ("num_prompt_logprobs", 1)),
]
OTHERS = [
    request(4, 13, 5, WARM, n=2),
    request(5, 11, 9, WARM, ("stop_token_ids", list(range(0, 300, 9))), ("min_tokens", 3)),
    request(6, 9, 1, ("pooling", Pooling.MEAN)),
]


@pytest.mark.parametrize(("made", "depth", "skill"), [(SAMPLED, 1, 0.9), (OTHERS, 2, 0.7)], ids=["sampled", "others"])
def test_texts_and_logprobs_are_the_same(slight_dir: Path, made: list[Request], depth: int, skill: float) -> None:
    plain = CpuRunner(on_cpu(on_device(max_num_seqs=4, tokens=32)), slight_dir)
    before = Pair(plain, **LIMITS)
    texts = before.run(made)
    runner = CudaRunner(speculating(NUM_BLOCKS), slight_dir)
    assert (runner.facts.num_speculative_tokens, runner.facts.max_num_drafts) == (3, 12)
    assert runner.speculator is not None
    pair = Pair(runner, depth, adaptive_speculation=False, **LIMITS)  # type: ignore[arg-type]
    expected = {one.prompt: text for one, text in zip(made, texts, strict=True)}
    runner.speculator.proposer = Oracle(runner.rows, expected, skill)
    assert pair.run(made) == texts
    counts = pair.scheduler.speculation.counts()
    assert counts.num_draft_tokens > counts.num_accepted_tokens > 5
    for outputs, right in ((pair.token_outputs, before.token_outputs), (pair.prompt_logprobs, before.prompt_logprobs)):
        assert outputs.keys() == right.keys()
        for key, data in outputs.items():
            assert len(data) == len(right[key])
            close = np.frombuffer(data, np.float32), np.frombuffer(right[key], np.float32)
            np.testing.assert_allclose(*close, rtol=2e-4, atol=2e-5)
    runner.close()
    plain.close()


class LetterProposer:
    """Proposes what a grammar may not allow, or the end."""

    reads_hidden_states = False
    draft_s = pass_s = 0.0

    def __init__(self, table: RowTable) -> None:
        self._table = table

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        ids = np.array([*ids_of("ab"), EOS, *ids_of("1")], np.int32)
        return [np.roll(ids, -int(row))[:num] for row, num in zip(rows, most.tolist(), strict=True)]

    def observe(self, *of_a_step: Any) -> None:
        pass

    def drop(self, rows: IntArray) -> None:
        pass

    def close(self) -> None:
        pass


def test_structured_output_is_the_same(tmp_path: Path) -> None:
    """Forced ids are proposed first, and each proposed id has a mask of its own."""
    folder = write(tmp_path, num_layers=2, hidden_size=32, num_heads=4, intermediate_size=48, max_position=96)
    forced = r"""start: "{\"a\": \"" /[a-z]{2}/ "\"}" """
    made = [
        Request(tuple(ids_of(f"{i}: ")), 30, seed=i if i % 2 else GREEDY, at_step=i, fields=fields)
        for i, fields in enumerate([(("compiled_grammar", forced),), (("compiled_grammar", lark("[ab]{5}")), WARM)])
    ]
    plain = CpuRunner(on_cpu(on_device(max_num_seqs=4, tokens=32)), folder)
    before = Pair(plain, **LIMITS)
    runner = CudaRunner(speculating(NUM_BLOCKS), folder)
    try:
        assert runner.speculator is not None
        runner.speculator.proposer = LetterProposer(runner.rows)
        pair = Pair(runner, adaptive_speculation=False, **LIMITS)  # type: ignore[arg-type]
        assert pair.run(made) == before.run(made)
        assert pair.scheduler.load().num_steps < before.scheduler.load().num_steps
        assert pair.scheduler.speculation.counts().num_accepted_tokens > 5
    finally:
        runner.close()
        plain.close()


def test_the_model_as_its_own_draft_is_always_right(slight_dir: Path, tmp_path: Path) -> None:
    """Its rows are those of the model: the draft model reads their ids and blocks, and only proposes."""
    made = [request(GREEDY, 19, 7), request(2, 3, 5, WARM, ("top_k", 20))]
    plain = CpuRunner(on_cpu(on_device(max_num_seqs=4, tokens=32)), slight_dir)
    texts = Pair(plain, **LIMITS).run(made)
    config = speculating(2 * NUM_BLOCKS)
    speculative = SpeculativeSettings(method="draft_model", draft=str(slight_dir), num_speculative_tokens=3)
    config = msgspec.structs.replace(config, cache_dir=str(tmp_path), speculative=speculative, model=str(slight_dir))
    link = draft_link(config)
    link.parent.mkdir(parents=True)
    link.symlink_to(slight_dir)
    runner = CudaRunner(config, slight_dir)
    assert runner.facts.num_blocks == NUM_BLOCKS, "both caches have as many blocks"
    pair = Pair(runner, 2, adaptive_speculation=False, **LIMITS)  # type: ignore[arg-type]
    assert pair.run(made) == texts
    counts = pair.scheduler.speculation.counts()
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 5
    runner.close()
    plain.close()
