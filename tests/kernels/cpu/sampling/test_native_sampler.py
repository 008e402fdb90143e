"""The end of a program, from the last norm to ids: logits, masks, penalties, sampling, for every instruction set."""

import ctypes

import numpy as np
import pytest
import torch

from pipeline.kernels.cpu import native
from pipeline.kernels.cpu.native import ActivationForm
from pipeline.kernels.cpu.sample_reference import sample_reference
from pipeline.kernels.sampling.logits_processor_inputs import LOGITS_PROCESSORS, LogitsProcessors, bits_of, pack_runs
from pipeline.kernels.sampling.logits_processors import apply_logits_processors, mask
from pipeline.kernels.sampling.noise_keys import noise_keys, sequence_key
from pipeline.kernels.sampling.penalties import penalize
from pipeline.kernels.sampling.sample import probabilities_reference
from pipeline.kernels.stored_matrix import Format
from tests.k_quants import quantize
from tests.kernels.cpu.quantized import product, random, random_matrix, whole
from tests.kernels.cpu.recording import Recording, assert_near, recording
from tests.kernels.cpu.sampling.head import DEPTH, Head
from tests.kernels.sampling.test_sample import assert_follows


@pytest.mark.parametrize("vocab_size", [1, 15, 37, 300, 1000])
def test_greedy_rows_need_no_stored_logits(library: ctypes.CDLL, format: Format, vocab_size: int) -> None:
    depth = whole(DEPTH, format)
    activations = random(1, 29, depth)
    with recording(library, threads=2) as r:
        head = Head(r, random_matrix(2, vocab_size, depth, format))
        logits = head.all_logits(activations)
        assert_near(logits, *product(head.kept, head.matrix))
        head.logits[:] = np.nan
        np.testing.assert_array_equal(head.run(activations), logits.argmax(1))
        assert np.isnan(head.logits).all(), "a greedy row's logits are not written"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_of_equal_logits_the_lowest_id_wins(library: ctypes.CDLL, is_emulated: bool, threads: int) -> None:
    """Whether they are in one panel, in neighbours, or in tiles that other threads compute."""
    base, activations = random(3, 40, DEPTH), random(5, 20, DEPTH)
    repeated = base[np.random.default_rng(4).integers(0, 40, 1500)]
    for weights in (repeated, np.zeros_like(repeated)):
        with recording(library, threads=threads) as r:
            # Earlier work wakes all threads; whichever starts first then gets the lowest ids.
            rows, residual = r.rows(20, DEPTH), r.floats(np.zeros((20, 1024)))
            r.put(rows, activations, ActivationForm.PLAIN)
            before = r.pack(random_matrix(24, 1024, DEPTH, "bf16"))
            library.program_linear_add(r.program, residual.ctypes.data, rows, before, 1024, 1.0)
            head = Head(r, quantize(torch.from_numpy(weights), "bf16"))
            logits = head.all_logits(activations)
            assert ((logits == logits.max(1, keepdims=True)).sum(1) > 1).all()
            for _ in range(20 if is_emulated else 200):
                np.testing.assert_array_equal(head.run(activations), logits.argmax(1))


@pytest.mark.parametrize("vocab_size", [37, 130])
def test_a_logit_that_is_nan_loses_wherever_it_is(library: ctypes.CDLL, vocab_size: int) -> None:
    """As in the sampler: it hides no logit before or behind it."""
    activations = random(7, 9, DEPTH)
    for at in range(0, vocab_size, 3):
        weights = random(6, vocab_size, DEPTH)
        weights[at] = np.nan
        with recording(library) as r:
            head = Head(r, quantize(torch.from_numpy(weights), "bf16"))
            logits = head.all_logits(activations)
            assert np.isnan(logits[:, at]).all()
            np.testing.assert_array_equal(head.run(activations), np.nanargmax(logits, axis=1))


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("vocab_size", [1, 37, 130])
def test_padding_never_wins(library: ctypes.CDLL, format: Format, vocab_size: int, greedy: bool) -> None:
    """All logits are below zero, and the padding columns are zero."""
    depth = whole(DEPTH, format)
    weights = -np.abs(random(6, vocab_size, depth)) - 1
    with recording(library, threads=2) as r:
        head = Head(r, quantize(torch.from_numpy(weights), format))
        activations = np.abs(random(7, 9, depth))
        logits = head.all_logits(activations)
        assert (logits < -1).all()
        r.sampling_inputs.greedy[:] = greedy
        np.testing.assert_array_equal(head.run(activations), logits.argmax(1))


def test_logits_have_the_same_bits_in_every_batch(library: ctypes.CDLL, format: Format) -> None:
    depth = whole(DEPTH, format)
    activations, results = random(8, 50, depth), []
    for threads in (1, 2, 3):
        with recording(library, threads=threads) as r:
            head = Head(r, random_matrix(9, 333, depth, format))
            results.append(head.all_logits(activations))
            results += [
                np.concatenate([head.all_logits(activations[i : i + num]) for i in range(0, 50, num)])
                for num in range(1, 14)
            ]
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_greedy_sampled_masked_and_penalized_rows_share_a_step(library: ctypes.CDLL) -> None:
    vocab_size, num = 333, 24
    rng = np.random.default_rng(10)
    activations = random(11, num, DEPTH, scale=0.5)
    with recording(library, threads=3) as r:
        head, sampling_inputs = Head(r, random_matrix(12, vocab_size, DEPTH, "q8_0")), r.sampling_inputs
        logits = head.all_logits(activations)
        head.logits[:] = np.nan
        expected = []
        for row in range(num):
            kind = row % 6
            scores = logits[row].copy()
            sampling_inputs.greedy[row] = kind == 0
            sampling_inputs.temperature[row] = 0.0 if kind in (0, 4) else rng.uniform(0.3, 2)
            sampling_inputs.keys[row] = rng.integers(0, 2**64, dtype=np.uint64)
            sampling_inputs.top_k[row], sampling_inputs.top_p[row], sampling_inputs.min_p[row] = 0, 1, 0
            if kind == 1:
                sampling_inputs.top_k[row], sampling_inputs.top_p[row], sampling_inputs.min_p[row] = 40, 0.9, 0.01
            if kind in (2, 4):
                history = r.kept(rng.integers(0, vocab_size, 60).astype(np.int32))
                sampling_inputs.logits_processors[row] = address(r, LogitsProcessors(history, 20, 1.5, 0.5, 0.25))
                sampling_inputs.num_known[row] = 50
                row_scores = torch.from_numpy(scores)
                penalize(row_scores, torch.from_numpy(history[:50]), 20, 1.5, 0.5, 0.25)
            if kind in (3, 4):
                allowed = rng.random(vocab_size) < 0.1
                bits = np.packbits(np.append(allowed, np.ones(-vocab_size % 32, np.bool_)), bitorder="little")
                sampling_inputs.masks[row] = r.kept(bits.view(np.uint32)).ctypes.data
                scores[~allowed] = -np.inf
            settings = (
                sampling_inputs.temperature[row],
                sampling_inputs.top_k[row],
                sampling_inputs.top_p[row],
                sampling_inputs.min_p[row],
            )
            greedy = sampling_inputs.temperature[row] == 0
            expected.append(
                scores.argmax() if greedy else sample_reference(scores, *settings, int(sampling_inputs.keys[row]))
            )
        np.testing.assert_array_equal(head.run(activations), expected)
        # The features make a difference: without them these rows have other ids.
        assert (np.array(expected) != logits.argmax(1)).sum() > num // 3
        # No state carries over to the next step.
        np.testing.assert_array_equal(head.run(activations), expected)


def address(r: Recording, logits_processors: LogitsProcessors) -> int:
    """The address of the struct that the library reads, which lives as long as the program."""
    described = r.kept(np.zeros(1, LOGITS_PROCESSORS))
    r.kept(logits_processors).write(described, 0)
    return int(described.ctypes.data)


def exact(logits: np.ndarray) -> np.ndarray:
    """Log probabilities: [rows, vocab_size]."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(1, keepdims=True))


def test_logprobs_use_the_logits_before_processors_masks_and_filters(library: ctypes.CDLL) -> None:
    vocab_size, num = 333, 24
    rng = np.random.default_rng(20)
    activations = random(21, num, DEPTH, scale=0.5)
    with recording(library, threads=3) as r:
        head, sampling_inputs = Head(r, random_matrix(22, vocab_size, DEPTH, "q8_0")), r.sampling_inputs
        logits = head.all_logits(activations)
        history = [rng.integers(0, vocab_size, 40).astype(np.int32) for _ in range(num)]
        masks = [rng.integers(0, 2**32, -(-vocab_size // 32), dtype=np.uint32) for _ in range(num)]
        for i in range(num):
            sampling_inputs.greedy[i] = 0
            sampling_inputs.temperature[i] = 0 if i % 3 == 0 else 1.5
            sampling_inputs.top_p[i] = 0.5 if i % 5 == 0 else 1
            sampling_inputs.keys[i] = rng.integers(0, 2**64, dtype=np.uint64)
            if i % 2:
                sampling_inputs.logits_processors[i], sampling_inputs.num_known[i] = (
                    address(r, LogitsProcessors(history[i], 7, 1.3, 0.5, 0.25)),
                    40,
                )
            if i % 4 > 1:
                sampling_inputs.masks[i] = masks[i].ctypes.data
        plain = head.run(activations)
        num_top = np.where(np.arange(num) % 6 != 5, np.arange(num) % 7, -1).astype(np.int32)
        sampling_inputs.logprobs.lay_out(num_top)
        ids = head.run(activations)
        np.testing.assert_array_equal(ids, plain)
        expected = exact(logits)
        logprobs = []
        for i in np.flatnonzero(num_top >= 0).tolist():
            logprob, top_ids, top_logprobs = sampling_inputs.logprobs.views(i)
            np.testing.assert_array_equal(top_ids, np.argsort(-logits[i], kind="stable")[: num_top[i]])
            np.testing.assert_allclose(top_logprobs, expected[i, top_ids], rtol=0, atol=1e-6)
            np.testing.assert_allclose(logprob[0], expected[i, ids[i]], rtol=0, atol=1e-6)
            logprobs.append(round(float(logprob[0]), 3))
        assert len(set(logprobs)) > num // 2


def test_samples_follow_logits_processors_and_filters(library: ctypes.CDLL) -> None:
    """In this order: forbidden ids, bias, penalties, temperature, min_p, top_k, top_p."""
    vocab_size, num, rounds, temperature = 60, 64, 400, 1.3
    known = np.array([3, 5, 5, 9, 11, 5, 11, 11], np.int32)
    runs, num_runs = pack_runs([[11, 20], [21], [9, 22]], vocab_size)
    with recording(library, threads=2) as r:
        head, sampling_inputs = Head(r, random_matrix(40, vocab_size, DEPTH, "bf16", scale=0.15)), r.sampling_inputs
        activations = np.repeat(random(41, 1, DEPTH), num, axis=0)
        logits = torch.from_numpy(head.all_logits(activations)[0])
        logits_processors = LogitsProcessors(
            known,
            num_prompt=4,
            repetition=1.25,
            presence=0.5,
            frequency=0.25,
            bias_ids=np.array([5, 30], np.int32),
            bias_values=np.array([2, 1.5], np.float32),
            allowed=bits_of(np.arange(50, dtype=np.int32), vocab_size),
            runs=runs,
            num_runs=num_runs,
            enders=np.array([2], np.int32),
            min_tokens=5,
        )
        allowed = r.kept(bits_of(np.arange(3, 60, dtype=np.int32), vocab_size))
        processed = logits.clone()
        mask(processed, allowed)
        apply_logits_processors(processed, logits_processors, len(known))
        sampling_inputs.greedy[:num], sampling_inputs.temperature[:num], sampling_inputs.num_known[:num] = (
            0,
            temperature,
            len(known),
        )
        sampling_inputs.logits_processors[:num], sampling_inputs.masks[:num] = (
            address(r, logits_processors),
            allowed.ctypes.data,
        )
        filters = [(0, 1, 0), (9, 0.8, 0.02)]
        for i, (top_k, top_p, min_p) in enumerate(filters):
            half = slice(i, num, 2)
            sampling_inputs.top_k[half], sampling_inputs.top_p[half], sampling_inputs.min_p[half] = top_k, top_p, min_p
        base, samples = np.full(num, sequence_key(7, 0), np.uint64), []
        for step in range(rounds):
            sampling_inputs.keys[:num] = noise_keys(base, np.arange(num) + num * step)
            samples.append(head.run(activations))
        for i, (top_k, top_p, min_p) in enumerate(filters):
            expected = probabilities_reference(processed, temperature, top_k, top_p, min_p)
            assert_follows(torch.from_numpy(np.concatenate([ids[i::2] for ids in samples])).long(), expected)


def test_given_ids_are_scored_by_a_program_of_their_own(library: ctypes.CDLL) -> None:
    """Next to another program on the same threads, whose sampled tokens differ."""
    vocab_size, num = 333, 17
    activations = random(31, num, DEPTH, scale=0.5)
    with recording(library, threads=3) as r:
        head, scores = Head(r, random_matrix(32, vocab_size, DEPTH, "q4_0")), r.scores
        logits = head.all_logits(activations)
        program = library.program_new(r.thread_pool.handle, ctypes.byref(r.arrays))
        try:
            library.program_score(
                program,
                head.rows,
                r.pack(head.matrix),
                vocab_size,
                head.logits.ctypes.data,
                len(head.logits),
                ctypes.byref(native.NativeScoreArrays.of(scores)),
            )
            ids = np.random.default_rng(33).integers(0, vocab_size, num).astype(np.int32)
            scores.fill(np.arange(num), ids, (np.arange(num) % 5).astype(np.int32))
            for _ in range(20):
                head.run(activations[:3])
                head.put(activations)
                scores.logprobs.memory[:] = 0xA5
                assert library.program_run(program, 0, 0, num) == 0
                for i in range(num):
                    logprob, top_ids, top_logprobs = scores.logprobs.views(i)
                    np.testing.assert_array_equal(top_ids, np.argsort(-logits[i], kind="stable")[: i % 5])
                    np.testing.assert_allclose(logprob, exact(logits)[i, ids[i]], rtol=0, atol=1e-6)
                    np.testing.assert_allclose(top_logprobs, exact(logits)[i, top_ids], rtol=0, atol=1e-6)
        finally:
            library.program_delete(program)


def test_if_all_ids_are_forbidden_there_is_no_id_and_no_logprob(library: ctypes.CDLL) -> None:
    with recording(library, threads=2) as r:
        head, sampling_inputs = Head(r, random_matrix(34, 200, DEPTH, "bf16")), r.sampling_inputs
        activations = random(35, 4, DEPTH)
        best = head.all_logits(activations).argmax(1)
        sampling_inputs.greedy[:4] = [1, 0, 0, 0]
        sampling_inputs.temperature[:4] = [0, 0, 1, 1]
        nothing = r.kept(np.zeros(7, np.uint32))
        sampling_inputs.masks[1:3] = nothing.ctypes.data
        sampling_inputs.logits_processors[3] = address(
            r, LogitsProcessors(r.kept(np.zeros(9, np.int32)), 5, allowed=nothing)
        )
        sampling_inputs.logprobs.lay_out(np.array([-1, 3, 3, 3], np.int32))
        sampling_inputs.logprobs.memory[:] = 0xA5
        assert head.run(activations).tolist() == [best[0], -1, -1, -1]
        assert (sampling_inputs.logprobs.memory == 0xA5).all()
        # A row with NaN logits has no id either.
        activations[0] = np.nan
        assert head.run(activations)[0] == -1


def test_a_step_is_independent_of_earlier_steps(library: ctypes.CDLL) -> None:
    """Earlier steps have larger logits and more rows."""
    with recording(library, threads=2) as r:
        head = Head(r, random_matrix(13, 200, DEPTH, "bf16"))
        small = random(14, 5, DEPTH)
        expected = head.all_logits(small).argmax(1)
        for _ in range(5):
            head.run(random(15, 30, DEPTH, scale=100))
            np.testing.assert_array_equal(head.run(small), expected)
