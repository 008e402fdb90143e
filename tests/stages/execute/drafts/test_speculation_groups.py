"""Speculation changes no text and no logprob of models whose layers are in KV groups, and of mixtures of experts: with
right and wrong proposals, little memory, swap space and prefix hits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import UserError
from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.drafts import test_draft_model
from tests.stages.execute.drafts.test_speculation import Oracle
from tests.stages.execute.models import test_experts
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner

SHARED = random_ids(40, 7)


def write_gemma(folder: Path) -> tuple[Path, ModelConfig]:
    """Three layers, one of which keeps all positions, and the others a window of 21."""
    folder, _ = tiny_architectures.write(folder, tiny_architectures.VARIANTS["gemma3"])
    return folder, ModelConfig.load(folder)


def write_experts(folder: Path) -> tuple[Path, ModelConfig]:
    config = test_experts.config_of()
    return test_experts.write(folder / "experts", config, {"experts": "q8_0"}), config


def requests() -> list[Request]:
    made = []
    for i in range(12):
        prompt = (SHARED if i % 3 == 0 else []) + random_ids(5 + 4 * i, i)
        fields: dict[str, Any] = {"num_logprobs": 1} if i % 4 == 2 else {}
        if i % 5 == 1:
            fields |= {"repetition_penalty": 1.2, "stop_token_ids": list(range(0, checkpoints.VOCAB_SIZE, 9))}
        seed = GREEDY if i % 2 else i
        made.append(Request(tuple(prompt), 25 + i, seed, 1 + i % 2, at_step=2 * i, fields=tuple(fields.items())))
    return made


@pytest.mark.parametrize(
    ("write_model", "num_groups", "num_blocks"),
    [(write_gemma, 3, 33), (write_experts, 1, 11)],
    ids=["gemma", "experts"],
)
def test_texts_and_logprobs_are_the_same(
    tmp_path: Path, write_model: Callable[[Path], tuple[Path, ModelConfig]], num_groups: int, num_blocks: int
) -> None:
    folder, config = write_model(tmp_path)
    bytes_of = block_bytes(config.num_layers // num_groups, config.num_kv_heads, config.head_dim, 2)
    plain = make_runner(folder, bytes_of, 400)
    swap = {"num_swap_blocks": 8 * num_groups, "tokens": 48}
    speculating = make_runner(folder, bytes_of, num_blocks, num_speculative_tokens=6, **swap)
    assert isinstance(speculating.program, NativeProgram) and speculating.speculator is not None
    assert len(speculating.facts.kv_groups) == num_groups
    made = requests()
    before = Pair(plain, max_num_seqs=1, prefix_caching=False)
    texts = before.run(made)
    for depth, skill in ((1, 0.8), (2, 0.5)):
        pair = Pair(speculating, depth, adaptive_speculation=False, max_num_batched_tokens=48)
        oracle = Oracle(speculating.rows, {one.prompt: text for one, text in zip(made, texts, strict=True)}, skill)
        speculating.speculator.proposer = oracle
        assert pair.run(made) == texts
        assert pair.token_outputs == before.token_outputs
        counts, load = pair.scheduler.speculation.counts(), pair.scheduler.load()
        assert counts.num_draft_tokens > counts.num_accepted_tokens > 50
        assert load.num_preemptions > 0 and load.num_cached_tokens > 0
    plain.close()
    speculating.close()


def test_a_draft_model_reads_the_group_that_keeps_all_positions(tmp_path: Path) -> None:
    """The draft of a model with windows is the model itself: all that it proposes is right."""
    folder, config = write_gemma(tmp_path / "gemma")
    plain = make_runner(folder, block_bytes(1, config.num_kv_heads, config.head_dim, 2), 400)
    runner = test_draft_model.speculating(folder, folder, tmp_path, num_blocks=160)
    assert len(runner.facts.kv_groups) == 3
    made = test_draft_model.requests()
    pair = Pair(runner, adaptive_speculation=False)
    assert pair.run(made) == Pair(plain).run(made)
    counts = pair.scheduler.speculation.counts()
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 300
    plain.close()
    runner.close()


def test_a_draft_model_needs_a_group_that_keeps_all_positions(tmp_path: Path) -> None:
    folder, _ = tiny_architectures.write(tmp_path / "phi3", tiny_architectures.VARIANTS["phi3"])
    runner = make_runner(folder, test_draft_model.BLOCK_BYTES, 40)
    (group,) = runner.facts.kv_groups
    assert group.window == 21
    runner.close()
    with pytest.raises(UserError, match=r"execute\.hybrid_kv_cache_manager"):
        test_draft_model.speculating(folder, folder, tmp_path)
