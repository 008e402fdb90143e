"""Writes a .gguf file with a small random model whose greedy output is known.

The head's row of a token is the embedding of the token before it in a cycle through the vocabulary, and some layers of
attention and MLP add noise. So the largest logit is that of the next token in the cycle, by a margin of some units: two
servers that round differently still write the same text. Each special token follows two ordinary ones, and an ordinary
one follows it.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from pipeline.stages.prepare.gguf.tokenizers.special_tokens import NORMAL
from tools.compare_llama_server.variants import FileVariant
from tools.tokenizer_vectors.vocabularies import BYTE

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 2, 1, 32, 64
CONTEXT = 8192
NOISE = 0.15
"""The size of what a layer adds, compared with the embedding."""


class Layout(NamedTuple):
    """What the layers of an architecture have."""

    num_layers: int
    norms: Mapping[str, int]
    """Their sizes."""
    post_norms: Sequence[str] = ()
    """Those of what a layer adds."""


LAYOUTS = {
    "llama": Layout(2, {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}),
    "olmo2": Layout(
        5,
        {
            "attn_q_norm": HEADS * HEAD_DIM,
            "attn_k_norm": KV_HEADS * HEAD_DIM,
            "post_attention_norm": HIDDEN,
            "post_ffw_norm": HIDDEN,
        },
        post_norms=("post_attention_norm", "post_ffw_norm"),
    ),
}

WORD = re.compile(r"[Ġ▁]?[A-Za-z0-9]+")
Array = np.ndarray[Any, Any]


def cycle(tokens: Sequence[str], types: Sequence[int], seed: int) -> list[int]:
    """All ids, in the order in which the model writes them. First those that are words, with two of them before each
    special token, then all others: a token may be a part of a character."""
    random = np.random.default_rng(seed)
    shuffled = random.permutation(len(tokens)).tolist()
    special = [i for i in shuffled if types[i] not in (NORMAL, BYTE)]
    words = [i for i in shuffled if types[i] == NORMAL and WORD.fullmatch(tokens[i])]
    others = [i for i in shuffled if i not in {*special, *words}]
    if 3 * len(special) > len(words):
        raise ValueError(f"{len(special)} special tokens need {3 * len(special)} words, not {len(words)}")
    for index, token_id in enumerate(special):
        words.insert(4 * index + 2, token_id)
    return words + others


def write(path: Path, variant: FileVariant, seed: int = 1) -> list[int]:
    """Write the file of a form. Returns the cycle of its tokens."""
    keys = variant.keys
    num_tokens = len(keys["tokens"])
    order = cycle(keys["tokens"], variant.types, seed)
    layout = LAYOUTS[variant.architecture]
    writer = gguf.GGUFWriter(path, variant.architecture)
    writer.add_name(variant.model_name)
    writer.add_context_length(CONTEXT)
    writer.add_block_count(layout.num_layers)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(num_tokens)
    add: Any = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in keys.items():
        add[type(value)](f"tokenizer.ggml.{key}", value)
    for key, value in variant.parameters.items():
        add[type(value)](f"{variant.architecture}.{key}", value)
    for name, template in variant.templates.items():
        writer.add_string("tokenizer.chat_template" + (f".{name}" if name else ""), template)
    for name, tensor in _tensors(num_tokens, order, variant, layout, np.random.default_rng(seed)).items():
        kind = gguf.GGMLQuantizationType.F32 if tensor.ndim == 1 else variant.weights
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return order


def _tensors(
    num_tokens: int, order: Sequence[int], variant: FileVariant, layout: Layout, random: np.random.Generator
) -> dict[str, Array]:
    """By the names in the file. Values are exact in bfloat16."""

    def normal(*shape: int, scale: float = 1.0) -> Array:
        values = random.standard_normal(shape, np.float32) * np.float32(scale)
        return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    embedding = normal(num_tokens, HIDDEN)
    tensors = {"token_embd.weight": embedding, "output_norm.weight": np.ones(HIDDEN, np.float32)}
    if not variant.tied:
        head = np.empty_like(embedding)
        head[order] = embedding[np.roll(order, 1)]
        tensors["output.weight"] = head / 8
    for layer in range(layout.num_layers):
        shapes = {
            "attn_q": (HEADS * HEAD_DIM, HIDDEN),
            "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate": (MLP, HIDDEN),
            "ffn_up": (MLP, HIDDEN),
            "ffn_down": (HIDDEN, MLP),
        }
        for name, shape in shapes.items():
            scale = shape[1] ** -0.5 * (NOISE if name in ("attn_output", "ffn_down") else 1.0)
            tensors[f"blk.{layer}.{name}.weight"] = normal(*shape, scale=scale)
        for name, size in layout.norms.items():
            weight = NOISE if name in layout.post_norms else 1.0
            tensors[f"blk.{layer}.{name}.weight"] = np.full(size, weight, np.float32)
    return tensors
