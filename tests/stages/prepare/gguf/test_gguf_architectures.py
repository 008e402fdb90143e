"""A .gguf file of every architecture has the logits of its original model.

The files are made here as llama.cpp's converter makes them: gguf-py names the tensors, and the functions below repeat
what the converter does to them.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest
import torch

from pipeline.config.settings import LoraSettings, Settings
from pipeline.errors import UserError
from pipeline.lora.peft_config import AdapterError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.models.limits import require_supported
from pipeline.stages.prepare.gguf.architecture import GgufKeys
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.gguf.recurrent import delta_net, short_conv
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.lora.test_module_names import assert_same, matrices, modules_of
from tests.stages.execute import checkpoints as execute_checkpoints
from tests.stages.execute import tiny_architectures
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.tiny_architectures import VARIANTS
from tests.stages.prepare import checkpoints
from tests.stages.prepare.gguf.architectures import (
    CASES,
    EXPERTS,
    GGUF_ONLY,
    IDS,
    A,
    Array,
    Case,
    Kind,
    original,
    permuted,
    save,
    saved,
)
from tests.stages.prepare.gguf.test_gguf_encoders import ENCODERS


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_has_the_logits_of_its_original_model(tmp_path: Path, name: str) -> None:
    path, model = saved(tmp_path, name)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    assert ModelConfig.load(folder).architecture == model.config.model_type
    max_model_len = (GGUF_ONLY.get(CASES[name].variant) or VARIANTS[CASES[name].variant]).max_model_len
    driver = Driver(folder, settings(kernels="torch", tokens=256, kv_mib=2, max_model_len=max_model_len))
    driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
    with torch.inference_mode():
        theirs = model(torch.tensor([IDS])).logits[0, -1].numpy()
    np.testing.assert_allclose(driver.logits()[0], theirs, rtol=0, atol=1e-4)


WITH_LLAMA = CASES | {"llama": Case("falcon 3", A.LLAMA, convert=permuted, pre="llama-bpe")}
ADAPTED = WITH_LLAMA if os.environ.get("PIPELINE_ALL_CASES") else ["llama", "bloom", "falcon 7b", "phi3"]


@pytest.mark.parametrize("name", ADAPTED)
def test_an_adapter_of_the_original_model_has_the_same_matrices_on_the_gguf_file(tmp_path: Path, name: str) -> None:
    """Rows of q and k are in another order in some files, and modules have other names in all."""
    case = WITH_LLAMA[name]
    model = original(name, case)
    shapes = modules_of(model)
    source = checkpoints.save_folder(tmp_path / "source", model)
    path = save(tmp_path / "tiny.gguf", model, case)
    folders = [prepare(Settings(model=str(one), cache_dir=str(tmp_path / "cache"))) for one in (source, path)]
    if not shapes:  # GPT-2 and the first StarCoder, whose modules are of another class
        for i, folder in enumerate(folders):
            with pytest.raises(AdapterError, match=r"changes 'transformer\.h\.1\.mlp\.c_fc'"):
                matrices(tmp_path / f"peft-{i}", folder, {"transformer.h.1.mlp.c_fc": (256, 64)})
        return
    if case.arch == A.GEMMA4:  # its layers have different sizes, and no server takes an adapter for it
        for folder in folders:
            with pytest.raises(UserError, match=r"lora\.runtime_loading is True, which is not supported for .*gemma4"):
                require_supported(Settings(lora=LoraSettings(runtime_loading=True)), ModelConfig.load(folder))
        return
    # With the same rotary embedding and the same logits, rows of q and k have the same order.
    assert len({ModelConfig.load(folder).interleaved_rope for folder in folders}) == 1
    found = [matrices(tmp_path / f"peft-{i}", folder, shapes) for i, folder in enumerate(folders)]
    assert_same(*found)
    assert found[0]


def read_windows(num_layers: int, keys: Mapping[str, Any]) -> ModelConfig:
    """What a file of EXAONE 4 with these keys says of windows."""
    values = {f"exaone4.attention.{key}": value for key, value in keys.items()}
    file: Any = SimpleNamespace(path=Path("x.gguf"), get=values.get)
    found = GgufKeys(Metadata(file), "exaone4", {}, num_layers)
    model = execute_checkpoints.config_of(num_layers=num_layers)
    return msgspec.structs.replace(model, **GGUF_ARCHITECTURES["exaone4"].read(found, model))


def test_windows_of_exaone_4_are_in_the_layers_that_the_file_names() -> None:
    named = {"sliding_window": 128, "sliding_window_pattern": [True, True, False]}
    config = read_windows(3, named)
    assert [config.window_of(layer) for layer in range(3)] == [128, 128, None]
    assert [config.rope_of(layer) is None for layer in range(3)] == [False, False, True]
    assert read_windows(3, {}).window_of(0) is None
    assert read_windows(3, {}).layers_without_rope == []
    largest = read_windows(64, {})  # without keys, as in llama.cpp
    assert [largest.window_of(layer) for layer in range(5)] == [4096, 4096, 4096, None, 4096]
    assert largest.layers_without_rope == list(range(3, 64, 4))
    with pytest.raises(ModelError, match=r"sliding_window is 128: a sliding window in layers that the file doesn't"):
        read_windows(3, {"sliding_window": 128})
    with pytest.raises(ModelError, match="sliding_window_pattern has 3 values; the model has 4 layers"):
        read_windows(4, named)


def test_blocks_of_experts_stay_as_they_are(tmp_path: Path) -> None:
    """Those of all experts are one tensor; MXFP4 becomes q8_0 with the same values."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
    variant = tiny_architectures.Variant("qwen3_moe", {**VARIANTS["qwen3_moe"].changes, **sizes})
    random = np.random.default_rng(3)
    blocks: dict[str, tuple[Array, Any]] = {}
    for name, kind, (begin, end) in (
        ("gate", Kind.Q4_K, (0, 4)),
        ("up", Kind.MXFP4, (0, 1)),
        ("down", Kind.Q6_K, (208, 210)),
    ):
        size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
        stored = random.integers(0, 256, (6 * 256 * 256 // size, num_bytes), dtype=np.uint8)
        scale = np.full((end - begin) // 2, 1e-3, np.float16).view(np.uint8)
        stored[:, begin:end] = random.integers(115, 121, (len(stored), 1)) if kind == Kind.MXFP4 else scale
        blocks[f"blk.0.ffn_{name}_exps.weight"] = stored.reshape(6, 256, -1), kind
    metadata = {**EXPERTS, "expert_feed_forward_length": 256}
    path = save(tmp_path / "tiny.gguf", tiny_architectures.make(variant), Case("", A.QWEN3MOE, metadata), blocks)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    formats, found = checkpoints.formats_of(folder), checkpoints.weights_of(folder)
    for name, format in (("gate", "q4_k"), ("up", "q8_0"), ("down", "q6_k")):
        stored, kind = blocks[f"blk.0.ffn_{name}_exps.weight"]
        tensor = found[f"model.layers.0.mlp.experts.{name}_proj.weight"].numpy()
        assert formats[f"model.layers.0.mlp.experts.{name}_proj.weight"] == format
        values = gguf.dequantize(tensor, Kind[format.upper()])
        np.testing.assert_array_equal(values, gguf.dequantize(stored, kind))
    drivers = [
        Driver(folder, settings(kernels="torch", kv_mib=2)),
        Driver(folder, settings(dtype="bfloat16", kv_mib=2)),
    ]
    for driver in drivers:
        driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
    assert isinstance(drivers[1].runner.program, NativeProgram)
    reference, ours = (driver.logits()[0] for driver in drivers)
    assert np.isfinite(ours).all() and ours.argmax() == reference.argmax()


def test_every_architecture_of_gguf_files_is_tested() -> None:
    tested = {gguf.MODEL_ARCH_NAMES[case.arch] for case in CASES.values()}
    # test_architectures.py, test_gguf_recurrent.py, test_gguf_short_conv.py
    elsewhere = {"llama", "qwen2", "qwen3", *delta_net.ARCHITECTURES, *short_conv.ARCHITECTURES}
    encoders = {gguf.MODEL_ARCH_NAMES[one.arch] for one in ENCODERS.values()}
    assert tested | elsewhere | encoders == set(GGUF_ARCHITECTURES)
