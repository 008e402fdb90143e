"""A profile of a step and its definitions."""

import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from pipeline.cli.json_output import as_json
from pipeline.cli.profile.results import Case, MachineRates, Profile, ProfilePlan
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu import peaks as peak_rates
from pipeline.kernels.cpu.compiler import BuildError
from pipeline.kernels.cpu.isa import available
from pipeline.kernels.cpu.peaks import Peaks
from pipeline.kernels.step_inputs import BLOCK_SIZE, StepInputs
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.measuring import measure as module
from pipeline.stages.execute.cpu.measuring.measure import CpuSamples, fill, floor_s, measure, overlapped_s, summarize
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.measuring import profile as entry
from pipeline.stages.execute.measuring.random_weights import RandomWeights
from pipeline.stages.execute.weights import FLOAT_FORMATS, Weights
from tests.stages.execute import checkpoints, recurrent_models
from tests.stages.execute.driver import settings

PLAN = ProfilePlan(batches=(1, 3), context=40, prefills=(20,), rounds=2, verifies=(5,))
BEFORE = MachineRates(read_bytes=20e9, float32_flops=100e9, bf16_flops=90e9, int8_ops=300e9)
AFTER = MachineRates(read_bytes=30e9, float32_flops=80e9, bf16_flops=95e9, int8_ops=280e9)
BEST = MachineRates(read_bytes=30e9, float32_flops=100e9, bf16_flops=95e9, int8_ops=300e9)
SMALL = checkpoints.config_of(hidden_size=64, intermediate_size=96, head_dim=32, num_heads=4, weight_files=[])


@pytest.fixture(autouse=True, scope="module")
def given_rates() -> Iterator[None]:
    """Fixed rates, and one step per round: these tests do not depend on this machine's speed."""
    given = itertools.cycle([BEFORE, AFTER])

    def peaks(isa: Any, num_threads: int, *_: Any, **__: Any) -> Peaks:
        return Peaks(isa, num_threads, *msgspec.structs.astuple(next(given)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peak_rates, "measure", peaks)
        patch.setattr(module, "VISIT_S", 0.0)
        yield


def tiny(folder: Path, plan: ProfilePlan = PLAN, config: Settings | None = None) -> Profile:
    model = ModelConfig.load(folder)
    chosen = config or settings(dtype="bfloat16", kv_mib=1)
    return measure(chosen, model, Weights(folder, model, FLOAT_FORMATS[chosen.execute.dtype]), plan, num_threads=1)


@pytest.fixture(scope="module")
def profile(tiny_dir: Path) -> Profile:
    return tiny(tiny_dir, msgspec.structs.replace(PLAN, against="torch"))


def test_every_op_of_the_program_appears_under_its_name(profile: Profile) -> None:
    for step in profile.steps:
        assert {op.name: op.count for op in step.ops} == {
            "attention_plan": 1,
            "embed": 1,
            "norm": 7,
            "qkv": 3,
            "attention": 3,
            "linear_add": 6,
            "swiglu": 3,
            "head": 1,
            "wait_for_masks": 1,
            "sample": 1,
        }
        assert not any(op.is_integer for op in step.ops)


def test_a_model_with_states_has_a_slot_for_each_sequence(tmp_path: Path) -> None:
    folder, _ = recurrent_models.write(tmp_path, recurrent_models.VARIANTS["qwen3_5"])
    for step in tiny(folder, msgspec.structs.replace(PLAN, verifies=())).steps:
        delta = {op.name: op for op in step.ops if op.name.startswith("delta")}
        assert [op.count for op in delta.values()] == [3, 3, 3]
        assert delta["delta_rule"].bytes > 3 * 2 * 4 * step.case.num_seqs * 4 * 16 * 32, (
            "it reads and writes each state"
        )


def test_cases_are_reported_in_the_order_of_the_plan(profile: Profile) -> None:
    cases = [Case("decode", 1, 1, 40), Case("decode", 3, 1, 40), Case("verify", 1, 6, 40), Case("verify", 3, 6, 40)]
    cases.append(Case("prefill", 1, 20, 20))
    assert [step.case for step in profile.steps] == cases
    assert [step.num_samples for step in profile.steps] == [PLAN.rounds] * 5


def test_rates_and_shares_follow_their_definitions(profile: Profile) -> None:
    for step in profile.steps:
        assert step.ms > 0
        assert step.tokens_per_s == pytest.approx(step.case.num_tokens / step.ms * 1e3)
        for op in step.ops:
            assert op.ms > 0
            assert op.gb_per_s == pytest.approx(op.bytes / op.ms / 1e6)
            assert op.gflop_per_s == pytest.approx(op.operations / op.ms / 1e6)
            assert (op.floor is None) == (op.bytes == op.operations == 0)
        floors = [(op.floor, op.ms) for op in step.ops] + [(step.in_turn, step.ms), (step.overlapped, step.ms)]
        for floor, ms in floors:
            assert floor is None or (floor.ms > 0 and floor.share == pytest.approx(floor.ms / ms))


def test_the_two_floors_of_a_step_come_from_its_ops(profile: Profile) -> None:
    for step in profile.steps:
        assert step.in_turn is not None
        assert step.overlapped is not None and BEST.int8_ops is not None
        assert step.in_turn.ms == pytest.approx(sum(op.floor.ms for op in step.ops if op.floor))
        num_bytes, operations = sum(op.bytes for op in step.ops), sum(op.operations for op in step.ops)
        expected_s = max(num_bytes / BEST.read_bytes, operations / BEST.bf16_flops)
        assert step.overlapped.ms == pytest.approx(expected_s * 1e3)
        assert step.overlapped.ms <= step.in_turn.ms * (1 + 1e-9)


def test_the_floor_counts_the_matrices_of_the_model(profile: Profile) -> None:
    config = checkpoints.config_of()
    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer = hidden * (2 * width + 2 * kv_width) + 3 * hidden * inner
    table = config.vocab_size * hidden
    assert profile.weight_bytes == {"bf16": 2 * (config.num_layers * layer + 2 * table)}
    (swiglu,) = (op for op in profile.steps[1].ops if op.name == "swiglu")
    assert swiglu.operations == 3 * 2 * 3 * hidden * 2 * inner  # layers, multiply and add, sequences
    (attention,) = (op for op in profile.steps[1].ops if op.name == "attention")
    assert attention.operations == 3 * 4 * 3 * 40 * width  # layers, two products, sequences, context


def test_other_kernels_are_timed_in_the_same_rounds(profile: Profile) -> None:
    assert profile.against is not None
    assert "torch" in profile.against
    for step in profile.steps:
        assert step.against_ms is not None
        assert step.against_ms > 0
        assert step.speedup == pytest.approx(step.against_ms / step.ms)


def test_both_measurements_of_the_machine_are_kept(profile: Profile) -> None:
    assert (profile.before, profile.after) == (BEFORE, AFTER)
    assert BEFORE.best(AFTER) == BEST
    assert profile.kernels == f"cpu, {available()[0]}"
    assert profile.cpu


def test_json_holds_everything(profile: Profile) -> None:
    assert msgspec.json.decode(as_json(profile), type=Profile) == profile


@pytest.mark.parametrize(("kernels", "dtype"), [("torch", "bfloat16"), ("auto", "float32")])
def test_torch_is_timed_as_a_whole(tiny_dir: Path, kernels: str, dtype: str) -> None:
    found = tiny(tiny_dir, PLAN, settings(dtype=dtype, kernels=kernels, kv_mib=1))
    assert (found.before, found.after, found.against) == (None, None, None)
    for step in found.steps:
        assert step.ms > 0
        assert (step.ops, step.in_turn, step.overlapped, step.speedup) == ([], None, None, None)


@pytest.mark.parametrize("quantization", ["q8_0", "q4_1"])
def test_quantized_ops_are_distinguished_from_float_ops(quantization: Any) -> None:
    weights = RandomWeights(SMALL, torch.bfloat16, quantization)
    found = measure(settings(dtype="bfloat16", kv_mib=1), SMALL, weights, PLAN, num_threads=1)
    assert set(found.weight_bytes) == {"q8_0", quantization}
    for step in found.steps:
        kinds = {op.name: op.is_integer for op in step.ops}
        assert [name for name, is_integer in kinds.items() if is_integer] == ["qkv", "linear_add", "swiglu", "head"]
        assert "quantize" in kinds
        assert step.overlapped is not None and BEST.int8_ops is not None
        products = sum(op.operations for op in step.ops if op.is_integer) / BEST.int8_ops
        attention = sum(op.operations for op in step.ops if not op.is_integer) / BEST.bf16_flops
        moved = sum(op.bytes for op in step.ops) / BEST.read_bytes
        assert step.overlapped.ms == pytest.approx(max(products + attention, moved) * 1e3)


def test_a_floor_is_the_maximum_of_memory_and_compute_time() -> None:
    rates = MachineRates(read_bytes=10.0, float32_flops=1.0, bf16_flops=100.0, int8_ops=1000.0)
    moving, computing, coding = (20.0, 100.0, False), (10.0, 300.0, False), (10.0, 6000.0, True)
    assert [floor_s(cost, rates) for cost in (moving, computing, coding)] == [2.0, 3.0, 6.0]
    assert overlapped_s([moving, computing, coding], rates) == 1.0 + 3.0 + 6.0
    assert overlapped_s([moving, moving], rates) == 4.0


def test_each_value_is_the_median_of_its_samples() -> None:
    samples = CpuSamples(
        op_names=["norm", "qkv", "norm", "qkv"],
        op_costs=[(10.0, 0.0, False), (50.0, 100.0, False), (10.0, 0.0, False), (50.0, 100.0, True)],
        steps_s=[9.0, 1.0, 2.0],
        ops_s=[[0.1, 0.2, 0.3, 0.5], [0.2, 0.3, 0.4, 0.6], [9.0, 9.0, 0.0, 9.0]],
        against_s=[8.0, 4.0, 3.0],
    )
    rates = MachineRates(read_bytes=100.0, float32_flops=1.0, bf16_flops=100.0, int8_ops=1000.0)
    step = summarize(Case("decode", 4, 1, 256), samples, rates)
    assert (step.ms, step.num_samples, step.tokens_per_s) == (2000.0, 3, 2.0)
    assert (step.against_ms, step.speedup) == (4000.0, 2.0)
    assert [(op.name, op.is_integer, op.count) for op in step.ops] == [
        ("norm", False, 2),
        ("qkv", False, 1),
        ("qkv", True, 1),
    ]
    # In each step the ops of a name are summed first: 0.4, 0.6 and 9.0.
    assert [op.ms for op in step.ops] == pytest.approx([600.0, 300.0, 600.0])
    assert [op.floor and op.floor.ms for op in step.ops] == pytest.approx([200.0, 1000.0, 500.0])


def test_each_sequence_of_a_step_has_its_own_blocks() -> None:
    inputs = StepInputs(max_num_tokens=64, max_num_rows=3, max_num_blocks=4)
    blocks, ids = np.arange(11, -1, -1, dtype=np.int32), np.arange(64, dtype=np.int32)
    fill(inputs, Case("decode", 3, 1, 50), ids, blocks)
    assert (inputs.num_tokens, inputs.num_rows, inputs.num_samples) == (3, 3, 3)
    assert inputs.positions[:3].tolist() == [49] * 3
    assert inputs.block_tables.reshape(-1).tolist() == list(range(11, -1, -1))
    assert inputs.slots[:3].tolist() == [block * BLOCK_SIZE + 1 for block in (8, 4, 0)]
    fill(inputs, Case("prefill", 1, 20, 20), ids, blocks)
    assert (inputs.num_tokens, inputs.num_rows, inputs.num_samples) == (20, 1, 1)
    assert inputs.positions[:20].tolist() == list(range(20))
    assert inputs.sampled[0] == 19
    verifying = StepInputs(max_num_tokens=12, max_num_rows=3, max_num_blocks=4, max_num_samples=12)
    fill(verifying, Case("verify", 3, 4, 50), ids, blocks)
    assert (verifying.num_tokens, verifying.num_samples) == (12, 12)
    assert verifying.sampled[:12].tolist() == list(range(12))
    assert verifying.positions[:8].tolist() == [46, 47, 48, 49] * 2


@pytest.mark.parametrize("changes", [{"context": 257}, {"prefills": (20, 300)}])
def test_steps_beyond_the_models_length_are_rejected(tiny_dir: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="have at most 256 tokens"):
        tiny(tiny_dir, msgspec.structs.replace(PLAN, **changes))


def test_steps_beyond_the_memory_are_rejected(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    with pytest.raises(UserError, match=r"only 1000 bytes of memory are free: lower --batch, --context or --prefill"):
        tiny(tiny_dir)


@pytest.mark.parametrize("error", [BuildError("no compiler"), OSError("no threads")])
def test_a_machine_that_cannot_be_measured_is_a_clear_error(
    tiny_dir: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Peaks:
        raise error

    monkeypatch.setattr(peak_rates, "measure", fail)
    with pytest.raises(UserError, match=f"cannot measure this machine: {error}"):
        tiny(tiny_dir)


def test_progress_is_a_line_for_each_phase(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "pipeline"):
        tiny(tiny_dir)
    messages = " | ".join(caplog.messages)
    for phase in ("loading tiny", "measuring this machine", "warmed up", "round 1 of 2", "round 2 of 2"):
        assert phase in messages


@pytest.mark.parametrize(
    ("quantization", "dtype", "format", "table"),
    [
        ("auto", torch.bfloat16, "bf16", "bf16"),
        ("none", torch.float32, "f32", "f32"),
        ("q8_0", torch.bfloat16, "q8_0", "q8_0"),
        ("q4_1", torch.bfloat16, "q4_1", "q8_0"),
    ],
)
def test_random_weights_have_the_format_and_standard_deviation_of_real_ones(
    quantization: Any, dtype: torch.dtype, format: str, table: str
) -> None:
    weights = RandomWeights(SMALL, dtype, quantization)
    assert weights.matrix("model.embed_tokens.weight", 50, 64).format == table
    matrix = weights.matrix("model.layers.0.mlp.down_proj.weight", 400, 256)
    assert matrix.format == format
    numbers = matrix.dequantize(torch.float32)
    # A power of two is at most half an octave away from the target.
    assert float(numbers.std()) * 16 == pytest.approx(1.0, rel=0.42 if format in ("bf16", "f32") else 0.03)
    assert abs(float(numbers.mean())) * 16 < 0.02
    assert len(numbers.unique()) > 10
    if format == "q8_0":
        assert int(matrix.codes().min()) > -128
    # Matrices without whole groups stay floats, as in prepare.
    assert weights.matrix("a", 3, 50).format == ("f32" if dtype is torch.float32 else "bf16")


def test_random_weights_have_finite_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SMALL.save(tmp_path)
    for quantization in ("none", "q8_0", "q4_1"):
        weights = RandomWeights(SMALL, torch.bfloat16, quantization)
        monkeypatch.setattr("pipeline.stages.execute.cpu.runner.Weights", lambda *_, made=weights, **__: made)
        runner = CpuRunner(settings(dtype="bfloat16", kv_mib=1), tmp_path)
        runner.program.keep_logits()
        fill(runner.inputs, Case("prefill", 1, 30, 30), np.arange(30, dtype=np.int32), np.arange(2, dtype=np.int32))
        runner.program.run()
        logits = runner.program.logits().copy()
        runner.close()
        assert np.isfinite(logits).all()
        assert 0.1 < float(logits.std()) < 10


def test_a_shape_needs_no_model_and_is_measured_with_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare() -> Path:
        raise AssertionError("nothing is to be prepared")

    monkeypatch.setitem(SHAPES, "small", SMALL)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    num_threads = torch.get_num_threads()
    try:
        plan = msgspec.structs.replace(PLAN, shape="small", rounds=1, layers=2)
        found = entry.profile(settings(dtype="bfloat16", threads=2), plan, prepare)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(num_threads)
    assert (found.num_threads, found.weight_bytes.keys()) == (2, {"bf16"})
    assert {op.name: op.count for op in found.steps[0].ops}["attention"] == 2


def test_the_profiled_model_comes_from_prepare(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")
    num_threads = torch.get_num_threads()
    try:
        found = entry.profile(settings(dtype="bfloat16"), PLAN, lambda: tiny_dir)
    finally:
        torch.set_num_threads(num_threads)
    assert found.model == "tiny"


def test_the_shapes_have_the_number_of_weights_in_their_names() -> None:
    sizes = {}
    for name, config in SHAPES.items():
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        inner = (3 if config.gated else 2) * config.intermediate_size
        if (experts := config.experts) is not None:
            inner = experts.num * 3 * experts.intermediate_size
        layer = config.hidden_size * (2 * width + 2 * kv_width + inner)
        tables = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
        sizes[name] = round((config.num_layers * layer + tables) / 1e6)
    assert sizes == {
        "smollm2-135m": 134,
        "qwen2-0.5b": 494,
        "qwen3-0.6b": 596,
        "gemma3-1b": 1000,
        "phi4-mini": 3836,
        "smollm3-3b": 3075,
        "olmo2-1b": 1485,
        "granite3-2b": 2533,
        "pythia-1b": 1011,
        "moe-3b-a0.6b": 3278,
        "command-r7b": 8028,
        "llama-1b": 1236,
        "gemma2-2b": 2614,
        "glm4-9b": 9399,
        "falcon-7b": 6921,
        "gpt2-xl": 1555,
        "opt-1.3b": 1311,
        "mpt-7b": 6649,
        "bloom-1b": 1065,
        "phi-2": 2779,
        "stablelm-3b": 2795,
        "starcoder2-3b": 3029,
        "olmoe-7b-a1b": 6917,
        "qwen3-30b-a3b": 30519,
        "gpt-oss-20b": 20906,
    }
