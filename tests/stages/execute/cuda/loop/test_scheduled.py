"""The scheduler and a GPU runner together, with steps in flight; kernels are interpreted.

An exact function replaces the model, as in tests/fakes.py: its KV blocks store the ids, and the next id is a hash of
the ids that are read back through the row's blocks. So the tests check rows, blocks and copies on both sides.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.kernels.triton.rows import Field, StepArrays
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.execute.cuda.runner import CudaRunner
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import EMPTY
from tests.fakes import next_id as hash_of
from tests.rig import raw
from tests.stages.execute.checkpoints import VOCAB_SIZE
from tests.stages.execute.cuda.conftest import on_device
from tests.stages.execute.driver import take
from tests.stages.schedule.bench import Bench

BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4
FIRST_ID = 3
"""Smaller ids are the model's end tokens."""


def next_id(ids: list[int]) -> int:
    return FIRST_ID + hash_of(ids, 0, 0) % (VOCAB_SIZE - FIRST_ID)


def outputs(prompt: list[int], options: m.GenerationOptions, max_tokens: int) -> tuple[list[int], Finish]:
    """The outputs that a sequence must generate."""
    ids = list(prompt)
    while len(ids) < len(prompt) + max_tokens:
        ids.append(next_id(ids))
        if ids[-1] in options.stop_token_ids:
            return ids[len(prompt) :], Finish.STOP
    return ids[len(prompt) :], Finish.LENGTH


class ExactModel:
    """Replaces `DeviceModel.forward`."""

    def __init__(self, runner: CudaRunner) -> None:
        self._rows, self._logits = runner._device_rows.on_device, runner.model.logits
        self._kv = runner.kv[0, 0, :, 0, :, 0]
        self._kv.fill_(EMPTY)

    def forward(self, step: StepArrays, *, decodes: bool) -> None:
        slots, kv = step.slots.numpy(), self._kv
        written = slots[slots >= 0]
        assert len(set(written.tolist())) == len(written), "a slot is written twice"
        for index in np.flatnonzero(slots >= 0).tolist():
            kv[int(slots[index]) // 16, int(slots[index]) % 16] = float(step.ids[index])
        logits = self._logits[: step.num_samples].zero_()
        for i, row in enumerate(step.sample_rows.tolist()):
            if self._rows.params[row, Field.ENDED]:
                continue
            num = int(step.positions[int(step.sampled[i])]) + 1
            ids = kv[self._rows.blocks[row, : -(-num // 16)].long()].reshape(-1)[:num].int().tolist()
            assert EMPTY not in ids, f"row {row} reads KV that was not written"
            logits[i, next_id(ids)] = 1e4


class ExactMasks:
    """Replaces `Masks`: a mask allows only the right id, computed from the ids that the host knows."""

    def __init__(self, runner: CudaRunner) -> None:
        self.words = np.zeros_like(runner.masks.words)
        self._rows: set[int] = set()

    def add(self, row: int, options: m.GenerationOptions, num_prompt: int) -> None:
        self._rows.add(row)

    def drop(self, rows: Any) -> None:
        self._rows -= set(rows.tolist())

    def request(self, rows: Any, ids: Any, num_ids: Any, num_drafts: Any = None) -> Any:
        indices = [index for index, row in enumerate(rows.tolist()) if row in self._rows]
        for index in indices:
            row = rows[index]
            token = next_id(ids[row, : num_ids[row]].tolist())
            self.words[index] = 0
            self.words[index, token // 32] = 1 << token % 32
        return np.array(indices, np.int64)

    def is_done(self) -> bool:
        return True

    def take_failed(self) -> dict[int, str]:
        return {}


class CudaBench(Bench):
    """Launches steps when they are planned, and collects them when they are answered."""

    def __init__(self, runner: CudaRunner, limits: SchedulerConfig, depth: int) -> None:
        super().__init__(limits, depth)
        self._runner = runner
        self._published: list[tuple[int, Any]] = []
        runner.publish = lambda launched_step, sampled: self._published.append((launched_step.step_id, sampled))

    def fill(self) -> None:
        num = len(self.steps)
        super().fill()
        for step in list(self.steps)[num:]:
            self._runner.launch(step, take)

    def answer(self) -> None:
        self.tables.popleft()
        planned = self.steps.popleft()
        if not self._published:
            self._runner.collect()
        step_id, made = self._published.pop(0)
        assert step_id == planned.step_id
        rows, generations, ids, finishes = (
            part.tobytes() for part in (made.rows, made.generations, made.ids, made.finishes)
        )
        errors = list(made.errors)
        result = m.StepResult(1, step_id, rows, generations, ids, finishes, 0.01, 0.0, errors=errors)
        self.scheduler.settle(result)

    def begin(self, prompt: list[int], options: m.GenerationOptions, max_tokens: int, n: int = 1) -> int:
        number = next(self._ids)
        options = msgspec.structs.replace(options, n=n, max_tokens=max_tokens)
        message = m.Admit(
            request_id=number,
            attempt=1,
            gateway=0,
            arrival_s=float(number),
            prompt_ids=np.array(prompt, np.int32).tobytes(),
            options=raw(options),
        )
        for opening in self.scheduler.admit(message):
            assert isinstance(opening, m.Open)
            self.opened[opening.seq], self.received[opening.seq] = opening, []
            self.token_outputs[opening.seq] = self.prompts[opening.seq] = b""
            self.admitted[opening.seq] = message, options
        return number

    def check_outputs(self) -> None:
        for seq, finish in self.finished.items():
            message, options = self.admitted[seq]
            prompt = np.frombuffer(message.prompt_ids, np.int32).tolist()  # type: ignore[arg-type]
            assert options.max_tokens is not None
            ids, natural = outputs(prompt, options, options.max_tokens)
            if finish == Finish.ABORT:
                assert self.received[seq] == ids[: len(self.received[seq])]
            else:
                assert (self.received[seq], finish) == (ids, natural)


@pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")  # numpy, in the interpreter
def test_rows_start_and_end_while_steps_are_in_flight(slight_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps in flight: parallel samples that fork, a stop id, an abort, a grammar, and too few blocks."""
    config = on_device(kv_bytes=5 * BLOCK_BYTES, max_num_seqs=4, tokens=64, swap_bytes=12 * BLOCK_BYTES)
    runner = CudaRunner(config, slight_dir, memoryview(bytearray(12 * BLOCK_BYTES)))
    monkeypatch.setattr(runner.model, "forward", ExactModel(runner).forward)
    masks = ExactMasks(runner)
    monkeypatch.setattr(runner, "masks", masks)
    monkeypatch.setattr(runner._changes, "_masks", masks)
    assert (runner.facts.num_blocks, runner.facts.num_swap_blocks) == (5, 12)
    bench = CudaBench(runner, SchedulerConfig(5, 80, 4, 64, num_swap_blocks=12, preemption="swap"), depth=3)
    plain = m.GenerationOptions(temperature=0.0, ignore_eos=True)
    shared = list(range(20, 38))
    stop = outputs(shared, plain, 9)[0][-1]
    for begin in (100, 130):
        bench.begin(list(range(begin, begin + 28)), plain, 8)
    aborted = bench.begin(list(range(200, 211)), plain, 30)
    bench.begin(shared, m.GenerationOptions(temperature=0.0, ignore_eos=True, stop_token_ids=[stop]), 30, n=2)
    bench.begin(list(range(240, 250)), m.GenerationOptions(temperature=0.0, compiled_grammar="g", ignore_eos=True), 5)
    bench.fill()
    for i in range(200):
        if i == 12:
            bench.abort(aborted)
        if not bench.steps:
            break
        bench.answer()
        bench.check()
        bench.fill()
        bench.report()
    bench.report()
    bench.check_outputs()
    finishes = list(bench.finished.values())
    assert (finishes.count(Finish.STOP), finishes.count(Finish.LENGTH), finishes.count(Finish.ABORT)) == (2, 3, 1)
    load = bench.scheduler.load()
    assert load.num_preemptions > 0 and load.num_blocks_swapped_in > 0
    assert not runner.launched_steps and not runner.pool._pooled and not runner.failed
