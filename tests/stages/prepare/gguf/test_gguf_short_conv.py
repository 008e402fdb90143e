"""A .gguf file of a model with short convolutions has the logits of its original model.

The files are made here as llama.cpp's converter makes them (`LFM2Model` and `LFM2MoeModel` in conversion/lfm2.py).
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.recurrent_models import VARIANTS, config_of, logits_of, make
from tests.stages.prepare import checkpoints

Array = np.ndarray[Any, Any]
ARCHS = {
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "lfm2, seven taps": gguf.MODEL_ARCH.LFM2,
    "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE,
}
IDS = np.random.default_rng(0).integers(3, 600, 50).tolist()


def converted(name: str, data: Array) -> dict[str, Array]:
    """A tensor by the names that gguf-py knows."""
    if name.endswith("conv.conv.weight"):
        return {name: data.squeeze(1)}
    if name.endswith(".expert_bias"):
        return {f"{name}.bias": data}
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(data, 2, axis=1)
        return {f"{name.replace('gate_up', part)}.weight": half for part, half in (("gate", gate), ("up", up))}
    return {f"{name}.weight" if name.endswith("experts.down_proj") else name: data}


def save(path: Path, arch: gguf.MODEL_ARCH, model: Any, config: Any, more: Mapping[str, Any] = {}) -> Path:
    """The file, with the keys in `more` instead of its own ones, by their names without the architecture's."""
    prefix, layers = gguf.MODEL_ARCH_NAMES[arch], config.num_hidden_layers
    heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
    inner = model.model.layers[0].feed_forward.w1.weight.shape[0]
    keys: dict[str, Any] = {
        "block_count": layers,
        "context_length": 256,
        "embedding_length": config.hidden_size,
        "feed_forward_length": inner,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": heads,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "shortconv.l_cache": config.conv_L_cache,
        "vocab_size": config.vocab_size,
    }
    if hasattr(config, "num_experts"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_gating_func": 2,
            "expert_weights_scale": config.routed_scaling_factor,
            "leading_dense_block_count": config.num_dense_layers,
        }
    writer = gguf.GGUFWriter(path, prefix)
    add: dict[type, Any] = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in {**keys, **more}.items():
        add[type(value)](f"{prefix}.{key}", value)
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), "lfm2", config.vocab_size)
    names = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for known, data in converted(name, tensor.float().numpy()).items():
            found = names.get_name(known, try_suffixes=(".weight", ".bias"))
            assert found is not None, known
            writer.add_tensor(found, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def rounded(name: str) -> Any:
    """The model, with matrices in bfloat16 as they are kept."""
    model = make(VARIANTS[name])
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "conv.conv" not in parameter_name:
                parameter.copy_(parameter.bfloat16())
    return model


@pytest.mark.parametrize("name", ARCHS)
def test_a_gguf_file_has_the_logits_of_its_original_model(tmp_path: Path, name: str) -> None:
    variant, model = VARIANTS[name], rounded(name)
    path = save(tmp_path / "tiny.gguf", ARCHS[name], model, config_of(variant))
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    made = ModelConfig.load(folder)
    assert made.architecture == variant.kind and made.num_kv_heads == 2
    assert made.short_conv is not None and made.short_conv.layers == [0, 1, 3]
    driver = Driver(folder, settings(kernels="torch", tokens=64, kv_mib=2))
    driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
    (theirs,) = logits_of(variant, tmp_path, model, [IDS])
    np.testing.assert_allclose(driver.logits()[0], theirs[-1], rtol=0, atol=1e-4)
    native = Driver(folder, settings(dtype="bfloat16", kv_mib=2))
    assert isinstance(native.runner.program, NativeProgram)
    native.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, native.take_blocks(len(IDS)))])
    assert np.isfinite(native.logits()).all()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"shortconv.l_cache": 9}, "lfm2.shortconv.l_cache is 9; it must be an integer from 2 to 8"),
        ({"attention.head_count_kv": [0, 1, 2, 0]}, "layers of different sizes are not supported"),
        ({"attention.head_count_kv": [0, 0, 0, 0]}, "lfm2.attention.head_count_kv is 0; it must be an integer from 1"),
        ({"attention.sliding_window": 64}, "a sliding window in layers that the file doesn't name"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    path = save(tmp_path / "tiny.gguf", ARCHS["lfm2"], rounded("lfm2"), config_of(VARIANTS["lfm2"]), keys)
    with pytest.raises(ModelError, match=re.escape(words)):
        prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
