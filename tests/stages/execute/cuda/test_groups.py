"""KV groups on a GPU: rows have a block table for each group, and a step slots for each. Kernels are interpreted."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import Settings
from pipeline.kernels.triton.rows import Field, StepArrays
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import EMPTY, MAX_GROUPS
from tests.stages.execute import checkpoints
from tests.stages.execute.cuda.conftest import on_cpu, on_device
from tests.stages.execute.cuda.loop.test_scheduled import CudaBench, next_id, outputs
from tests.stages.execute.pair import Pair, Request

WINDOW = 21
GROUPS = [KVGroup(0, 1), KVGroup(WINDOW, 1), KVGroup(WINDOW, 1)]
LAYER_BYTES = 2 * 2 * 16 * 16 * 4
"""Of a block."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a window in two of three layers."""
    folder = tmp_path_factory.mktemp("windows")
    changes = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "max_position": 160}
    windows = {"architecture": "qwen2", "qkv_bias": True, "sliding_window": WINDOW, "sliding_layers": [0, 2]}
    checkpoints.write(folder, checkpoints.config_of(**changes, **windows, tie_embeddings=True))
    return folder


class ExactGroups:
    """Replaces `DeviceModel.forward`: stores ids in the blocks of each group, and reads those in its window."""

    def __init__(self, runner: CudaRunner) -> None:
        self._rows, self._logits = runner._device_rows.on_device, runner.model.logits
        self._kv = runner.kv[0, 0, :, 0, :, 0]
        self._kv.fill_(EMPTY)

    def forward(self, step: StepArrays, *, decodes: bool) -> None:
        for group in range(len(GROUPS)):
            slots = step.of_group(group).slots.numpy()
            for index in np.flatnonzero(slots >= 0).tolist():
                self._kv[int(slots[index]) // 16, int(slots[index]) % 16] = float(step.ids[index] * MAX_GROUPS + group)
        logits = self._logits[: step.num_samples].zero_()
        for i, row in enumerate(step.sample_rows.tolist()):
            if self._rows.params[row, Field.ENDED]:
                continue
            num = int(step.positions[int(step.sampled[i])]) + 1
            full, *others = (self._read(step, group, row, num) for group in range(len(GROUPS)))
            for ids in others:
                assert ids == full[-len(ids) :], f"row {row} has other ids in its window"
            logits[i, next_id(full)] = 1e4

    def _read(self, step: StepArrays, group: int, row: int, num: int) -> list[int]:
        first = max(0, num - WINDOW) if GROUPS[group].window else 0
        blocks = step.of_group(group).blocks[row, first // 16 : -(-num // 16)].long()
        stored = self._kv[blocks].reshape(-1)[first % 16 :][: num - first].int().tolist()
        assert EMPTY not in stored and all(one % MAX_GROUPS == group for one in stored)
        return [one // MAX_GROUPS for one in stored]


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter
def test_each_group_has_its_blocks_while_steps_are_in_flight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = on_device(kv_bytes=18 * LAYER_BYTES, max_num_seqs=4, tokens=32, swap_bytes=60 * LAYER_BYTES)
    runner = CudaRunner(config, folder, memoryview(bytearray(60 * LAYER_BYTES)))
    monkeypatch.setattr(runner.model, "forward", ExactGroups(runner).forward)
    assert (runner.facts.num_blocks, runner.facts.num_swap_blocks, runner.facts.kv_groups) == (18, 60, GROUPS)
    limits = SchedulerConfig(18, 160, 4, 32, num_swap_blocks=60, preemption="swap", kv_groups=tuple(GROUPS))
    bench = CudaBench(runner, limits, depth=3)
    plain = m.GenerationOptions(temperature=0.0, ignore_eos=True)
    bench.begin(list(range(100, 160)), plain, 40)
    bench.begin(list(range(130, 158)), plain, 12)
    bench.begin(list(range(20, 38)), plain, 30, n=2)
    bench.fill()
    for _ in range(300):
        if not bench.steps:
            break
        bench.answer()
        bench.check()
        bench.fill()
        bench.report()
    bench.report()
    bench.check_outputs()
    assert list(bench.finished.values()) == [Finish.LENGTH] * 4
    load = bench.scheduler.load()
    assert load.num_forks > 0 and load.num_preemptions > 0 and load.num_blocks_swapped_in > 0
    assert outputs([5], plain, 2) != outputs([6], plain, 2)


def test_texts_are_those_of_torch_without_groups(folder: Path) -> None:
    config = on_device(max_num_seqs=2, tokens=32)
    shared = tuple(range(20, 60))
    requests = [Request((*shared, 7), 5), Request((*shared, 8, 9), 3, at_step=9)]
    runner = CudaRunner(config, folder)
    pair = Pair(runner, max_num_seqs=2, max_num_batched_tokens=32)  # type: ignore[arg-type]
    texts = pair.run(requests)
    assert pair.scheduler.load().num_cached_tokens == 32
    runner.close()
    cpu = on_cpu(config)
    whole: Settings = msgspec.structs.replace(
        cpu, execute=msgspec.structs.replace(cpu.execute, hybrid_kv_cache_manager=False)
    )
    assert Pair(CpuRunner(whole, folder), max_num_seqs=2, max_num_batched_tokens=32).run(requests) == texts
