"""Write a .gguf file with random weights of the shape `moe-3b-a0.6b`, to compare speeds with llama.cpp.

    .venv/bin/python -m tools.models.random_moe_gguf /tmp/moe.gguf

Its architecture is Qwen3-MoE. Matrices are Q4_K, and the embedding, which is also the LM head, is Q6_K: random bits
with scales that keep outputs about as large as inputs. It takes 1.9 GB.
"""

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

from pipeline.cli.profile.shapes import SHAPES
from tests.stages.prepare import checkpoints

SHAPE = "moe-3b-a0.6b"
SPREADS = {Kind.Q4_K: 200.0, Kind.Q6_K: 18.5 * 74}
"""Standard deviations of the products of random codes and scales."""


def write(path: Path) -> None:
    config = SHAPES[SHAPE]
    experts = config.experts
    assert experts is not None
    hidden, inner, dim = config.hidden_size, experts.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    random = np.random.Generator(np.random.SFC64(1))
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(4096)
    writer.add_block_count(config.num_layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_expert_count(experts.num)
    writer.add_expert_used_count(experts.num_per_token)
    writer.add_expert_feed_forward_length(inner)
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), "qwen2", config.vocab_size)

    def add(name: str, *shape: int, kind: Kind = Kind.Q4_K) -> None:
        writer.add_tensor(f"{name}.weight", _blocks(random, kind, *shape), raw_dtype=kind)

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    add("token_embd", config.vocab_size, hidden, kind=Kind.Q6_K)
    add_norm("output_norm", hidden)
    for layer in range(config.num_layers):
        block = f"blk.{layer}"
        for name, size in (("attn_norm", hidden), ("ffn_norm", hidden), ("attn_q_norm", dim), ("attn_k_norm", dim)):
            add_norm(f"{block}.{name}", size)
        add(f"{block}.attn_q", queries, hidden)
        add(f"{block}.attn_k", keys, hidden)
        add(f"{block}.attn_v", keys, hidden)
        add(f"{block}.attn_output", hidden, queries)
        router = random.standard_normal((experts.num, hidden)) * 4 * hidden**-0.5
        writer.add_tensor(f"{block}.ffn_gate_inp.weight", router.astype(np.float32))
        add(f"{block}.ffn_gate_exps", experts.num, inner, hidden)
        add(f"{block}.ffn_up_exps", experts.num, inner, hidden)
        add(f"{block}.ffn_down_exps", experts.num, hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _blocks(random: np.random.Generator, kind: Kind, *shape: int) -> "np.ndarray[Any, Any]":
    """Random blocks of a tensor, with the same scale in all of them."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num = int(np.prod(shape)) // size
    blocks = random.integers(0, 256, (num, num_bytes), np.uint8)
    scale = np.float16(shape[-1] ** -0.5 / SPREADS[kind])
    if kind == Kind.Q4_K:  # minimums that center the codes
        blocks[:, :4] = np.array([scale, np.float16(7.5 * float(scale))], np.float16).view(np.uint8)
    else:
        blocks[:, 208:] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], shape[-1] // size * num_bytes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
