"""A server started with a quantized checkpoint answers as transformers does with the dequantized weights.

In float32, so that nothing but the conversion of the checkpoint could make a difference: tests/stages/execute/
test_quantized_checkpoints.py compares the kernels of each format. The tests start a server for a few kinds;
PIPELINE_ALL_CHECKPOINTS=1 starts one for each.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline import LLM, SamplingParams
from tests.e2e.conftest import tiny
from tests.stages.prepare import checkpoints
from tests.stages.prepare.quantized import packers
from tests.stages.prepare.quantized.schemes import CASES

KINDS = {
    "gptq": "q4_0",
    "fp8, kept blocks": "fp8",
    "nf4": "bf16",
}
OTHERS = {
    "awq": "q4_1",
    "auto-round": "q4_0",
    "packed": "q4_0",
    "int8": "q8_0",
    "llm.int8": "q8_0",
    "compressed fp8, kept": "fp8",
    "mxfp4": "q8_0",
    "compressed mxfp4": "q8_0",
}
if os.environ.get("PIPELINE_ALL_CHECKPOINTS"):
    KINDS |= OTHERS
PROMPTS = ["the quick brown fox", "pack my box with five dozen", "jumps over"]
NUM_TOKENS = 12
CLEAR = 1e-3
"""Logits nearer to each other than this may change places by rounding."""


def greedy(model: Any, ids: list[int]) -> list[int]:
    """The most likely tokens, by transformers in float32, up to the first choice that is close."""
    known = list(ids)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            top = model(torch.tensor([known])).logits[0, -1].topk(2)
        if top.values[0] - top.values[1] < CLEAR:
            break
        known.append(int(top.indices[0]))
    return known[len(ids) :]


@pytest.mark.parametrize("name", KINDS)
def test_a_server_of_a_quantized_checkpoint_gives_the_tokens_of_its_dequantized_weights(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    model = checkpoints.tiny("llama", num_hidden_layers=2, **case.shape)
    packed = packers.save(tmp_path / "tiny", model, case.config, case.pack)
    values = {key: each.values.bfloat16() if case.format == "bf16" else each.values for key, each in packed.items()}
    reference = packers.load_values(model, values)
    sampling = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(**tiny(tmp_path / "tiny", dtype="float32")) as llm:
        outputs = llm.generate(PROMPTS, sampling)
    num_clear = 0
    for output in outputs:
        expected = greedy(reference, output.prompt_token_ids)
        assert len(output.outputs[0].token_ids) == NUM_TOKENS
        assert list(output.outputs[0].token_ids[: len(expected)]) == expected
        num_clear += len(expected)
    assert num_clear > len(PROMPTS) * NUM_TOKENS / 2, "these prompts decide too little"
