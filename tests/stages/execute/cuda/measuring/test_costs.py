"""The minimum work of a GPU step, and the report of a measured one."""

from typing import Any

import pytest
import torch

from pipeline.cli.profile.results import Case, MachineRates
from pipeline.kernels.triton.attention import decode, prefill
from pipeline.kernels.triton.gemm import dequantize, skinny, vector
from pipeline.stages.execute.cuda.measuring.costs import Cost, GpuSamples, costs_of, op_of, summarize
from pipeline.stages.execute.cuda.measuring.launches import Launches
from tests.stages.execute import checkpoints

RATES = MachineRates(read_bytes=100.0, float32_flops=10.0, bf16_flops=50.0, int8_ops=None)
LAUNCHED = [
    Launches("skinny_gemm", (8,), 4.0, 6.0),
    Launches("_norm", (2,), 2.0, 2.5),
    Launches("_decode_kernel", (9,), 1.0, 5.0),
    Launches("skinny_gemm", (2,), 1.0, 2.0),
]


class Model:
    """The sizes of a model's matrices, on which costs depend."""

    class Matrix:
        def __init__(self, num_rows: int, num_columns: int, num_bytes: int) -> None:
            self.num_rows, self.num_columns, self.num_bytes = num_rows, num_columns, num_bytes

    def __init__(self) -> None:
        self.matrices = [self.Matrix(10, 20, 100), self.Matrix(5, 4, 10)]
        self.head = self.table = self.Matrix(7, 3, 42)


def costs(case: Case, **changes: Any) -> dict[str, Cost]:
    config = checkpoints.config_of(num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, **changes)
    model: Any = Model()
    return costs_of(case, config, model, torch.bfloat16)


def test_a_step_reads_its_data_once() -> None:
    decode, prefill = costs(Case("decode", 3, 1, 40)), costs(Case("prefill", 1, 5, 5))
    assert decode["products"] == Cost(152, 2 * 3 * (220 + 21))
    assert prefill["products"] == Cost(152, 2 * (5 * 220 + 21))
    assert decode["attention"] == Cost(3 * 2 * 40 * 2 * 32 * 2, 3 * 2 * 40 * 4 * 96)
    assert prefill["attention"] == Cost(2 * 5 * 2 * 32 * 2, 2 * (1 + 2 + 3 + 4 + 5) * 4 * 96)


def test_keys_before_the_window_cost_nothing() -> None:
    window = {"architecture": "qwen2", "qkv_bias": True, "sliding_window": 3, "sliding_layers": [1]}
    decode, prefill = costs(Case("decode", 1, 1, 40), **window), costs(Case("prefill", 1, 5, 5), **window)
    assert decode["attention"] == Cost((40 + 3) * 2 * 32 * 2, (40 + 3) * 4 * 96)
    # All keys are written, whether a later token attends to them or not.
    assert prefill["attention"] == Cost(2 * 5 * 2 * 32 * 2, (15 + 1 + 2 + 3 + 3 + 3) * 4 * 96)


def test_kernels_are_reported_as_parts_of_ops() -> None:
    samples = GpuSamples(steps_ms=[20.0, 10.0, 40.0], launches_ms=[3.0, 1.0, 2.0], launched=LAUNCHED)
    needs = {"products": Cost(0.3, 0.1), "attention": Cost(0.1, 0.2), "rest": Cost()}
    step = summarize(Case("decode", 2, 1, 18), samples, needs, RATES, torch.bfloat16)
    assert (step.ms, step.num_samples, step.launch_ms, step.tokens_per_s) == (20.0, 3, 2.0, pytest.approx(100.0))
    assert [(each.name, each.op, each.count, each.ms) for each in step.kernels] == [
        ("skinny_gemm", "products", 5.0, 0.008),
        ("_decode_kernel", "attention", 1.0, 0.005),
        ("_norm", "rest", 2.0, 0.0025),
    ]
    assert [(op.name, op.count, op.ms) for op in step.ops] == [
        ("products", 5, pytest.approx(0.008)),
        ("attention", 1, pytest.approx(0.005)),
        ("rest", 2, pytest.approx(0.0025)),
    ]
    assert [op.floor and op.floor.ms for op in step.ops] == [pytest.approx(3.0), pytest.approx(4.0), None]
    assert step.in_turn and step.overlapped
    assert (step.in_turn.ms, step.overlapped.ms) == (pytest.approx(7.0), pytest.approx(6.0))
    wide = summarize(Case("decode", 2, 1, 18), samples, needs, RATES, torch.float32)
    assert wide.overlapped and wide.overlapped.ms == pytest.approx(30.0), "float32 is multiplied at its own rate"


def test_a_kernel_is_identified_by_its_name() -> None:
    functions: list[Any] = [vector.gemv, skinny.skinny_gemm, dequantize._dequantize]
    assert {op_of(function.fn.__name__) for function in functions} == {"products"}
    functions = [prefill._attend_kernel, decode._decode_kernel]
    assert {op_of(function.fn.__name__) for function in functions} == {"attention"}
    for library in (
        "nvjet_tst_128x64_64x8_2x1_v_bz_TNT",
        "sm90_xmma_gemm_bf16",
        "void cublasLt::splitKreduce_kernel<32, 16",
    ):
        assert op_of(library) == "products"
    assert {op_of(name) for name in ("_norm", "Memcpy HtoD (Pinned -> Device)", "_plan_kernel")} == {"rest"}
