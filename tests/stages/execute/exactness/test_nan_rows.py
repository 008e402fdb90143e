"""A row whose numbers overflow fails alone, with an error that says so: rows beside it, and those that get its blocks
after it, have the bits that they have without it."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.kernels.stored_matrix import Format
from pipeline.lora.convert import convert
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.metrics import ExecuteMetrics
from tests.lora.random_adapters import ALL, write_adapter
from tests.stages.execute import checkpoints
from tests.stages.execute.adapters.test_lora import ON
from tests.stages.execute.native_driver import ISAS, emulation, random_ids, write
from tests.stages.execute.pair import Pair, Request, make_runner
from tests.stages.execute.structured import EOS, TOKENIZER, ids_of, lark

GRAMMAR = lark("[a-z]{40}(, [0-9]{3}){2}")
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_heads": 4, "eos_ids": [EOS]}
NUM_BLOCKS = 40
OVERFLOWS = {"all": ALL, "queries and keys": ("q_proj", "k_proj"), "values": ("v_proj",), "down": ("down_proj",)}
"""Projections of adapters whose products overflow; each of their numbers is finite."""


def block_bytes(kv_dtype: str) -> int:
    each = 16 * 2 * 32
    return 3 * 2 * (each * 2 if kv_dtype == "bfloat16" else each + 16 * 2 * 2)


class Model:
    def __init__(
        self,
        folder: Path,
        format: Format,
        isa: str,
        kv_dtype: str,
        overflows: dict[str, tuple[str, ...]],
    ) -> None:
        config = checkpoints.config_of(**SHAPE)
        write(folder, config, (format,))
        TOKENIZER.save(str(folder / "tokenizer.json"))
        self.adapters = [
            convert(write_adapter(folder / name, config, targets=targets, scale=1e20), folder, "bf16", 16)
            for name, targets in overflows.items()
        ]
        self.kernels, self.folder, self.kv_dtype = isa, folder, kv_dtype

    def runner(self, num_speculative_tokens: int = 0) -> CpuRunner:
        with emulation(self.kernels) as kernels:
            return make_runner(
                *(self.folder, block_bytes(self.kv_dtype), NUM_BLOCKS),
                num_speculative_tokens=num_speculative_tokens,
                kernels=kernels,
                kv_dtype="int8" if self.kv_dtype == "int8" else "auto",
                lora=ON,
            )


STORED: list[tuple[Format, str]] = [("bf16", "bfloat16"), ("bf16", "int8"), ("q8_0", "bfloat16")]
"""Formats of weights and of the KV cache."""
CASES: list[tuple[Format, str, str, str]] = [
    (format, isa, kv_dtype, overflow)
    for format, kv_dtype in STORED
    for isa in (*ISAS, "torch")
    for overflow in OVERFLOWS
]
if not os.environ.get("PIPELINE_ALL_CASES"):
    CASES = [
        *(("bf16", isa, "bfloat16", list(OVERFLOWS)[i % 4]) for i, isa in enumerate(ISAS)),
        *(("bf16", ISAS[0], "int8", "all"), ("q8_0", ISAS[0], "bfloat16", "down")),
        *(("bf16", "torch", "bfloat16", "values"), ("bf16", "torch", "int8", "all")),
    ]


def others() -> list[Request]:
    """Requests of all kinds that are fine."""
    prompts = [tuple(ids_of(f"{i}: say what you know of number {i}, " + "and more " * i)) for i in range(6)]
    return [
        Request(prompts[0], 40),
        Request(prompts[1], 30, seed=3, n=2, at_step=3, fields=(("num_logprobs", 3),)),
        Request(prompts[2], 40, seed=4, at_step=5, fields=(("compiled_grammar", GRAMMAR),)),
        Request(prompts[3], 10, at_step=2, fields=(("num_prompt_logprobs", 1), ("num_logprobs", 1))),
        Request(prompts[4], 1, at_step=1, fields=(("pooling", int(m.Pooling.MEAN)),)),
        Request(prompts[5], 40, seed=5, at_step=9, fields=(("repetition_penalty", 1.2), ("min_tokens", 5))),
    ]


def overflowing(adapter_id: str) -> list[Request]:
    """The same prompts with an adapter, whatever else they request."""
    prompt = tuple(ids_of("0: say what you know of number 0, beside others, at length"))
    return [
        Request(prompt, 20, seed=seed, at_step=at_step, fields=(*fields, ("adapter_id", adapter_id)))
        for seed, at_step, fields in (
            (-1, 0, ()),
            (1, 4, (("num_logprobs", 2),)),
            (2, 6, (("compiled_grammar", GRAMMAR),)),
            (-1, 7, (("compiled_grammar", GRAMMAR), ("min_tokens", 3))),
            (-1, 2, (("pooling", int(m.Pooling.MEAN)),)),
            (-1, 9, (("pooling", int(m.Pooling.LAST)),)),
            (3, 8, (("min_tokens", 3), ("bad_words_ids", ((5,),)), ("num_prompt_logprobs", 1))),
        )
    ]


INFINITE = 290
"""A token whose embedding is not finite."""


@pytest.mark.parametrize(
    ("isa", "kv_dtype"), [*((isa, "bfloat16") for isa in (*ISAS, "torch")), (ISAS[0], "int8"), ("torch", "int8")]
)
def test_a_prompt_that_overflows_leaves_its_prefix_to_others(tmp_path: Path, isa: str, kv_dtype: str) -> None:
    """Its blocks before the token that overflows are those of the prefix cache, computed in the same chunk."""
    model = Model(tmp_path, "bf16", isa, kv_dtype, {})
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][INFINITE] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    prefix = tuple(random_ids(81, 3))  # whole blocks end shortly before the token, in the same matmul
    bad = Request((*prefix, INFINITE, *random_ids(20, 4)), 5)
    good = [Request((*prefix, *random_ids(9, seed)), 20, fields=(("num_logprobs", 2),)) for seed in (5, 6)]
    runner = model.runner()
    try:
        pair = Pair(runner)
        expected = [pair.run([request]) for request in good], list(pair.token_outputs.values())
        pair = Pair(runner)
        pair.run([bad])
        assert list(pair.errors.values()) == [m.NAN_LOGITS]
        found = [pair.run([request]) for request in good], list(pair.token_outputs.values())[1:]
        assert pair.scheduler.load().num_cached_tokens >= 160
        assert found == expected
    finally:
        runner.close()


@pytest.mark.parametrize("isa", ISAS if os.environ.get("PIPELINE_ALL_CASES") else ISAS[:1])
def test_speculation_changes_nothing(tmp_path: Path, isa: str) -> None:
    model, found = Model(tmp_path, "bf16", isa, "bfloat16", {"values": OVERFLOWS["values"]}), []
    requests = [*others(), *overflowing(model.adapters[0])]
    for num_speculative_tokens in (0, 6):
        runner = model.runner(num_speculative_tokens)
        try:
            pair = Pair(runner, max_loras=4, adaptive_speculation=False)
            texts = pair.run(requests)
            found.append(outcome(pair, texts, len(requests)))
            assert set(pair.errors.values()) == {m.NAN_LOGITS}
            counts = pair.scheduler.speculation.counts()
            assert (counts.num_draft_tokens > 0) == bool(num_speculative_tokens)
        finally:
            runner.close()
    assert found[0] == found[1]


def test_failures_are_counted() -> None:
    metrics = ExecuteMetrics()
    assert metrics.load(1) == m.ExecuteLoad(1)
    metrics.failed(("another error",), 3.0)
    metrics.failed((m.NAN_LOGITS, "another error", m.NAN_LOGITS), 4.0)
    assert metrics.load(2) == m.ExecuteLoad(2, 2, 4.0) and metrics.counts(2).num_nan == 2


def outcome(pair: Pair, texts: list[list[list[int]]], num: int) -> tuple[Any, ...]:
    """Of the first requests: ids, logprobs and embeddings, logprobs of prompts, errors."""
    parts = (pair.token_outputs, pair.prompt_logprobs, pair.errors)
    return texts[:num], *({at: one for at, one in part.items() if at[0] <= num} for part in parts)


@pytest.mark.parametrize(("format", "isa", "kv_dtype", "overflow"), CASES)
def test_a_row_that_overflows_fails_alone(
    tmp_path: Path, format: Format, isa: str, kv_dtype: str, overflow: str
) -> None:
    model = Model(tmp_path, format, isa, kv_dtype, {overflow: OVERFLOWS[overflow]})
    requests, runner = others(), model.runner()
    try:
        pair = Pair(runner, 1, max_loras=4)
        expected = outcome(pair, pair.run(requests), len(requests))
        assert not pair.errors
        bad = overflowing(model.adapters[0])
        pair = Pair(runner, 1, max_loras=4)
        beside = outcome(pair, pair.run([*requests, *bad]), len(requests))
        errors = {index: pair.errors[index] for index in pair.errors if index[0] > len(requests)}
        assert beside == expected
        assert set(errors.values()) == {m.NAN_LOGITS} and len(errors) == len(bad), errors
        pair = Pair(runner, 1, max_loras=4)
        assert outcome(pair, pair.run(requests), len(requests)) == expected, "after them, in their blocks"
    finally:
        runner.close()
