"""Speculative decoding changes no text and no logprob, whatever is proposed: right ids, wrong ids, or ids after a
stop."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.settings import SpeculativeSettings
from pipeline.kernels.step_inputs import IntArray, block_bytes
from pipeline.runtime.messages import BEGIN, Pooling
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.drafts.speculation import NgramProposer, Speculator
from pipeline.stages.execute.rows import RowTable
from tests.slices import part_of
from tests.stages.execute import checkpoints
from tests.stages.execute.native_driver import random_ids, write
from tests.stages.execute.pair import GREEDY, Pair, Request, make_runner

VOCAB_SIZE = checkpoints.config_of().vocab_size
SHARED = random_ids(40, 7)


class Oracle:
    """Proposes what the texts continue with, but every few ids something else."""

    reads_hidden_states = False

    def __init__(self, table: RowTable, texts: dict[tuple[int, ...], list[list[int]]], skill: float) -> None:
        self._table, self._skill = table, skill
        self._texts = [(*prompt, *text) for prompt, samples in texts.items() for text in samples]
        self._random = random.Random(0)
        self.num_proposed = 0
        self.draft_s = self.pass_s = 0.0

    def propose(self, rows: IntArray, most: IntArray, clock: Callable[[], float]) -> list[IntArray]:
        proposals = []
        for row, num in zip(rows.tolist(), most.tolist(), strict=True):
            known = tuple(self._table.ids[row, : self._table.num_ids[row]].tolist())
            text = next((text for text in self._texts if text[: len(known)] == known), ())
            ids = [*text[len(known) : len(known) + num]]
            ids += [self._random.randrange(VOCAB_SIZE) for _ in range(self._random.randint(0, num - len(ids)))]
            ids = [each if self._random.random() < self._skill else (each + 1) % VOCAB_SIZE for each in ids]
            self.num_proposed += len(ids)
            proposals.append(np.array(ids, np.int32))
        return proposals

    def observe(self, *of_a_step: Any) -> None:
        pass

    def drop(self, rows: IntArray) -> None:
        pass

    def close(self) -> None:
        pass


def requests() -> list[Request]:
    """Of all kinds. Those with stop ids end in the middle of a text."""
    made = []
    for i in range(part_of(24, 18)):
        prompt = (SHARED if i % 3 == 0 else []) + random_ids(5 + 3 * i, i)
        fields: dict[str, Any] = {}
        if i % 4 == 1:
            fields |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
        if i % 5 == 2:
            fields |= {"num_logprobs": i % 3, "top_p": 0.9, "min_p": 0.01}
        if i % 6 == 3:
            fields |= {"stop_token_ids": list(range(0, VOCAB_SIZE, 9)), "min_tokens": 4}
        if i % 7 == 4:
            fields |= {"bad_words_ids": [[token] for token in range(3, VOCAB_SIZE, 5)] + [[1, 2]]}
            fields["bad_words_ids"] += [[BEGIN, token] for token in range(0, VOCAB_SIZE, 2)]
        if i % 8 == 5:
            fields |= {"num_prompt_logprobs": 1}
        seed = GREEDY if i % 2 else i
        made.append(Request(tuple(prompt), 20 + i, seed, 1 + i % 3, at_step=2 * i, fields=tuple(fields.items())))
    made.append(Request(tuple(random_ids(30, 3)), 1, at_step=9, fields=(("pooling", Pooling.MEAN),)))
    return made


@pytest.fixture(scope="module", params=["auto", "torch"])
def runners(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CpuRunner]]:
    """One without speculation, and one with little memory. In bfloat16, the texts of torch depend on the batch."""
    folder: Path = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    is_torch = request.param == "torch"
    how = {"kernels": request.param, "dtype": "float32" if is_torch else "bfloat16"}
    bytes_of = block_bytes(3, 2, 16, 4 if is_torch else 2)
    plain = make_runner(folder, bytes_of, 160, **how)
    speculating = make_runner(folder, bytes_of, 18, num_swap_blocks=8, num_speculative_tokens=6, **how)
    yield [plain, speculating]
    plain.close()
    speculating.close()


@pytest.mark.parametrize(("depth", "skill", "adaptive"), [(1, 0.8, False), (2, 0.5, False), (3, 0.9, True)])
def test_texts_and_logprobs_are_the_same(runners: list[CpuRunner], depth: int, skill: float, adaptive: bool) -> None:
    plain, speculating = runners
    made = requests()
    before = Pair(plain)
    texts = before.run(made)
    pair = Pair(speculating, depth, adaptive_speculation=adaptive)
    assert speculating.speculator is not None
    oracle = Oracle(speculating.rows, {one.prompt: text for one, text in zip(made, texts, strict=True)}, skill)
    speculating.speculator.proposer = oracle
    assert pair.run(made) == texts
    if isinstance(speculating.program, NativeProgram):
        assert pair.token_outputs == before.token_outputs
        assert pair.prompt_logprobs == before.prompt_logprobs
    counts = pair.scheduler.speculation.counts()
    assert oracle.num_proposed >= counts.num_draft_tokens >= counts.num_accepted_tokens
    assert counts.num_accepted_tokens == sum(counts.num_accepted_per_pos)
    if not adaptive:  # how much an adaptive one proposes depends on times: on a busy machine maybe nothing
        assert counts.num_draft_tokens > counts.num_accepted_tokens > 200
        assert pair.scheduler.load().num_preemptions > 0


def test_ngrams_of_a_repeating_text_are_accepted(runners: list[CpuRunner]) -> None:
    plain, speculating = runners
    assert speculating.speculator is not None
    speculating.speculator.proposer = NgramProposer(speculating.rows, 2, 4)
    # An id with a large bias is sampled again and again.
    fields = (("bias_ids", [5]), ("bias_values", [100.0]))
    made = [Request(tuple(random_ids(30, i)), 60, GREEDY if i else 1, fields=fields) for i in range(3)]
    pair = Pair(speculating, adaptive_speculation=False)
    assert pair.run(made) == Pair(plain).run(made) == [[[5] * 60]] * 3
    assert pair.scheduler.load().num_steps < 20


@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=60), most=st.integers(1, 15))
def test_ngrams_propose_what_followed_the_longest_match(ids: list[int], most: int) -> None:
    table = RowTable(1, 128, 8, 10)
    table.ids[0, : len(ids)], table.num_ids[0] = ids, len(ids)
    fewest, longest = 2, 4
    (found,) = NgramProposer(table, fewest, longest).propose(np.array([0]), np.array([most]), time.monotonic)
    for length in range(min(longest, len(ids) - 1), fewest - 1, -1):
        indices = [at for at in range(len(ids) - length) if ids[at : at + length] == ids[-length:]]
        if indices:
            following = ids[indices[-1] + length :]
            expected = (following * most)[:most]
            assert found.tolist() == expected
            return
    assert len(found) == 0


def test_ngrams_are_found_in_the_predicted_text_too() -> None:
    table = RowTable(1, 128, 8, 1000)
    table.ids[0, :5], table.num_ids[0] = [7, 8, 256, 1, 2], 5
    table.predicted[0] = np.array([9, 256, 1, 2, 40, 41, 42], np.int32)
    proposer = NgramProposer(table, 3, 5)
    assert proposer.propose(np.array([0]), np.array([2]), time.monotonic)[0].tolist() == [40, 41]
    assert proposer.propose(np.array([0]), np.array([9]), time.monotonic)[0].tolist() == [40, 41, 42]
    table.predicted[0] = np.zeros(0, np.int32)
    assert proposer.propose(np.array([0]), np.array([2]), time.monotonic)[0].tolist() == []


def test_settings_choose_the_proposer(runners: list[CpuRunner]) -> None:
    plain, speculating = runners
    assert plain.speculator is None
    assert (plain.facts.num_speculative_tokens, plain.facts.max_num_drafts) == (0, 0)
    assert (speculating.facts.num_speculative_tokens, speculating.facts.max_num_drafts) == (6, 64)
    table = RowTable(1, 128, 8, 1000)
    table.ids[0, :9], table.num_ids[0] = [1, 2, 3, 50, 2, 3, 60, 2, 3], 9
    for limits, proposed in (((2, 5), [60]), ((3, 5), []), ((1, 2), [60])):
        settings = SpeculativeSettings(method="ngram", prompt_lookup_min=limits[0], prompt_lookup_max=limits[1])
        found = Speculator(table, settings).proposer.propose(np.array([0]), np.array([1]), time.monotonic)
        assert found[0].tolist() == proposed
    table.ids[0, 6:9] = [9, 1, 2]
    for longest, proposed in ((2, [3, 50, 2]), (1, [3, 9, 1])):
        settings = SpeculativeSettings(method="ngram", prompt_lookup_min=1, prompt_lookup_max=longest)
        found = Speculator(table, settings).proposer.propose(np.array([0]), np.array([3]), time.monotonic)
        assert found[0].tolist() == proposed
