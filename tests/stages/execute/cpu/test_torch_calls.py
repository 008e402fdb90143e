"""Recorded calls run in order, on the part of each buffer that the step uses."""

import numpy as np
import torch

from pipeline.kernels.step_inputs import StepInputs
from pipeline.stages.execute.cpu.pytorch.calls import MAX_BOUND_SIZES, Extent, TorchCalls


def fill(inputs: StepInputs, num_tokens: int, samples: bool = True) -> None:
    inputs.fill(
        np.arange(num_tokens, dtype=np.int32),
        np.zeros(1, np.int32),
        np.array([num_tokens], np.int32),
        np.zeros((1, 8), np.int32),
        np.array([samples]),
    )


def test_calls_run_in_order_on_the_used_part_of_buffers() -> None:
    inputs = StepInputs(128, 4, 8)
    calls = TorchCalls(inputs, torch.float32)
    tokens, samples = calls.buffer(3), calls.buffer(2, Extent.SAMPLES, torch.float64)
    seen: list[tuple[object, ...]] = []

    def set_all(buffer: torch.Tensor, constant: int) -> None:
        buffer.fill_(constant)
        seen.append(("set", tuple(buffer.shape)))

    calls.add(set_all, tokens, 7)
    calls.add(lambda buffer, source: seen.append((buffer.dtype, float(source.sum()))), samples, tokens)
    assert seen == []
    for num_tokens in (5, 1, 5):
        fill(inputs, num_tokens)
        calls.run()
    assert seen == [
        ("set", (5, 3)),
        (torch.float64, 105.0),
        ("set", (1, 3)),
        (torch.float64, 21.0),
        ("set", (5, 3)),
        (torch.float64, 105.0),
    ]
    assert calls.view(samples).shape == (1, 2)
    fill(inputs, 3, samples=False)
    assert calls.view(samples).shape == (0, 2)


def test_buffers_keep_their_addresses() -> None:
    inputs = StepInputs(64, 4, 8)
    calls = TorchCalls(inputs, torch.float32)
    buffer = calls.buffer(3)
    addresses = set()
    calls.add(lambda view: addresses.add(view.data_ptr()), buffer)
    for num_tokens in (9, 30, 1):
        fill(inputs, num_tokens)
        calls.run()
    assert len(addresses) == 1


def test_bound_calls_are_cached_for_a_limited_number_of_sizes() -> None:
    inputs = StepInputs(128, 4, 8)
    calls = TorchCalls(inputs, torch.float32)
    buffer = calls.buffer(1)
    sizes: list[int] = []
    calls.add(lambda view: sizes.append(len(view)), buffer)
    expected = [*range(1, MAX_BOUND_SIZES + 20), 1]
    for num_tokens in expected:
        fill(inputs, num_tokens)
        calls.run()
    assert sizes == expected
    assert len(calls._bound) == MAX_BOUND_SIZES
