"""The threshold of a row: by count exactly the value that a sort finds, by weight one that keeps just enough."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pipeline.kernels.triton.launch import next_power_of_2
from pipeline.kernels.triton.sampling.threshold import MAX_COLLECTED, STRIP, code_of, search, value_of

INF = float("inf")

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


@triton.jit
def _find(
    out,
    logits,
    tops,
    strips,
    collected,
    target,
    weighted,
    VOCAB: tl.constexpr,
    STRIPS: tl.constexpr,
    PADDED: tl.constexpr,
):
    offsets = tl.arange(0, PADDED)
    values = tl.load(tops + offsets, mask=offsets < STRIPS, other=float("-inf"))
    low = code_of(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    args = (logits, values, strips, collected, low, tl.max(values, 0), 1.0)
    code = search(*args, tl.load(weighted) == 1, tl.load(target), VOCAB, STRIPS)
    tl.store(out, value_of(code))


def found(logits: torch.Tensor, target: float, *, weighted: bool) -> float:
    vocab_size, num_strips = len(logits), math.ceil(len(logits) / STRIP)
    clean = torch.nan_to_num(logits, nan=-INF, posinf=INF, neginf=-INF)
    tops = torch.nn.functional.pad(clean, (0, num_strips * STRIP - vocab_size), value=-INF).view(-1, STRIP).amax(1)
    out, collected = torch.zeros(1), torch.full((MAX_COLLECTED + 1,), 7.5)
    strips = torch.full((num_strips + 1,), -99, dtype=torch.int32)
    numbers = torch.tensor([target]), torch.tensor([int(weighted)], dtype=torch.int32)
    _find[(1,)](
        *(out, logits, tops, strips, collected, *numbers),
        *(vocab_size, num_strips, next_power_of_2(num_strips)),
    )
    assert collected[-1] == 7.5 and strips[-1] == -99
    return float(out[0])


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    num = MAX_COLLECTED + 900
    normal = rng.normal(0, 3, num)
    return {
        "normal": normal,
        "whole numbers": np.round(normal),
        "equal": np.full(num, -3.5),
        "most impossible": np.where(rng.random(num) < 0.99, -INF, normal),
        "of every size": np.sign(normal) * 10.0 ** rng.uniform(-44, 38, num),
        "one huge": np.append(normal[:-1], 3e38),
        "no numbers": np.where(rng.random(num) < 0.5, np.nan, normal),
        "few": normal[:70],
        "one": normal[:1],
        "zeros": rng.choice([0.0, -0.0, 1.0], num),
    }


def check_count(name: str, k: int) -> None:
    logits = torch.from_numpy(rows()[name].astype(np.float32))
    order = logits.nan_to_num(nan=-INF, posinf=INF, neginf=-INF).sort(descending=True).values
    expected = float(order[k - 1]) if k <= len(order) else -INF
    assert found(logits, k, weighted=False) == expected, (name, k)


def check_weight(name: str, share: float) -> None:
    logits = torch.from_numpy(rows()[name].astype(np.float32))
    wide = logits.nan_to_num(nan=-INF).double()
    weights = torch.exp(wide - wide.max())
    target = float(np.float32(share * float(weights.sum())))
    threshold = found(logits, target, weighted=True)
    assert (wide == threshold).any(), (name, share)
    assert float(weights[wide >= threshold].sum()) >= target * (1 - 1e-6), (name, share)
    assert float(weights[wide > threshold].sum()) <= target * (1 + 1e-6), (name, share)


@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("normal", 4500),
        ("whole numbers", 40),
        ("equal", 1),
        ("most impossible", 4500),
        ("of every size", 40),
        ("no numbers", 40),
        ("one", 1),
        ("zeros", 4500),
    ],
)
def test_by_count_the_threshold_is_that_of_a_sort(name: str, k: int) -> None:
    check_count(name, k)


@pytest.mark.parametrize(("name", "share"), [("normal", 0.5), ("equal", 0.99), ("one huge", 0.5), ("few", 1e-9)])
def test_by_weight_the_threshold_keeps_just_enough(name: str, share: float) -> None:
    check_weight(name, share)


if __name__ == "__main__":
    for every in rows():
        for number in (1, 2, 40, 1024, MAX_COLLECTED, MAX_COLLECTED + 1, 4990, 4996, 5000):
            check_count(every, number)
        if every != "of every size":
            for part in (1e-9, 0.05, 0.5, 0.9, 0.99, 0.9999):
                check_weight(every, part)
        print(every)
