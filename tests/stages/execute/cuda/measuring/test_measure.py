"""A profile of GPU steps and its definitions. Kernels are interpreted here."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from pipeline.cli.json_output import as_json
from pipeline.cli.profile.report import as_tables, console
from pipeline.cli.profile.results import Case, Profile, ProfilePlan
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.settings import ExecuteSettings, ScheduleSettings, Settings
from pipeline.errors import UserError
from pipeline.stages.execute.cuda.measuring import measure as module
from pipeline.stages.execute.cuda.measuring.launches import Launches, traced
from pipeline.stages.execute.measuring import profile as entry
from tests.stages.execute import checkpoints
from tests.stages.execute.cuda.measuring.test_costs import LAUNCHED

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter

SLIGHT = checkpoints.config_of(
    name="slight",
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    num_kv_heads=1,
    vocab_size=64,
    intermediate_size=32,
    max_position=48,
    weight_files=[],
    tie_embeddings=True,
)
PLAN = ProfilePlan(batches=(2,), context=18, prefills=(3,), rounds=1, shape="slight")


def settings(kv_mib: int = 1, dtype: Any = "bfloat16") -> Settings:
    return Settings(
        execute=ExecuteSettings(device="cuda", kv_cache_bytes=kv_mib * 1024**2, dtype=dtype, num_threads=1),
        schedule=ScheduleSettings(max_num_seqs=1, max_num_batched_tokens=2),
    )


@pytest.fixture(autouse=True)
def slight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape small enough for the interpreter, and a process whose state is restored."""
    monkeypatch.setitem(SHAPES, "slight", SLIGHT)
    monkeypatch.setattr(module, "DECODE_STEPS", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.setenv(name, "1")


def nowhere() -> Path:
    raise AssertionError("nothing is to be prepared")


def test_a_shape_is_measured(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    traced: list[int] = []

    def fake(run: Any, num_steps: int) -> list[Launches]:
        traced.append(num_steps)
        run()
        return LAUNCHED

    monkeypatch.setattr(module, "traced", fake)
    with caplog.at_level(logging.INFO, "pipeline"):
        found = entry.profile(settings(), PLAN, nowhere)
    assert "mean nothing for a GPU" in caplog.text and "round 1 of 1" in caplog.text
    assert [step.case for step in found.steps] == [Case("decode", 2, 1, 18), Case("prefill", 1, 3, 3)]
    assert [step.num_samples for step in found.steps] == [1, 1]
    assert traced == [2, 1]
    assert (found.gpu, found.kernels, found.model) == ("Triton's interpreter", "triton", "slight")
    hidden, inner = 32, 32
    layer = hidden * (2 * 32 + 2 * 16) + 3 * hidden * inner
    assert found.weight_bytes == {"bf16": 2 * (layer + 64 * hidden)}, "the head is the embedding"
    assert found.before and found.after
    rates = found.before.best(found.after)
    assert rates.int8_ops is None and rates.read_bytes >= max(found.before.read_bytes, found.after.read_bytes)
    for step in found.steps:
        assert step.ms > 0 and step.launch_ms and step.in_turn and step.overlapped
        assert {op.name: op.count for op in step.ops} == {"products": 5, "attention": 1, "rest": 2}
        assert step.in_turn.share == pytest.approx(step.in_turn.ms / step.ms)
        num_bytes, operations = sum(op.bytes for op in step.ops), sum(op.operations for op in step.ops)
        least_s = max(num_bytes / rates.read_bytes, operations / rates.bf16_flops)
        assert step.overlapped.ms == pytest.approx(least_s * 1e3)
        assert step.overlapped.ms <= step.in_turn.ms * (1 + 1e-9)
    assert msgspec.json.decode(as_json(found), type=Profile) == found
    text = as_text(found)
    assert "Triton's interpreter; kernels: triton" in text and "This machine before: copies" in text
    assert "int8" not in text and "    skinny_gemm" in text


def as_text(profile: Profile) -> str:
    screen = console()
    with screen.capture() as captured:
        for part in as_tables(profile):
            screen.print(part, markup=False)
    return captured.get()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context": 48}, "--context 48: the sequences of slight have at most 47 tokens"),
        ({"prefills": (3, 50)}, "--prefill 50: the sequences of slight have at most 47 tokens"),
        ({"batches": (800,)}, "need 1600 KV blocks, but only 1024 fit in memory: lower --batch"),
    ],
)
def test_steps_that_do_not_fit_are_rejected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        entry.profile(settings(), msgspec.structs.replace(PLAN, **changes), nowhere)


def test_without_a_gpu_the_output_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SLIGHT.save(tmp_path)
    monkeypatch.setattr("pipeline.supervisor.gpu.is_interpreted", lambda: False)
    monkeypatch.setattr("torch.version.cuda", None)
    for plan in (PLAN, msgspec.structs.replace(PLAN, shape=None)):
        with pytest.raises(UserError, match=r"execute\.device is 'cuda', but the installed torch"):
            entry.profile(settings(), plan, lambda: tmp_path)


def test_without_a_gpu_a_profiler_sees_no_kernels() -> None:
    assert traced(lambda: torch.zeros(1), 1) == []
