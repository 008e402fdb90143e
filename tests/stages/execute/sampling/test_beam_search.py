"""Beam search finds the sequences of transformers' `generate`, with the same scores."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.kernels.step_inputs import block_bytes
from pipeline.runtime.model.generation_config import ExcludedTokens
from pipeline.runtime.token_outputs import logprob_dtype
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.stages.execute import checkpoints
from tests.stages.execute.native_driver import random_ids
from tests.stages.execute.pair import Pair, Request, make_runner

MAX_TOKENS = 24
CLOSE = 1e-3
"""Difference of two scores, and between two sequences that may change places."""
ENDS = list(range(0, checkpoints.VOCAB_SIZE, 25))
NONE = ExcludedTokens()


class Machine:
    def __init__(self, folder: Path, kernels: str) -> None:
        self.model = checkpoints.write(folder, checkpoints.config_of())
        bytes_of_a_block = block_bytes(3, 2, 16, 4)
        how: dict[str, Any] = {"dtype": "float32", "kernels": kernels}
        self.runners = {num: make_runner(folder, bytes_of_a_block, num, **how) for num in (160, 44)}

    def expected(self, prompt: list[int], **how: Any) -> tuple[list[list[int]], list[float]]:
        """Output ids and scores by transformers."""
        num_beams = how.pop("num_beams")
        found = self.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=ENDS,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
            **how,
        )
        outputs = []
        for sequence in found.sequences[:, len(prompt) :].tolist():
            ends = [request_index for request_index, token_id in enumerate(sequence) if token_id in ENDS]
            outputs.append(sequence[: ends[0] + 1] if ends else sequence)
        return outputs, found.sequences_scores.tolist()


@pytest.fixture(scope="module", params=["auto", "torch"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("tiny")
    machine = Machine(folder, request.param)
    yield machine
    for runner in machine.runners.values():
        runner.close()


def search_of(prompt: list[int], width: int, **how: Any) -> Request:
    fields = {"use_beam_search": True, "stop_token_ids": ENDS, "num_logprobs": 0, **how}
    return Request(tuple(prompt), MAX_TOKENS, n=width, fields=tuple(fields.items()))


def scored(pair: Pair, request_index: int, texts: list[list[int]], length_penalty: float) -> list[float]:
    return [
        float(
            np.frombuffer(pair.token_outputs[request_index, index], logprob_dtype(0))["logprob"]
            .astype(np.float64)
            .sum()
        )
        / len(text) ** length_penalty
        for index, text in enumerate(texts)
    ]


def without_empty(excluded: ExcludedTokens) -> dict[str, Any]:
    """transformers takes no empty lists."""
    return {name: ids for name, ids in msgspec.structs.asdict(excluded).items() if ids}


def check(
    machine: Machine,
    runner: CpuRunner,
    widths: list[int],
    depth: int = 2,
    excluded: ExcludedTokens = NONE,
    **how: Any,
) -> Pair:
    prompts = [random_ids(9 + 11 * i, i) for i in range(len(widths))]
    pair = Pair(runner, depth)
    runs = excluded.runs(ENDS)
    found = pair.run(
        [search_of(prompt, width, bad_words_ids=runs, **how) for prompt, width in zip(prompts, widths, strict=True)]
    )
    for request_index, (prompt, width, texts) in enumerate(zip(prompts, widths, found, strict=True)):
        outputs, scores = machine.expected(prompt, num_beams=width, **how, **without_empty(excluded))
        ours = scored(pair, 1 + request_index, texts, how.get("length_penalty", 1.0))
        assert ours == pytest.approx(scores, abs=CLOSE)
        for index, text in enumerate(texts):
            near = [output for output, score in zip(outputs, scores, strict=True) if abs(score - ours[index]) < CLOSE]
            assert text == outputs[index] or text in near
    return pair


@pytest.mark.parametrize("how", [{}, {"early_stopping": True}, {"early_stopping": "never"}], ids=str)
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0])
def test_sequences_and_scores_are_those_of_transformers(
    machine: Machine, how: dict[str, Any], length_penalty: float
) -> None:
    widths = [2, 3, 4, 8]
    pair = check(machine, machine.runners[160], widths, length_penalty=length_penalty, **how)
    assert pair.scheduler.load().num_forks > 0


@pytest.mark.parametrize("num_blocks", [160, 44])
def test_beams_without_tokens_that_the_model_excludes(machine: Machine, num_blocks: int) -> None:
    widths = [2, 3, 4, 8]
    prompts = [random_ids(9 + 11 * i, i) for i in range(len(widths))]
    plain = [
        output
        for prompt, width in zip(prompts, widths, strict=True)
        for output in machine.expected(prompt, num_beams=width)[0]
    ]
    excluded = ExcludedTokens(
        suppress_tokens=sorted({output[2] for output in plain}),
        begin_suppress_tokens=[*sorted({output[0] for output in plain}), ENDS[3]],
        bad_words_ids=[*(output[3:5] for output in plain), [ENDS[1]], [ENDS[2]]],
    )
    assert any(output[0] in excluded.begin_suppress_tokens for output in plain)
    check(machine, machine.runners[num_blocks], widths, excluded=excluded)


def test_widths_between(machine: Machine) -> None:
    check(machine, machine.runners[160], [5, 6, 7])


def test_a_width_of_one_is_greedy(machine: Machine) -> None:
    prompt = random_ids(20, 5)
    greedy = Request(tuple(prompt), MAX_TOKENS, fields=(("stop_token_ids", ENDS),))
    ((beam,), (plain,)) = Pair(machine.runners[160]).run([search_of(prompt, 1), greedy])
    assert beam == plain


def test_beams_that_are_preempted_and_share_memory_with_other_requests(machine: Machine) -> None:
    pair = check(machine, machine.runners[44], [4, 3, 4, 2, 4, 3], depth=1)
    assert pair.scheduler.load().num_preemptions + pair.scheduler.load().num_forks > 0
