"""Logits processors follow vLLM's definitions and order, in the library for every instruction set and in torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.kernels.sampling.logits_processor_inputs import BEGIN, LogitsProcessors, bits_of, pack_runs
from pipeline.kernels.sampling.logits_processors import apply_logits_processors, mask
from tests.kernels.cpu.samplers import ISAS, Rows, load
from tests.slices import part_of

INF = float("inf")
Shape = Callable[[np.ndarray, LogitsProcessors, int], np.ndarray]


@pytest.fixture(scope="session", params=["torch", *ISAS])
def processed(request: pytest.FixtureRequest, sampler_cache: Path) -> Shape:
    if request.param == "torch":
        return in_torch
    return Rows(load(request.param, sampler_cache)).processed


def in_torch(logits: np.ndarray, logits_processors: LogitsProcessors, num_known: int) -> np.ndarray:
    changed = torch.from_numpy(logits.astype(np.float32).copy())
    apply_logits_processors(changed, logits_processors, num_known)
    return changed.numpy()


@dataclass(frozen=True)
class Case:
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: dict[int, float] | None = None
    allowed: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    enders: Sequence[int] = ()
    min_tokens: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def logits_processors(self, vocab_size: int) -> tuple[LogitsProcessors, int]:
        """Arrays contain ids behind the known ones, which must not be read."""
        known = [*self.prompt, *self.output]
        ids = np.array(known + [1] * 9, np.int32)
        runs, num_runs = pack_runs(self.bad_words, vocab_size)
        bias = self.bias or {}
        made = LogitsProcessors(
            ids=ids,
            num_prompt=len(self.prompt),
            repetition=float(np.float32(self.repetition)),
            presence=float(np.float32(self.presence)),
            frequency=float(np.float32(self.frequency)),
            bias_ids=np.array(list(bias), np.int32),
            bias_values=np.array(list(bias.values()), np.float32),
            allowed=None if self.allowed is None else bits_of(np.array(self.allowed, np.int32), vocab_size),
            runs=runs,
            num_runs=num_runs,
            enders=np.array(self.enders, np.int32),
            min_tokens=self.min_tokens,
        )
        return made, len(known)

    def expected(self, logits: np.ndarray) -> list[np.float32]:
        """One id after the other, by the definitions."""
        single, output = np.float32, list(self.output)
        processed = []
        for token, logit in enumerate(logits.astype(np.float32)):
            forbidden = self.allowed is not None and token not in self.allowed
            for word in self.bad_words:
                *before, last = word
                forbidden |= last == token and [BEGIN, *output][1 + len(output) - len(before) :] == before
            forbidden |= token in self.enders and len(output) < self.min_tokens
            if forbidden:
                processed.append(single(-INF))
                continue
            logit = single(logit + single((self.bias or {}).get(token, 0)))
            if self.repetition != 1 and token in [*self.prompt, *output]:
                logit = single(logit / single(self.repetition) if logit > 0 else logit * single(self.repetition))
            if times := output.count(token):
                logit = single(logit - single(single(self.frequency) * single(times)))
                logit = single(logit - single(self.presence))
            processed.append(logit)
        return processed


def check(processed: Shape, logits: np.ndarray, case: Case) -> np.ndarray:
    found = processed(logits, *case.logits_processors(len(logits)))
    np.testing.assert_allclose(found, case.expected(logits), rtol=1e-6, atol=0)
    return found


def row(vocab_size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, vocab_size).astype(np.float32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Case]:
    vocab_size = draw(st.sampled_from([1, 2, 31, 32, 33, 70, 500]))
    ids = st.integers(0, min(vocab_size, 6) - 1) | st.integers(0, vocab_size - 1)
    some = st.lists(ids, max_size=12)
    case = Case(
        prompt=draw(some),
        output=draw(some),
        bias=draw(st.dictionaries(ids, st.floats(-100, 100, width=32), max_size=8)),
        allowed=draw(st.none() | st.lists(ids, unique=True, min_size=1, max_size=20).map(sorted)),
        bad_words=draw(
            st.lists(st.lists(ids, min_size=1, max_size=4) | some.map(lambda run: [BEGIN, *run, 0]), max_size=5)
        ),
        enders=draw(st.lists(ids, max_size=4)),
        min_tokens=draw(st.integers(0, 14)),
        repetition=draw(st.sampled_from([1.0, 0.5, 1.1, 2.0])),
        presence=draw(st.sampled_from([0.0, -2.0, 0.7, 2.0])),
        frequency=draw(st.sampled_from([0.0, -2.0, 0.3, 2.0])),
    )
    return vocab_size, case


@settings(max_examples=part_of(150, 40), deadline=None)
@given(cases(), st.integers(0, 1000))
def test_any_logits_processors_follow_their_definitions(processed: Shape, sized: tuple[int, Case], seed: int) -> None:
    vocab_size, case = sized
    check(processed, row(vocab_size, seed), case)


def test_bias_comes_before_penalties(processed: Shape) -> None:
    """1 - 3 is below zero, so a repetition penalty multiplies: -4, and not 0.5 - 3."""
    found = processed(np.ones(5, np.float32), *Case(prompt=[2], bias={2: -3.0}, repetition=2.0).logits_processors(5))
    assert found.tolist() == [1, 1, -4, 1, 1]
    # The other two penalties are subtracted afterwards, once for each occurrence.
    case = Case(output=[2, 2], bias={2: 1.0}, repetition=2.0, presence=0.5, frequency=0.25)
    assert processed(np.ones(5, np.float32), *case.logits_processors(5)).tolist() == [1, 1, 0, 1, 1]


def test_forbidden_ids_stay_forbidden(processed: Shape) -> None:
    everything = Case(
        prompt=[0, 1, 2, 3],
        output=[4, 0, 1],
        bias=dict.fromkeys(range(6), 100.0),
        allowed=[1, 2, 3, 5],
        bad_words=[[2], [0, 1, 3]],
        enders=[1],
        min_tokens=4,
        repetition=0.01,
        presence=-2,
        frequency=-2,
    )
    found = check(processed, np.full(6, 50, np.float32), everything)
    assert np.flatnonzero(found > -INF).tolist() == [5]
    # Whatever its logit is, and however much is added.
    endless = Case(output=[0], bias={0: 3e38}, bad_words=[[0]], presence=-3e38, frequency=-3e38, repetition=1e-30)
    found = processed(np.array([INF, 1], np.float32), *endless.logits_processors(2))
    assert not found[0] > -INF and found[1] == 1


def test_bad_words_match_only_the_end_of_the_output(processed: Shape) -> None:
    logits = row(50)
    words = [[7], [3, 4], [3, 4, 5], [9, 9, 9]]
    for prompt, output, forbidden in [
        ([], [], [7]),
        ([1, 3], [], [7]),
        ([3], [4], [7]),
        ([], [3], [4, 7]),
        ([], [3, 4], [5, 7]),
        ([], [3, 4, 1], [7]),
        ([9], [9], [7]),
        ([], [9, 9], [7, 9]),
        ([], [1, 9, 9, 3], [4, 7]),
    ]:
        found = check(processed, logits, Case(prompt=prompt, output=output, bad_words=words))
        assert np.flatnonzero(found == -INF).tolist() == forbidden


def test_begin_stands_before_the_output(processed: Shape) -> None:
    words, logits = [[BEGIN, 5], [BEGIN, 9, 6], [BEGIN, 9, 9, 8], [9, 9, 9, 4], [7]], row(40)
    for prompt, output, forbidden in [
        ([], [], [5, 7]),
        ([9, 9], [], [5, 7]),
        ([1], [9], [6, 7]),
        ([1, 9], [9, 9], [7, 8]),
        ([9], [9, 9, 9], [4, 7]),
    ]:
        found = check(processed, logits, Case(prompt=prompt, output=output, bad_words=words))
        assert np.flatnonzero(found == -INF).tolist() == forbidden


def test_stop_ids_are_forbidden_before_min_tokens(processed: Shape) -> None:
    for num, forbidden in [(0, [2, 11]), (3, [2, 11]), (4, []), (5, [])]:
        case = Case(prompt=[2] * 9, output=[5] * num, enders=[2, 11], min_tokens=4)
        assert np.flatnonzero(check(processed, row(40), case) == -INF).tolist() == forbidden


def test_impossible_bad_words_are_skipped() -> None:
    wrong = [[], [3, 300], [BEGIN], [3, BEGIN], [BEGIN, 300], [-2, 3]]
    packed, num = pack_runs([[5, 6, 7], [1, 2], *wrong, [299], [1, 2], [BEGIN, 8, 9]], 300)
    assert (packed.tolist(), num) == ([5, 6, 8, 11, 14, 299, 1, 2, 5, 6, 7, BEGIN, 8, 9], 4)
    assert pack_runs([[300], []], 300)[1] == 0 and not len(pack_runs([], 300)[0])


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_bitmasks_have_the_layout_of_llguidance(vocab_size: int) -> None:
    ids = np.flatnonzero(np.random.default_rng(vocab_size).random(vocab_size) < 0.4).astype(np.int32)
    words = bits_of(ids, vocab_size)
    assert words.dtype == np.uint32 and len(words) == -(-vocab_size // 32)
    assert [v for v in range(len(words) * 32) if int(words[v // 32]) >> (v % 32) & 1] == ids.tolist()
    logits = torch.zeros(vocab_size)
    mask(logits, words)
    assert np.flatnonzero(logits.numpy() == 0).tolist() == ids.tolist()
