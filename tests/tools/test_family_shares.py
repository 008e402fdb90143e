"""The share of the floor that a family's layers have."""

from pipeline.cli.profile.results import Case, Floor, OpTime, StepTime
from tools.family_shares import share_of


def op(name: str, ms: float, share: float | None) -> OpTime:
    floor = None if share is None else Floor(ms * share, share)
    return OpTime(name, False, 1, ms, 0.0, 0.0, 0.0, 0.0, floor)


def test_the_share_is_that_of_the_layers_ops_together() -> None:
    ops = [op("embed", 1, 0.1), op("qkv", 2, 0.5), op("linear_add", 6, 0.9), op("head", 50, 1.0), op("sample", 1, None)]
    step = StepTime(Case("decode", 1, 1, 256), 60.0, 3, 16.7, ops, None, None)
    assert share_of(step) == (2 * 0.5 + 6 * 0.9) / 8
