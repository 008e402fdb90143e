"""The ops are selected once, by device and dtype."""

import dataclasses

import pytest
import torch

from pipeline.kernels.select import select


def test_the_selected_ops_are_immutable() -> None:
    ops = select("cpu", torch.float32)
    assert (ops.device, ops.dtype) == ("cpu", torch.float32)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ops.linear = None  # type: ignore[misc, assignment]


def test_a_device_without_kernels_is_rejected() -> None:
    with pytest.raises(ValueError, match="tpu"):
        select("tpu", torch.float32)
