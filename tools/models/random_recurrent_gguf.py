"""Write a .gguf file with random weights of the shape of Qwen3.5-0.8B, to compare speeds with llama.cpp.

    .venv/bin/python -m tools.models.random_recurrent_gguf /tmp/qwen35.gguf
    .venv/bin/python -m tools.models.random_recurrent_gguf --layers 4 /tmp/small.gguf

Matrices are Q4_K, and the embedding, which is also the LM head, is Q8_0: random codes with scales that give numbers a
standard deviation of 0.02. What the states decay by is float32, as in converted files. It takes 0.56 GB.
"""

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from tests.stages.prepare import checkpoints

HIDDEN, INNER, VOCABULARY = 1024, 3584, 248_320
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 256
STATE_HEADS, STATE_DIM = 16, 128
ATTENTION_INTERVAL = 4
"""Every so many layers, one has attention, and the others a state."""
EPS = 1e-6
DEVIATION = 0.02
SPREADS = {Kind.Q4_K: 147.0, Kind.Q8_0: 73.0}
"""Standard deviations of the products of random codes and scales."""


def write(path: Path, num_layers: int) -> None:
    random = np.random.Generator(np.random.SFC64(1))
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_context_length(32_768)
    writer.add_block_count(num_layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(EPS)
    writer.add_rope_freq_base(1e7)
    writer.add_rope_dimension_count(HEAD_DIM // 4)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    values = STATE_HEADS * STATE_DIM
    for key, value in {
        "ssm.conv_kernel": 4,
        "ssm.state_size": STATE_DIM,
        "ssm.group_count": STATE_HEADS,
        "ssm.time_step_rank": STATE_HEADS,
        "ssm.inner_size": values,
        "full_attention_interval": ATTENTION_INTERVAL,
    }.items():
        writer.add_uint32(f"qwen35.{key}", value)
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), "qwen35", VOCABULARY)

    def add(name: str, *shape: int, kind: Kind = Kind.Q4_K) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(random, kind, *shape), raw_dtype=kind)

    def add_floats(name: str, numbers: "np.ndarray[Any, Any]") -> None:
        writer.add_tensor(name, numbers.astype(np.float32))

    add("token_embd", VOCABULARY, HIDDEN, kind=Kind.Q8_0)
    add_floats("output_norm.weight", np.ones(HIDDEN))
    for layer in range(num_layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "post_attention_norm"):
            add_floats(f"{block}.{name}.weight", np.ones(HIDDEN))
        if layer % ATTENTION_INTERVAL == ATTENTION_INTERVAL - 1:
            add(f"{block}.attn_q", 2 * HEADS * HEAD_DIM, HIDDEN)
            add(f"{block}.attn_k", KV_HEADS * HEAD_DIM, HIDDEN)
            add(f"{block}.attn_v", KV_HEADS * HEAD_DIM, HIDDEN)
            add(f"{block}.attn_output", HIDDEN, HEADS * HEAD_DIM)
            for name in ("attn_q_norm", "attn_k_norm"):
                add_floats(f"{block}.{name}.weight", np.ones(HEAD_DIM))
        else:
            add(f"{block}.attn_qkv", 3 * values, HIDDEN)
            add(f"{block}.attn_gate", values, HIDDEN)
            add(f"{block}.ssm_out", HIDDEN, values)
            for name in ("ssm_alpha", "ssm_beta"):
                add_floats(f"{block}.{name}.weight", random.standard_normal((STATE_HEADS, HIDDEN)) * DEVIATION)
            add_floats(f"{block}.ssm_conv1d.weight", random.standard_normal((3 * values, 4)) / 2)
            add_floats(f"{block}.ssm_a", -random.uniform(0.01, 1, STATE_HEADS))
            add_floats(f"{block}.ssm_dt.bias", np.ones(STATE_HEADS))
            add_floats(f"{block}.ssm_norm.weight", np.ones(STATE_DIM))
        add(f"{block}.ffn_gate", INNER, HIDDEN)
        add(f"{block}.ffn_up", INNER, HIDDEN)
        add(f"{block}.ffn_down", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, kind: Kind, *shape: int) -> "np.ndarray[Any, Any]":
    """Random blocks of a tensor, with the same scale in all of them."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (int(np.prod(shape)) // size, num_bytes), np.uint8)
    scale = np.float16(DEVIATION / SPREADS[kind])
    head = [scale, np.float16(7.5 * float(scale))] if kind == Kind.Q4_K else [scale]  # a minimum centers the codes
    blocks[:, : 2 * len(head)] = np.array(head, np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // size * num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    args = parser.parse_args()
    write(args.path, args.layers)


if __name__ == "__main__":
    main()
