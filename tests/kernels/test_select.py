"""The functions are chosen once, by device and dtype."""

import dataclasses

import pytest
import torch

from pipeline.kernels.select import select


def test_a_chosen_set_cannot_be_changed() -> None:
    ops = select("cpu", torch.float32)
    assert (ops.device, ops.dtype) == ("cpu", torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = None  # type: ignore[misc, assignment]


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(ValueError, match="tpu"):
        select("tpu", torch.float32)
