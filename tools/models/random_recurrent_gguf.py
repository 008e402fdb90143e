"""Write a .gguf file with random weights of the shape of Qwen3.5-0.8B or of an LFM2, to compare speeds with llama.cpp.

    .venv/bin/python -m tools.models.random_recurrent_gguf /tmp/qwen35.gguf
    .venv/bin/python -m tools.models.random_recurrent_gguf --layers 4 /tmp/small.gguf
    .venv/bin/python -m tools.models.random_recurrent_gguf --shape lfm2-350m /tmp/lfm2.gguf

Matrices are Q4_K, and the embedding, which is also the LM head, is Q8_0: random codes with scales that give numbers a
standard deviation of 0.02. What the states decay by, and the taps of convolutions, are float32, as in converted files.
Qwen3.5-0.8B takes 0.56 GB, LFM2-350M 0.23 GB, LFM2-1.2B 0.75 GB.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

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


class Lfm2(NamedTuple):
    """The sizes of an LFM2. Heads have 64 numbers, and 8 heads have keys and values."""

    hidden: int
    inner: int
    num_heads: int


LFM2 = {"lfm2-350m": Lfm2(1024, 4608, 16), "lfm2-1.2b": Lfm2(2048, 8192, 32)}
LFM2_VOCABULARY, LFM2_KV_HEADS, LFM2_HEAD_DIM, LFM2_TAPS = 65_536, 8, 64, 3
LFM2_ATTENTION = (2, 5, 8, 10, 12, 14)
"""The layers with attention; the others have a convolution."""


class RandomFile:
    """A file with random tensors."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self.writer = writer
        self.random = np.random.Generator(np.random.SFC64(1))

    def add(self, name: str, *shape: int, kind: Kind = Kind.Q4_K) -> None:
        self.writer.add_tensor(f"{name}.weight", _blocks(self.random, kind, *shape), raw_dtype=kind)

    def add_floats(self, name: str, numbers: "np.ndarray[Any, Any]") -> None:
        self.writer.add_tensor(name, numbers.astype(np.float32))

    def close(self) -> None:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def write_lfm2(path: Path, num_layers: int, shape: Lfm2) -> None:
    writer = gguf.GGUFWriter(path, "lfm2")
    made = RandomFile(writer)
    hidden, inner, heads = shape
    attention = [layer for layer in LFM2_ATTENTION if layer < num_layers]
    writer.add_context_length(32_768)
    writer.add_block_count(num_layers)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv([LFM2_KV_HEADS if layer in attention else 0 for layer in range(num_layers)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e6)
    writer.add_uint32("lfm2.shortconv.l_cache", LFM2_TAPS)
    writer.add_vocab_size(LFM2_VOCABULARY)
    checkpoints._add_vocabulary(writer, checkpoints.byte_level(), "lfm2", LFM2_VOCABULARY)
    made.add("token_embd", LFM2_VOCABULARY, hidden, kind=Kind.Q8_0)
    made.add_floats("token_embd_norm.weight", np.ones(hidden))
    for layer in range(num_layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            made.add_floats(f"{block}.{name}.weight", np.ones(hidden))
        if layer in attention:
            made.add(f"{block}.attn_q", heads * LFM2_HEAD_DIM, hidden)
            made.add(f"{block}.attn_k", LFM2_KV_HEADS * LFM2_HEAD_DIM, hidden)
            made.add(f"{block}.attn_v", LFM2_KV_HEADS * LFM2_HEAD_DIM, hidden)
            made.add(f"{block}.attn_output", hidden, heads * LFM2_HEAD_DIM)
            for name in ("attn_q_norm", "attn_k_norm"):
                made.add_floats(f"{block}.{name}.weight", np.ones(LFM2_HEAD_DIM))
        else:
            made.add(f"{block}.shortconv.in_proj", 3 * hidden, hidden)
            made.add(f"{block}.shortconv.out_proj", hidden, hidden)
            taps = made.random.standard_normal((hidden, LFM2_TAPS)) / 2
            made.add_floats(f"{block}.shortconv.conv.weight", taps)
        made.add(f"{block}.ffn_gate", inner, hidden)
        made.add(f"{block}.ffn_up", inner, hidden)
        made.add(f"{block}.ffn_down", hidden, inner)
    made.close()


def write_qwen(path: Path, num_layers: int) -> None:
    writer = gguf.GGUFWriter(path, "qwen35")
    made = RandomFile(writer)
    add, add_floats, random = made.add, made.add_floats, made.random
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
    made.close()


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
    parser.add_argument("--shape", choices=["qwen3.5-0.8b", *LFM2], default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=int, help="by default those of the model: 24, and 16 of an LFM2")
    args = parser.parse_args()
    if (lfm2 := LFM2.get(args.shape)) is not None:
        write_lfm2(args.path, args.layers or 16, lfm2)
    else:
        write_qwen(args.path, args.layers or 24)


if __name__ == "__main__":
    main()
