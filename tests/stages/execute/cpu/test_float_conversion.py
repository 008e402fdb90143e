"""Floats are converted in numpy to the bits that torch makes."""

import numpy as np
import pytest
import torch

from pipeline.stages.execute import weights
from pipeline.stages.execute.weights import converted

EVERY_F32 = np.concatenate(  # every upper half, with lower halves around the ties
    [(np.arange(1 << 16, dtype=np.uint32) << 16) | np.uint32(low) for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
).view(np.float32)
EVERY_F16 = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)


@pytest.mark.parametrize("chunk", [1 << 20, 999], ids=["in one", "in chunks"])
def test_every_number_has_the_bits_of_torch(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "CHUNK_VALUES", chunk)
    for data, dtype in ((EVERY_F32, "F32"), (EVERY_F16, "F16")):
        ours, theirs = converted(data, dtype, "bf16"), torch.from_numpy(data).to(torch.bfloat16)
        is_number = ~np.isnan(data)
        assert (ours == theirs.view(torch.uint16).numpy())[is_number].all()
        assert torch.from_numpy(ours[~is_number]).view(torch.bfloat16).isnan().all()
    wide = converted(EVERY_BF16.reshape(256, 256), "BF16", "f32")
    assert wide.shape == (256, 256)
    assert (wide.reshape(-1).view(np.uint32) == EVERY_BF16.astype(np.uint32) << 16).all()
    assert np.array_equal(converted(EVERY_F16, "F16", "f32"), EVERY_F16.astype(np.float32), equal_nan=True)


def test_rows_that_are_not_adjacent_are_converted_too() -> None:
    data = np.arange(24, dtype=np.float32).reshape(4, 6).T
    assert converted(data, "F32", "bf16").tolist() == torch.from_numpy(data).bfloat16().view(torch.uint16).tolist()
