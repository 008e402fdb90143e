"""LoRA adapters in the executor: the same as a model into which the adapter is merged, alone and in any batch."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipeline.config.settings import LoraSettings, Settings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.lora.adapter_file import path_of
from pipeline.lora.convert import convert
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.lora.random_adapters import merge, write_adapter
from tests.stages.execute import checkpoints
from tests.stages.execute.driver import GREEDY, Driver, make_step, row_add, settings, take
from tests.stages.execute.native_driver import ISAS, emulation, random_ids, write
from tests.stages.execute.pair import GREEDY as GREEDY_SEED
from tests.stages.execute.pair import Pair, Request, make_runner

IDS = random_ids(21, 5)
ON = LoraSettings(runtime_loading=True, max_loras=4, max_lora_rank=16)


def with_lora(config: Settings, lora: LoraSettings = ON) -> Settings:
    return msgspec.structs.replace(config, lora=lora)


def options(adapter_id: str) -> m.GenerationOptions:
    return msgspec.structs.replace(GREEDY, adapter_id=adapter_id)


class LoraRows(Driver):
    """Computes the logits after prompts of rows with adapters."""

    def last_logits(self, rows: list[tuple[list[int], str]], chunk: int = 0) -> np.ndarray:
        """The logits after each of these prompts, computed in one batch."""
        self.clear()
        adds = [
            row_add(row, ids, self.take_blocks(len(ids) + 1), options(adapter_id))
            for row, (ids, adapter_id) in enumerate(rows)
        ]
        self._next_row = len(rows)
        longest = max(len(ids) for ids, _ in rows)
        step = chunk or longest
        found: dict[int, np.ndarray] = {}
        for begin in range(0, longest, step):
            entries = []
            for row, (ids, _) in enumerate(rows):
                if (count := min(step, len(ids) - begin)) > 0:
                    entries.append((row, begin, count, begin + count == len(ids)))
            self.step(entries, adds=adds if begin == 0 else [])
            logits = self.logits()
            for index, (row, *_) in enumerate(entry for entry in entries if entry[3]):
                found[row] = logits[index]
        return np.stack([found[row] for row in range(len(rows))])


class LoraDriver(LoraRows):
    """On a CPU."""

    def __init__(self, folder: Path, config: Settings) -> None:
        super().__init__(folder, config)


VARIANTS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention only": {"targets": ("q_proj", "v_proj"), "rank": 8},
    "one of each": {"targets": ("k_proj", "up_proj"), "rank": 3},
    "rsLoRA": {"use_rslora": True, "rank": 16, "lora_alpha": 4},
    "patterns": {"rank_pattern": {"q_proj": 7, "up_proj": 1}, "alpha_pattern": {"down_proj": 3.0}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_equals_the_merged_model(tmp_path: Path, variant: str) -> None:
    config = checkpoints.config_of(qkv_bias=True, out_bias=True)
    model = checkpoints.write(tmp_path, config)
    folder = write_adapter(tmp_path / "peft", config, **VARIANTS[variant])
    adapter_id = convert(folder, tmp_path, "f32", 16)
    driver = LoraDriver(tmp_path, with_lora(settings()))
    plain, adapted = driver.last_logits([(IDS, ""), (IDS, adapter_id)])
    expected = checkpoints.reference_logits(model, IDS)[-1].numpy()
    merged = checkpoints.reference_logits(merge(model, config, folder), IDS)[-1].numpy()
    assert np.abs(merged - expected).max() > 0.01, "the adapter changes something"
    assert np.abs(plain - expected).max() <= 1e-4
    assert np.abs(adapted - merged).max() <= 1e-4


def make_native(folder: Path, isa: str, lora: LoraSettings = ON, **how: Any) -> LoraDriver:
    with emulation(isa) as kernels:
        config = settings(dtype="bfloat16", kernels=kernels, **{"threads": 2, "max_num_seqs": 16, "tokens": 256, **how})
        driver = LoraDriver(folder, with_lora(config, lora))
    assert isinstance(driver.runner.program, NativeProgram)
    return driver


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


@pytest.fixture(scope="module")
def ids_of(folder: Path) -> list[str]:
    """The ids of adapters of several ranks and projections."""
    config, found = checkpoints.config_of(), []
    for seed, variant in enumerate(VARIANTS.values()):
        made = write_adapter(folder / f"peft{seed}", config, seed=seed, **variant)
        found.append(convert(made, folder, "bf16", 16))
    return found


@pytest.mark.parametrize("isa", ISAS)
def test_native_is_close_to_torch(folder: Path, ids_of: list[str], isa: str) -> None:
    native = make_native(folder, isa)
    reference = LoraDriver(folder, with_lora(settings(dtype="bfloat16", kernels="torch", max_num_seqs=16)))
    rows = [(IDS, adapter_id) for adapter_id in ("", *ids_of[:4])]
    ours, theirs = native.last_logits(rows), reference.last_logits(rows)
    error = np.abs(ours - theirs).max(axis=1)
    base_error = error[0]
    assert (error <= max(4 * base_error, 0.15)).all(), error
    assert (np.abs(ours[1:] - ours[0]).max(axis=1) > 5 * base_error).all(), "adapters change more than rounding"
    native.runner.close()
    reference.runner.close()


@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_the_batch(folder: Path, ids_of: list[str], isa: str) -> None:
    driver = make_native(folder, isa)
    rows = [(random_ids(5 + 9 * i, i), adapter_id) for i, adapter_id in enumerate(["", *ids_of[:4], ids_of[0], ""])]
    together = driver.last_logits(rows)
    for chunk in (1, 4, 7):
        assert (driver.last_logits(rows, chunk) == together).all(), f"in chunks of {chunk}"
    for row, logits in zip(rows, together, strict=True):
        assert (driver.last_logits([row])[0] == logits).all()
    driver.runner.close()


def test_rows_without_an_adapter_are_as_if_adapters_were_off(folder: Path, ids_of: list[str]) -> None:
    off, on = make_native(folder, ISAS[0], LoraSettings()), make_native(folder, ISAS[0])
    expected = off.last_logits([(IDS, "")])[0]
    assert (on.last_logits([(IDS, "")])[0] == expected).all()
    assert (on.last_logits([(IDS, ids_of[0]), (IDS, "")])[1] == expected).all()
    off.runner.close()
    on.runner.close()


@pytest.mark.parametrize("formats", [("q4_1",), ("q8_0", "q4_0", "bf16"), ("q4_1", "q8_0"), ("q4_k", "q6_k")])
def test_over_quantized_models(tmp_path: Path, formats: tuple[Any, ...]) -> None:
    """Against torch in float32, which dequantizes. With several formats, projections of one input are several
    matrices."""
    hidden, inner = (256, 256) if "q4_k" in formats else (64, 96)
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "head_dim": hidden // 4}
    config = checkpoints.config_of(num_heads=4, num_kv_heads=2, **sizes)
    write(tmp_path, config, formats)
    adapter_ids = [
        convert(write_adapter(tmp_path / f"peft{seed}", config, seed=seed, rank=rank), tmp_path, "bf16", 16)
        for seed, rank in enumerate((5, 16))
    ]
    native = make_native(tmp_path, ISAS[0])
    reference = LoraDriver(tmp_path, with_lora(settings(kernels="torch", max_num_seqs=16)))
    rows = [(IDS, adapter_id) for adapter_id in ("", *adapter_ids)]
    ours, theirs = native.last_logits(rows), reference.last_logits(rows)
    error = np.abs(ours - theirs).max(axis=1)
    assert (error <= max(4 * error[0], 0.15)).all(), error
    assert (np.abs(ours[1:] - ours[0]).max(axis=1) > 5 * error[0]).all()
    assert (native.last_logits(rows, 3) == ours).all()
    native.runner.close()
    reference.runner.close()


def test_more_adapters_than_slots_take_turns(folder: Path, ids_of: list[str]) -> None:
    lora = LoraSettings(runtime_loading=True, max_loras=1, max_cpu_loras=2, max_lora_rank=16)
    driver = make_native(folder, ISAS[0], lora)
    first = [driver.last_logits([(IDS, adapter_id)])[0] for adapter_id in ids_of]
    again = [driver.last_logits([(IDS, adapter_id)])[0] for adapter_id in ids_of]
    assert all((one == other).all() for one, other in zip(first, again, strict=True))
    assert len({one.tobytes() for one in first}) == len(ids_of)
    driver.runner.close()


def test_a_lost_file_fails_its_row_only(folder: Path, ids_of: list[str]) -> None:
    driver = make_native(folder, ISAS[0])
    lost = path_of(folder, "0" * 32)
    adds = [row_add(0, IDS, driver.take_blocks(32), options(lost.stem)), row_add(1, IDS, driver.take_blocks(32))]
    sampled = driver.runner.step(make_step([(0, 0, len(IDS), True), (1, 0, len(IDS), True)], adds=adds), take)
    assert sampled.finishes.tolist() == [m.Finish.ERROR, m.Finish.NONE]
    assert "adapter can't be loaded" in sampled.errors[0]
    driver.runner.close()


def test_a_partly_rotated_model_moves_the_rows_of_b(tmp_path: Path) -> None:
    """Rows of queries and keys are loaded in another order, in weights and in adapters."""
    config = checkpoints.config_of(interleaved_rope=True)
    write(tmp_path, config)
    adapter_id = convert(write_adapter(tmp_path / "peft", config, targets=("q_proj", "k_proj")), tmp_path, "f32", 16)
    driver = LoraDriver(tmp_path, with_lora(settings()))
    merged = tmp_path / "merged"
    merged.mkdir()
    model = merge(checkpoints.reference_model(checkpoints.config_of()), config, tmp_path / "peft")
    model.save_pretrained(merged)
    config.save(merged)
    expected = Driver(merged, settings())
    expected.generate([IDS], 1)
    base = Driver(tmp_path, settings())
    base.generate([IDS], 1)
    adapted = driver.last_logits([(IDS, adapter_id)])[0]
    # The base's weights were rounded to bfloat16 by `write`, those of the merged model were not.
    assert np.abs(adapted - expected.logits()[0]).max() < np.abs(adapted - base.logits()[0]).max() / 4


@pytest.fixture(scope="module")
def runners(folder: Path) -> Iterator[dict[str, CpuRunner]]:
    sizes = {"many": {"num_blocks": 160}, "few": {"num_blocks": 14, "num_swap_blocks": 40}}
    sizes["speculating"] = {"num_blocks": 160, "num_speculative_tokens": 4}
    runners = {name: make_runner(folder, block_bytes(3, 2, 16, 2), lora=ON, **size) for name, size in sizes.items()}
    yield runners
    for runner in runners.values():
        runner.close()


@pytest.fixture(scope="module")
def requests(ids_of: list[str]) -> list[Request]:
    """Equal prompts with different adapters, some sampled, some with several samples."""
    prompt = tuple(random_ids(37, 1))
    found = []
    for i, adapter_id in enumerate(["", *ids_of, "", *ids_of]):
        fields = (("adapter_id", adapter_id),)
        found.append(Request(prompt, 36 + 3 * i, seed=GREEDY_SEED if i % 2 else i, n=1 + (i == 3), fields=fields))
    return found


@pytest.fixture(scope="module")
def alone(runners: dict[str, CpuRunner], requests: list[Request]) -> list[list[list[int]]]:
    found = []
    for request in requests:
        pair = Pair(runners["many"], prefix_caching=False, max_loras=1)
        found += pair.run([request])
    greedy = {tuple(texts[0][:14]) for request, texts in zip(requests, found, strict=True) if request.seed < 0}
    assert len(greedy) == len({request.fields for request in requests if request.seed < 0}), "adapters change texts"
    return found


class TestScheduled:
    """With the real scheduler: texts are those of each request alone, whatever it does."""

    @pytest.mark.parametrize(("max_loras", "depth"), [(1, 1), (2, 2), (4, 1)])
    def test_batched_with_a_prefix_cache(
        self,
        runners: dict[str, CpuRunner],
        requests: list[Request],
        alone: list[list[list[int]]],
        max_loras: int,
        depth: int,
    ) -> None:
        pair = Pair(runners["many"], depth, max_loras=max_loras, max_num_batched_tokens=50)
        for _ in range(2):  # the second time, all prompts are cached
            assert pair.run(requests) == alone
        assert pair.scheduler.load().num_cached_tokens >= 32 * len(requests)

    @pytest.mark.parametrize("preemption", ["swap", "recompute"])
    def test_preempted(
        self, runners: dict[str, CpuRunner], requests: list[Request], alone: list[list[list[int]]], preemption: str
    ) -> None:
        pair = Pair(runners["few"], max_loras=4, preemption=preemption)
        assert pair.run(requests) == alone
        assert pair.scheduler.load().num_preemptions > 0

    def test_with_proposed_tokens(
        self, runners: dict[str, CpuRunner], requests: list[Request], alone: list[list[list[int]]]
    ) -> None:
        pair = Pair(runners["speculating"], max_loras=4, adaptive_speculation=False)
        assert pair.run(requests) == alone
        assert pair.scheduler.speculation.counts().num_drafts > 0

    def test_a_failed_adapter_leaves_nothing_in_the_prefix_cache(
        self, requests: list[Request], alone: list[list[list[int]]], folder: Path
    ) -> None:
        """Its blocks were computed without it. When its file is there again, they must not be found."""
        request = requests[1]
        path = path_of(folder, dict(request.fields)["adapter_id"])
        runner = make_runner(folder, block_bytes(3, 2, 16, 2), num_blocks=40, lora=ON)
        pair = Pair(runner, max_loras=4)
        lost = path.rename(path.with_suffix(".lost"))
        try:
            pair.run([request])
        finally:
            lost.rename(path)
        assert pair.errors and all("adapter can't be loaded" in why for why in pair.errors.values())
        assert pair.run([request]) == [alone[1]]
        runner.close()
