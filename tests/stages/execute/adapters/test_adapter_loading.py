"""The executor loads LoRA adapters beside its steps: other rows go on meanwhile."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.cli.replay.replaying import replay
from pipeline.config.settings import LoraSettings
from pipeline.lora.convert import convert
from pipeline.replay.compare import compare
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.pytorch.lora import TorchLora
from tests.lora.random_adapters import write_adapter
from tests.rig import Rig
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import GREEDY, make_step, row_add, settings

PROMPT = [5, 9, 200, 31, 7]
SCHEDULE = "schedule.0"
WAIT_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    checkpoints.write(tmp_path, checkpoints.config_of())
    return tmp_path


def adapter(folder: Path, seed: int) -> str:
    made = write_adapter(folder / f"peft{seed}", checkpoints.config_of(), seed=seed, rank=4)
    return convert(made, folder, "f32", 16)


def begin(rig: Rig) -> None:
    ready = rig.receive("supervisor", m.Ready)
    rig.send(m.Start(ready.facts))


def compute(rig: Rig, step: m.Step) -> int:
    """The id that a step of one row samples."""
    rig.send(step, SCHEDULE)
    return int(np.frombuffer(rig.bytes_of(rig.receive("schedule", m.StepResult).ids), np.int32)[0])


def test_other_rows_go_on_while_an_adapter_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one slot, another adapter is in it, and the thread that packs the new one stands still. The replay of
    all that sends the same."""
    first, second = adapter(folder, 1), adapter(folder, 2)
    may_pack, is_packing, packing_threads = threading.Event(), threading.Event(), []
    pack = TorchLora.pack

    def packing(self: TorchLora, file: Any) -> Any:
        packing_threads.append(threading.current_thread())
        is_packing.set()
        assert may_pack.wait(WAIT_S)
        return pack(self, file)

    monkeypatch.setattr(TorchLora, "pack", packing)
    one_slot = msgspec.structs.replace(
        settings(), lora=LoraSettings(runtime_loading=True, max_loras=1, max_cpu_loras=1, max_lora_rank=16)
    )
    recording, out = tmp_path / "execute.rec", tmp_path / "out.rec"
    options = {one: msgspec.structs.replace(GREEDY, adapter_id=one) for one in (first, second)}
    found = []
    with Rig("execute", one_slot, folder, record=recording) as rig:
        begin(rig)
        may_pack.set()
        rig.send(m.UseAdapters(1, 1, [first]), SCHEDULE)
        while (answer := rig.receive("schedule", m.AdaptersLoaded)).adapter_ids != [first]:
            assert answer == m.AdaptersLoaded(1, 1, [])
        found.append(
            compute(rig, make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3], options[first])], step_id=1))
        )
        may_pack.clear()
        is_packing.clear()
        rig.send(m.UseAdapters(1, 2, [first, second]), SCHEDULE)
        assert rig.receive("schedule", m.AdaptersLoaded) == m.AdaptersLoaded(1, 2, [first])
        assert is_packing.wait(WAIT_S)
        found += [compute(rig, make_step([(0, 3 + step, 1, True)], step_id=step)) for step in range(2, 6)]
        may_pack.set()
        assert rig.receive("schedule", m.AdaptersLoaded) == m.AdaptersLoaded(1, 2, [first, second])
        num_packed = len(packing_threads)
        add = row_add(1, PROMPT, [4], options[second])
        found.append(compute(rig, make_step([(1, 0, 5, True)], adds=[add], drops=[0], step_id=6)))
        assert len(found) == 6 and min(found) >= 0
        assert len(packing_threads) == num_packed == 2, "no step has read an adapter"
        assert all(thread.name.startswith("adapters") for thread in packing_threads)
    replay("execute", recording, out, paced=False, inline=True)
    compared = compare(out, recording)
    assert compared.difference == "" and compared.num_same >= 6 + 3


def test_an_adapter_that_cannot_be_loaded_is_reported_and_fails_its_row(folder: Path) -> None:
    lora = LoraSettings(runtime_loading=True, max_loras=2, max_lora_rank=16)
    missing = "0" * 32
    with Rig("execute", msgspec.structs.replace(settings(), lora=lora), folder) as rig:
        begin(rig)
        rig.send(m.UseAdapters(1, 1, [missing]), SCHEDULE)
        while rig.receive("schedule", m.AdaptersLoaded).adapter_ids != [missing]:
            pass
        options = msgspec.structs.replace(GREEDY, adapter_id=missing)
        rig.send(make_step([(0, 0, 5, True)], adds=[row_add(0, PROMPT, [3], options)], step_id=1), SCHEDULE)
        (error,) = rig.receive("schedule", m.StepResult).errors
        assert error.startswith(m.ADAPTER_FAILED)
