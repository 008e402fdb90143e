"""Steps whose masks arrive late wait for them, or time out without side effects."""

import ctypes
import threading
import time

import numpy as np

from tests.kernels.cpu.quantized import random, random_matrix
from tests.kernels.cpu.recording import recording
from tests.kernels.cpu.sampling.head import DEPTH, MASKS_LATE, Head


def test_a_step_waits_for_its_masks(library: ctypes.CDLL) -> None:
    word, bits = np.zeros(1, np.uint32), np.full(7, 2**32 - 1, np.uint32)
    with recording(library, threads=2) as r:
        head = Head(r, random_matrix(16, 200, DEPTH, "bf16"))
        activations = random(17, 3, DEPTH)
        best = head.all_logits(activations).argmax(1)
        r.sampling_inputs.greedy[:] = 0
        r.sampling_inputs.masks[:3] = bits.ctypes.data
        head.ticket.word, head.ticket.expected, head.ticket.timeout_ms = word.ctypes.data, 7, 20_000
        began = threading.Event()

        def write() -> None:
            began.set()
            deadline = time.monotonic() + 10
            while np.isnan(head.logits[:3]).any():
                assert time.monotonic() < deadline
                time.sleep(0.001)
            bits[:] = 0
            bits[3] = 1 << 5
            word[0] = 7

        head.logits[:] = np.nan
        writer = threading.Thread(target=write)
        writer.start()
        assert began.wait(10)
        ids = head.run(activations)
        writer.join(10)
        assert not writer.is_alive()
        assert ids.tolist() == [101] * 3
        # The word keeps its value, so later steps do not wait. A step without a word does not wait either.
        assert head.run(activations).tolist() == [101] * 3
        head.ticket.word, head.ticket.expected = None, 8
        r.sampling_inputs.masks[:3] = 0
        np.testing.assert_array_equal(head.run(activations), best)


def test_a_step_with_late_masks_times_out_without_side_effects(library: ctypes.CDLL) -> None:
    word = np.zeros(1, np.uint32)
    with recording(library, threads=2) as r:
        head = Head(r, random_matrix(18, 200, DEPTH, "bf16"))
        small = random(19, 9, DEPTH)
        expected = head.all_logits(small).argmax(1)
        head.ticket.word, head.ticket.expected, head.ticket.timeout_ms = word.ctypes.data, 1, 30
        head.put(random(20, 9, DEPTH, scale=100))
        r.sampling_inputs.ids[:] = -1
        began = time.monotonic()
        assert r.run() == MASKS_LATE
        assert time.monotonic() - began >= 0.03
        assert (r.sampling_inputs.ids == -1).all()
        word[0] = 1
        np.testing.assert_array_equal(head.run(small), expected)
        head.ticket.word = None
        np.testing.assert_array_equal(head.run(small), expected)


def test_steps_with_late_masks_alternate_with_good_steps(library: ctypes.CDLL) -> None:
    """A thread that is slow to leave a timed-out step does not take part in the next step's sampling."""
    word = np.zeros(1, np.uint32)
    with recording(library, threads=4) as r:
        head = Head(r, random_matrix(21, 200, DEPTH, "bf16"))
        large, small = random(22, 12, DEPTH, scale=100), random(23, 5, DEPTH)
        expected = head.all_logits(small).argmax(1)
        head.ticket.expected = 1
        for _ in range(100):
            head.ticket.word = word.ctypes.data
            head.put(large)
            assert r.run() == MASKS_LATE
            head.ticket.word = None
            np.testing.assert_array_equal(head.run(small), expected)
