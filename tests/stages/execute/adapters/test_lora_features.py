"""LoRA adapters with other features: what is computed is that of the model into which the adapter is merged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.settings import LoraSettings
from pipeline.kernels.step_inputs import block_bytes
from pipeline.lora.adapter_file import path_of
from pipeline.lora.convert import convert
from pipeline.runtime import messages as m
from pipeline.stages.execute.adapters.slots import AdapterLoader
from pipeline.stages.execute.cpu.runner import CpuRunner
from tests.lora.random_adapters import merge, write_adapter
from tests.stages.execute import checkpoints
from tests.stages.execute.adapters.test_lora import IDS, ON, make_native
from tests.stages.execute.native_driver import ISAS, random_ids, write
from tests.stages.execute.pair import Pair, Request, make_runner

ENDS = list(range(0, checkpoints.VOCAB_SIZE, 25))


class Models:
    """A model with an adapter, and the model into which it is merged, both float32."""

    def __init__(self, folder: Path) -> None:
        config = checkpoints.config_of()
        (folder / "base").mkdir()
        (folder / "merged").mkdir()
        model = checkpoints.write(folder / "base", config)
        peft = write_adapter(folder / "peft", config, rank=7)
        self.adapter_id = convert(peft, folder / "base", "f32", 16)
        merge(model, config, peft).save_pretrained(folder / "merged")
        config.save(folder / "merged")
        how: dict[str, Any] = {"dtype": "float32", "kernels": "torch"}
        bytes_of_a_block = block_bytes(3, 2, 16, 4)
        self.base = make_runner(folder / "base", bytes_of_a_block, 160, lora=ON, **how)
        self.merged = make_runner(folder / "merged", bytes_of_a_block, 160, **how)

    def both(self, request: Request) -> tuple[Pair, list[list[int]], Pair, list[list[int]]]:
        """Run a request with the adapter, beside the same without it, and on the merged model."""
        fields = (*request.fields, ("adapter_id", self.adapter_id))
        adapted = Request(request.prompt, request.max_tokens, request.seed, request.n, fields=fields)
        ours, theirs = Pair(self.base, 2, max_loras=2), Pair(self.merged, 2)
        found, plain = ours.run([adapted, request])
        (expected,) = theirs.run([request])
        assert request.max_tokens == 1 or found != plain, "the adapter changes texts"
        return ours, found, theirs, expected


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    models = Models(tmp_path_factory.mktemp("models"))
    yield models
    models.base.close()
    models.merged.close()


@pytest.mark.parametrize("width", [1, 4])
def test_beam_search(models: Models, width: int) -> None:
    fields = {"use_beam_search": True, "stop_token_ids": ENDS, "num_logprobs": 0}
    request = Request(tuple(random_ids(23, 3)), 20, n=width, fields=tuple(fields.items()))
    _, found, _, expected = models.both(request)
    assert found == expected and len(found) == width


def test_several_samples(models: Models) -> None:
    _, found, _, expected = models.both(Request(tuple(random_ids(23, 3)), 20, seed=7, n=3))
    assert found == expected and len({tuple(ids) for ids in found}) == 3


@pytest.mark.parametrize("pooling", [m.Pooling.MEAN, m.Pooling.LAST])
def test_embeddings(models: Models, pooling: m.Pooling) -> None:
    request = Request(tuple(random_ids(40, 4)), 1, fields=(("pooling", int(pooling)),))
    ours, _, theirs, _ = models.both(request)
    adapted, plain = (np.frombuffer(ours.token_outputs[index, 0], np.float32) for index in (1, 2))
    merged = np.frombuffer(theirs.token_outputs[1, 0], np.float32)
    assert np.abs(adapted - merged).max() <= 1e-4
    assert np.abs(plain - merged).max() > 1e-2


def test_prompt_logprobs(models: Models) -> None:
    request = Request(tuple(random_ids(40, 4)), 3, fields=(("num_prompt_logprobs", 0), ("num_logprobs", 0)))
    ours, _, theirs, _ = models.both(request)
    for name in ("prompt_logprobs", "token_outputs"):
        adapted, merged = (np.frombuffer(getattr(pair, name)[1, 0], np.float32) for pair in (ours, theirs))
        # Ids as floats are almost zero.
        assert np.abs(adapted - merged).max() <= 2e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, checkpoints.config_of())
    return folder


@pytest.fixture(scope="module")
def ids_of(folder: Path) -> list[str]:
    config = checkpoints.config_of()
    return [
        convert(write_adapter(folder / f"peft{seed}", config, seed=seed, rank=rank), folder, "bf16", 16)
        for seed, rank in enumerate((4, 16))
    ]


def test_a_cache_in_eight_bits(folder: Path, ids_of: list[str]) -> None:
    """Rows have the bits that they have alone, and are close to those with a cache of bfloat16."""
    eight, sixteen = make_native(folder, ISAS[0], kv_dtype="int8"), make_native(folder, ISAS[0])
    rows = [(IDS, adapter_id) for adapter_id in ("", *ids_of)]
    together = eight.last_logits(rows, 5)
    for row, logits in zip(rows, together, strict=True):
        assert (eight.last_logits([row])[0] == logits).all()
    error = np.abs(together - sixteen.last_logits(rows)).max(axis=1)
    assert (error <= max(3 * error[0], 0.3)).all()
    assert (np.abs(together[1:] - together[0]).max(axis=1) > 3 * error[0]).all()
    eight.runner.close()
    sixteen.runner.close()


def test_adapters_are_loaded_before_their_first_row(folder: Path, ids_of: list[str]) -> None:
    """A step then only puts them into a slot: here, the files are gone."""
    driver = make_native(folder, ISAS[0])
    expected = [driver.last_logits([(IDS, adapter_id)])[0] for adapter_id in ids_of]
    other = make_native(folder, ISAS[0])
    runner: CpuRunner = other.runner
    runner.preload_adapters(ids_of)
    loader = runner.adapters.loader  # type: ignore[union-attr]
    for future in loader._waiting.values():
        future.result(60)
    paths = [path_of(folder, adapter_id) for adapter_id in ids_of]
    lost = [path.rename(path.with_suffix(".lost")) for path in paths]
    try:
        found = [other.last_logits([(IDS, adapter_id)])[0] for adapter_id in ids_of]
    finally:
        for path, original in zip(lost, paths, strict=True):
            path.rename(original)
    assert all((one == two).all() for one, two in zip(found, expected, strict=True))
    driver.runner.close()
    runner.close()


def test_no_more_adapters_are_loaded_than_there_are_free_slots(folder: Path, ids_of: list[str]) -> None:
    lora = LoraSettings(runtime_loading=True, max_loras=1, max_cpu_loras=2, max_lora_rank=16)
    driver = make_native(folder, ISAS[0], lora)
    driver.last_logits([(IDS, ids_of[0])])
    driver.runner.preload_adapters(["0" * 32, *ids_of])
    loader: AdapterLoader = driver.runner.adapters.loader  # type: ignore[union-attr]
    assert list(loader._waiting) == ["0" * 32]
    driver.runner.preload_adapters([ids_of[1]])  # the other one was unloaded
    assert list(loader._waiting) == [ids_of[1]]
    driver.last_logits([(IDS, ids_of[1])])
    driver.runner.close()
