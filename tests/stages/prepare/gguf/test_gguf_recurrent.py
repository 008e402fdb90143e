"""A .gguf file of a model with recurrent layers has the logits of its original model.

The files are made here as llama.cpp's converter makes them (`Qwen3NextModel` and `_LinearAttentionVReorderBase` in
conversion/qwen.py).
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.recurrent_models import VARIANTS, config_of, logits_of, make
from tests.stages.prepare import checkpoints

Array = np.ndarray[Any, Any]
ARCHS = {
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}
IDS = np.random.default_rng(0).integers(3, 600, 50).tolist()


def tiled(values: Array, config: Any, width: int, axis: int = 0) -> Array:
    """Value heads of `width` numbers, those that share a key head apart from each other."""
    keys, ratio = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    moved = np.moveaxis(values, axis, 0)
    heads = moved.reshape(keys, ratio, width, *moved.shape[1:]).swapaxes(0, 1)
    return np.ascontiguousarray(np.moveaxis(heads.reshape(moved.shape), 0, axis))


def converted(name: str, data: Array, config: Any) -> dict[str, Array]:
    """A layer's tensor by its names in the file, without `blk.N.`."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    is_tiled, heads = config.model_type != "qwen3_next", config.linear_num_value_heads

    def ordered(values: Array, width: int, axis: int = 0) -> Array:
        return tiled(values, config, width, axis) if is_tiled else values

    match name:
        case "linear_attn.in_proj_qkv.weight" | "linear_attn.conv1d.weight":
            data = data.squeeze()
            data = np.concatenate([data[:keys], ordered(data[keys:], value_dim)])
            return {"attn_qkv.weight" if "qkv" in name else "ssm_conv1d.weight": data}
        case "linear_attn.in_proj_z.weight":
            return {"attn_gate.weight": ordered(data, value_dim)}
        case "linear_attn.in_proj_b.weight":
            return {"ssm_beta.weight": ordered(data, 1)}
        case "linear_attn.in_proj_a.weight":
            return {"ssm_alpha.weight": ordered(data, 1)}
        case "linear_attn.in_proj_ba.weight":
            return {"ssm_ba.weight": data}
        case "linear_attn.in_proj_qkvz.weight":
            ratio = heads // config.linear_num_key_heads
            groups = data.reshape(config.linear_num_key_heads, -1, data.shape[1])
            ends = np.cumsum([key_dim, key_dim, ratio * value_dim])
            q, k, v, z = (part.reshape(-1, data.shape[1]) for part in np.split(groups, ends, axis=1))
            return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}
        case "linear_attn.A_log":
            return {"ssm_a": ordered(-np.exp(data), 1)}
        case "linear_attn.dt_bias":
            return {"ssm_dt.bias": ordered(data, 1)}
        case "linear_attn.norm.weight":
            return {"ssm_norm.weight": data}
        case "linear_attn.out_proj.weight":
            return {"ssm_out.weight": ordered(data, value_dim, axis=1)}
        case "mlp.experts.gate_up_proj":
            gate, up = np.split(data, 2, axis=1)
            return {"ffn_gate_exps.weight": gate, "ffn_up_exps.weight": up}
        case "mlp.experts.down_proj":
            return {"ffn_down_exps.weight": data}
    names = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        **{f"self_attn.{name}_norm": f"attn_{name}_norm" for name in "qk"},
        **{f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"},
        **{f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
        **{f"mlp.shared_expert.{name}_proj": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "self_attn.o_proj": "attn_output",
    }
    found = f"{names[name.removesuffix('.weight')]}.weight"
    return {found: (data + 1 if "norm" in found else data).squeeze()}


def save(path: Path, name: str, model: Any, config: Any, *, num_drafts: int = 0) -> Path:
    """The file, with the tensors of `num_drafts` layers that draft."""
    arch = gguf.MODEL_ARCH_NAMES[ARCHS[name]]
    writer = gguf.GGUFWriter(path, arch)
    layers = config.num_hidden_layers
    writer.add_block_count(layers + num_drafts)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    if name == "qwen3_5_moe":  # whose config.json has no such size
        assert getattr(config, "intermediate_size", None) in (None, 96)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.head_dim // 4)
    if arch != "qwen3next":
        writer.add_array(f"{arch}.rope.dimension_sections", [11, 11, 10, 0])
    for key, value in {
        "ssm.conv_kernel": 4,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 4,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    if num_drafts:
        writer.add_uint32(f"{arch}.nextn_predict_layers", num_drafts)
        writer.add_array(
            f"{arch}.attention.recurrent_layers", [i % 4 < 3 for i in range(layers)] + [False] * num_drafts
        )
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), "qwen35", config.vocab_size)
    for tensor_name, tensor in model.state_dict().items():
        data = tensor.float().numpy()
        if tensor_name.startswith("model.layers."):
            _, _, layer, part = tensor_name.split(".", 3)
            for found, made in converted(part, data, config).items():
                writer.add_tensor(f"blk.{layer}.{found}", np.ascontiguousarray(made))
        else:
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found = stem[tensor_name.removesuffix(".weight")]
            writer.add_tensor(f"{found}.weight", data + 1 if found == "output_norm" else data)
    for i in range(layers, layers + num_drafts):
        writer.add_tensor(f"blk.{i}.nextn.eh_proj.weight", np.ones((8, 16), np.float32))
        writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("num_drafts", [0, 1])
@pytest.mark.parametrize("name", ARCHS)
def test_a_gguf_file_has_the_logits_of_its_original_model(tmp_path: Path, name: str, num_drafts: int) -> None:
    variant = VARIANTS[name]
    if name == "qwen3_next":  # llama.cpp has experts in each layer
        variant = type(variant)(variant.kind, variant.class_name, {**variant.changes, "mlp_only_layers": []})
    model, config = make(variant), config_of(variant)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() in (2, 3):
                parameter.copy_(parameter.bfloat16())
    path = save(tmp_path / "tiny.gguf", name, model, config, num_drafts=num_drafts)
    folder = prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache")))
    made = ModelConfig.load(folder)
    assert made.architecture == variant.kind and made.num_layers == 4
    assert made.delta is not None and made.delta.layers == [0, 1, 2]
    notes = (folder / NOTES).read_text() if (folder / NOTES).exists() else ""
    assert ("multi-token prediction is not supported" in notes) == bool(num_drafts)
    driver = Driver(folder, settings(kernels="torch", tokens=64, kv_mib=2))
    driver.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, driver.take_blocks(len(IDS)))])
    (theirs,) = logits_of(variant, tmp_path, model, [IDS])
    np.testing.assert_allclose(driver.logits()[0], theirs[-1], rtol=0, atol=1e-4)
    if num_drafts:
        return
    native = Driver(folder, settings(dtype="bfloat16", kv_mib=2))
    assert isinstance(native.runner.program, NativeProgram)
    native.step([(0, 0, len(IDS), True)], adds=[row_add(0, IDS, native.take_blocks(len(IDS)))])
    assert np.isfinite(native.logits()).all()
