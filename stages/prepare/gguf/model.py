"""Converts a .gguf file to a model folder: config from metadata, weights, vocabulary as tokenizer.json.

For some architectures, llama.cpp rotates adjacent pairs of a head, while Hugging Face rotates its two halves. So
llama.cpp's converter permutes the rows of q and k (`LlamaModel.permute` in convert_hf_to_gguf.py), and this module
reverses that. `architectures.py` says for which. Others are not permuted.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from pipeline.config.settings import PreparedFormat
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.model_config import Layout, ModelConfig, Piece
from pipeline.runtime.model.model_folder import CONVERTED, NOTES
from pipeline.runtime.model.rope import LongRope
from pipeline.stages.prepare.architectures import architecture_of
from pipeline.stages.prepare.encoders import pair_templates
from pipeline.stages.prepare.encoders.pooler import with_pooler
from pipeline.stages.prepare.families.architecture import gate_up_slices, qkv_slices
from pipeline.stages.prepare.files import MAX_TEMPLATE_BYTES, shown
from pipeline.stages.prepare.gguf import encoders, gemma4
from pipeline.stages.prepare.gguf.architecture import GgufArchitecture, GgufKeys
from pipeline.stages.prepare.gguf.architectures import GGUF_ARCHITECTURES
from pipeline.stages.prepare.gguf.conversions import format_of, pieces_of, rotated_halves, summary
from pipeline.stages.prepare.gguf.drafts import DRAFTS, split_drafts
from pipeline.stages.prepare.gguf.file import GgufTensor, made_tensor
from pipeline.stages.prepare.gguf.in_place import is_kept, write_indexes
from pipeline.stages.prepare.gguf.metadata import BOS_KEY, Metadata, shortest
from pipeline.stages.prepare.gguf.parts import Parts, read_parts
from pipeline.stages.prepare.gguf.recurrent import delta_net
from pipeline.stages.prepare.gguf.ropes import ROPE_FREQUENCIES, read_scaling, with_rope_scaling
from pipeline.stages.prepare.gguf.tensor_names import FIRST_EXPERT, STACKED, differing_names, gguf_name, stacked_experts
from pipeline.stages.prepare.gguf.tokenizers import tokenizer
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import adds_bos, read_vocabulary
from pipeline.stages.prepare.gguf.unused_keys import refuse_changes, unused
from pipeline.stages.prepare.gguf.vision import mmproj
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.shape import check_shape, derived_head_dim
from pipeline.stages.prepare.sources.gguf_files import model_name
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import Shape, expected_shapes
from pipeline.stages.prepare.weights.weight_file import WEIGHTS, stored_tensors, write_weights

LONG_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"


def keys_of(architecture: str, eps: str) -> dict[str, str]:
    """The keys of an architecture for fields of ModelConfig."""
    keys = {
        "num_layers": "block_count",
        "hidden_size": "embedding_length",
        "intermediate_size": "feed_forward_length",
        "num_heads": "attention.head_count",
        "num_kv_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position": "context_length",
        "rms_norm_eps": eps,
        "rope_theta": "rope.freq_base",
        "sliding_window": "attention.sliding_window",
        "num_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    }
    return {field: f"{architecture}.{key}" for field, key in keys.items()} | {"vocab_size": "token_embd.weight"}


TEMPLATES = {
    "chat_template.jinja": ("tokenizer.chat_template", "tokenizer.chat_template.default"),
    "chat_template.tool_use.jinja": ("tokenizer.chat_template.tool_use",),
}
"""The keys of each template, the preferred one first."""

SAMPLING_KEYS: dict[str, tuple[str, type]] = {
    "general.sampling.temp": ("temperature", float),
    "general.sampling.top_p": ("top_p", float),
    "general.sampling.top_k": ("top_k", int),
    "general.sampling.min_p": ("min_p", float),
    "general.sampling.penalty_repeat": ("repetition_penalty", float),
}
"""Keys that llama.cpp's converter writes for those of generation_config.json, and their types."""

SUPPRESS_KEY = "tokenizer.ggml.suppress_tokens"

_QUANTIZATION = re.compile(r"[.-](?:i?q\d\w*|bf16|f16|f32|tq\d\w*|mxfp4)$", re.IGNORECASE)


def convert(
    paths: list[Path],
    folder: Path,
    quantization: PreparedFormat,
    progress: Progress,
    parts: Parts | None = None,
    projector: Path | None = None,
) -> None:
    """Write the model of a .gguf file, or of all its parts in order, to `folder`. `parts` has what is in them, if they
    have been read. `projector` is the file of its vision tower.

    Raises ModelError if it can't be served, or if the parts don't belong together.
    """
    path = paths[0]
    metadata, tensors = read_parts(paths) if parts is None else (parts[0], dict(parts[1]))
    rope_frequencies = tensors.pop(ROPE_FREQUENCIES, None)
    long_factors = [tensors.pop(name, None) for name in LONG_FACTORS]
    config = _config(metadata, tensors)
    architecture = _architecture(metadata)[1]
    interleaved_rope = architecture.interleaved_rope
    notes = split_drafts(tensors, config.num_layers) if architecture.has_drafts else []
    notes += gemma4.drop_unused(tensors, config)
    tensors |= xielu_tensors(metadata, config)
    if rope_frequencies is not None:
        with_scaling = gemma4.with_proportional_rope if architecture.reads_sizes else with_rope_scaling
        config = with_scaling(config, rope_frequencies, path)
    if any(factors is not None for factors in long_factors):
        config = _with_longrope(config, metadata, *long_factors)
    refuse_changes(metadata, _architecture(metadata)[0], config)

    def floats(tensor: GgufTensor) -> "np.ndarray[Any, Any]":
        return np.concatenate([piece.reshape(-1) for piece in pieces_of(tensor, None, False, path)])

    name = _architecture(metadata)[0]
    pooler = encoders.pooler_of(metadata, name, config, tensors, floats)
    if pooler is not None:
        rerank, labels = metadata.get(pair_templates.RERANK_KEY, str), encoders.labels_of(metadata, name)
        pooler = pair_templates.add_to_gguf(pooler, name, rerank, labels, folder)
    config = with_pooler(config, pooler)

    names = {name: gguf_name(name, differing_names(architecture, config)) for name in expected_shapes(config)}
    shapes = _checked_shapes(path, tensors, config, names)
    formats = {name: format_of(tensors[names[name]].kind) for name in shapes}
    targets = stored_tensors(config, shapes, formats, quantization)

    def pieces(name: str) -> Iterator["np.ndarray[Any, Any]"]:
        tensor = tensors[names[name]]
        keeps_blocks = targets[name].format == formats[name]
        order = _row_order(name, tensor, config) if interleaved_rope else None
        found = pieces_of(tensor, order, keeps_blocks, path)
        return delta_net.logarithms(found, tensor.name) if tensor.name.endswith(f".{delta_net.RATES}") else found

    vocabulary = read_vocabulary(metadata, config.vocab_size)
    config = msgspec.structs.replace(config, eos_ids=vocabulary.end_ids, special_tokens=vocabulary.names)
    built = tokenizer.build(vocabulary, str(path), progress.say)
    built.save(str(folder / "tokenizer.json"))
    if projector is not None:
        notes += mmproj.add_to_folder(projector, config, built, folder, progress)
    _write_templates(metadata, folder)
    kept = {
        name for name, target in targets.items() if quantization == "auto" and is_kept(tensors[names[name]], target)
    }
    heads = {name: config.head_dim for name in kept if interleaved_rope and _is_rotated(name)}
    converted_targets = {name: target for name, target in targets.items() if name not in kept}
    with progress.measure(f"converting {path.name}") as report:
        write_weights(folder, converted_targets, pieces, path, report)
    indexes = write_indexes(paths, folder, {name: (tensors[names[name]], targets[name]) for name in kept}, heads)
    config = msgspec.structs.replace(config, weight_files=[WEIGHTS, *indexes])
    matrices = {name: target for name, target in targets.items() if len(target.shape) > 1}
    if converted := summary((tensors[names[name]].kind, target.format) for name, target in matrices.items()):
        (folder / CONVERTED).write_text(f"{converted}\n", encoding="utf-8")
    if pooler is not None:
        pooler.write(folder)
    generation_config.save(_sampling(metadata), folder)
    if notes := notes + unused(metadata, _architecture(metadata)[0]):
        (folder / NOTES).write_text("".join(f"{note}\n" for note in notes), encoding="utf-8")
    config.save(folder)


XIELU = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
"""The parameters of the activation "xielu", and their shapes."""


def xielu_tensors(metadata: Metadata, config: ModelConfig) -> dict[str, GgufTensor]:
    """The parameters of each layer's activation, which files have under keys: once, or for each layer. Raises
    ModelError if they are missing."""
    made = {}
    for part, shape in XIELU.items() if config.activation == "xielu" else ():
        key = f"xielu.{part}"
        values = metadata.list_of(key, float) if isinstance(metadata.get(key, (float, list)), list) else None
        values = [metadata.need(key, float)] * config.num_layers if values is None else values
        if len(values) != config.num_layers:
            raise ModelError(
                f"{metadata.path}: {key} has {len(values)} values; the model has {config.num_layers} layers"
            )
        for layer, value in enumerate(values):
            tensor = made_tensor(f"blk.{layer}.xielu.{part}", np.full(shape, value, np.float32), metadata.path)
            made[tensor.name] = tensor
    return made


def read_supported(paths: list[Path]) -> Parts:
    """Reads only the headers. Raises ModelError if a file is not a .gguf file, or its architecture isn't supported."""
    parts = read_parts(paths)
    _architecture(parts[0])
    return parts


def name_of(path: Path) -> str:
    """The name of a file's model for clients."""
    return _QUANTIZATION.sub("", model_name(path))


def _write_templates(metadata: Metadata, folder: Path) -> None:
    """Write the chat templates. Without a default template, one that is named so is used; others are ignored."""
    for name, keys in TEMPLATES.items():
        found = ((key, template) for key in keys if (template := metadata.get(key, str)))
        for key, template in list(found)[:1]:
            if len(template.encode()) > MAX_TEMPLATE_BYTES:
                raise ModelError(
                    f"{metadata.path}: {key} has more than the {MAX_TEMPLATE_BYTES} bytes allowed for a template"
                )
            (folder / name).write_text(template, encoding="utf-8")


def _config(metadata: Metadata, tensors: dict[str, GgufTensor]) -> ModelConfig:
    path = metadata.path
    name, architecture = _architecture(metadata)
    keys = keys_of(name, architecture.eps)
    if not architecture.reads_experts:
        metadata.refuse_unless(f"{name}.expert_count", 0, "a mixture of experts")
    num_layers, hidden = (metadata.need(keys[field], int) for field in ("num_layers", "hidden_size"))
    inner = None
    if architecture.has_drafts:
        num_layers -= metadata.get(f"{name}.{DRAFTS}", int, 0)
    if name in delta_net.ARCHITECTURES:
        inner = metadata.get(keys["moe_intermediate_size"], int)
    heads = metadata.of_all_layers(keys["num_heads"], num_layers)
    head_dim = metadata.get(keys["head_dim"], int)
    if head_dim is None:
        head_dim = derived_head_dim(hidden, heads, path, keys)
    metadata.refuse_unless(f"{name}.attention.value_length", head_dim, "a value size other than the key size")
    rotary_dim = metadata.get(f"{name}.rope.dimension_count", int, head_dim)
    if "token_embd.weight" not in tensors:
        raise ModelError(f"{path}: the tensor token_embd.weight is missing")
    if not architecture.has_windows and not architecture.reads_windows:
        metadata.refuse_unless(keys["sliding_window"], 0, "a sliding window in layers that the file doesn't name")
    sliding_window = metadata.get(keys["sliding_window"], int) or None
    vocab_size = tensors["token_embd.weight"].shape[0]
    max_position = metadata.need(keys["max_position"], int)
    scaling = None if architecture.reads_scaling else read_scaling(metadata, name, max_position)
    stacked = "blk.0.attn_qkv.weight" in tensors
    fields: dict[str, Any] = {
        # Stored as float32.
        "rope_theta": shortest(metadata.get(keys["rope_theta"], float, 10000.0)),
        "rope_scaling": scaling,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
        "sliding_window": sliding_window if architecture.has_windows else None,
        "qkv_bias": f"blk.0.attn_{'qkv' if stacked else 'q'}.bias" in tensors,
        "out_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "head_bias": "output.bias" in tensors,
        **architecture.always,
    }
    config = ModelConfig(
        name=name_of(path),
        # llama.cpp uses one name for both; only a Mistral has a window.
        architecture="mistral" if name == "llama" and sliding_window else (architecture.model_type or name),
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=metadata.of_all_layers(
            keys["intermediate_size"], num_layers, inner, may_differ=architecture.reads_sizes
        ),
        num_heads=heads,
        num_kv_heads=metadata.of_all_layers(
            *(keys["num_kv_heads"], num_layers, heads),
            skips_zeros=architecture.skips_attention,
            may_differ=architecture.reads_sizes,
        ),
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=max_position,
        rms_norm_eps=shortest(metadata.need(keys["rms_norm_eps"], float)),
        tie_embeddings="output.weight" not in tensors,
        eos_ids=[],  # of the vocabulary, which is read later
        bos_id=metadata.token_id(BOS_KEY, vocab_size),
        add_bos=adds_bos(metadata),
        weight_files=[WEIGHTS],
        **fields,
    )
    check_shape(config, path, keys)
    read = architecture.read(GgufKeys(metadata, name, tensors, num_layers), config)
    config = msgspec.structs.replace(config, **read)
    check_shape(config, path, keys)
    if config.rotary_dim == 0:  # nothing is rotated
        config = msgspec.structs.replace(config, rope_scaling=None)
    pieces = qkv_slices(config, "self_attn.qkv_proj") if stacked else {}
    if config.delta is not None:
        pieces = delta_net.pieces_of(config)
    if config.gated and "blk.0.ffn_gate.weight" not in tensors:
        pieces |= gate_up_slices(config, STACKED)
    experts: dict[str, Piece] = {}
    if config.experts is not None and not any(FIRST_EXPERT.fullmatch(tensor) for tensor in tensors):
        experts = stacked_experts(tensors, config.experts.intermediate_size)
    layout, modules = Layout(pieces=pieces, experts=experts), architecture_of(config.architecture).layout(config)
    return msgspec.structs.replace(config, layout=layout, modules=None if modules == layout else modules)


ENCODERS = frozenset(
    {"nomic-bert-moe", "jina-bert-v2", "jina-bert-v3", "neo-bert", "modern-bert", "eurobert", "t5encoder"}
    | {"llama-embed"}
)
"""Architectures of files for embeddings, most of them with a WordPiece vocabulary."""


def _architecture(metadata: Metadata) -> tuple[str, GgufArchitecture]:
    found = metadata.need("general.architecture", str)
    if found in GGUF_ARCHITECTURES:
        return found, GGUF_ARCHITECTURES[found]
    if found == mmproj.ARCHITECTURE:
        raise ModelError(f"{metadata.path} is a projector of images: name the file of its language model beside it")
    what = "an encoder that" if found in ENCODERS else "which"
    raise ModelError(
        f"{metadata.path}: general.architecture is {shown(found)}, {what} is not supported; `pipeline models "
        "--supported` lists those that are"
    )


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """The file's sampling parameters and the tokens that llama.cpp never samples, by the keys of
    generation_config.json."""
    given = {name: metadata.get(key, kind) for key, (name, kind) in SAMPLING_KEYS.items()}
    named = {name: shortest(value) if isinstance(value, float) else value for name, value in given.items()}
    return {**named, "suppress_tokens": metadata.list_of(SUPPRESS_KEY, int)}


def _with_longrope(
    config: ModelConfig, metadata: Metadata, long: GgufTensor | None, short: GgufTensor | None
) -> ModelConfig:
    """The config with LongRoPE, whose factors are tensors. Raises ModelError unless the file has all that it needs."""
    name = metadata.need("general.architecture", str)
    if config.rope_scaling is not None:
        raise ModelError(f"{metadata.path}: {LONG_FACTORS[0]} beside another rope scaling is not supported")
    dim = config.head_dim if config.rotary_dim is None else config.rotary_dim
    factors = []
    for tensor_name, tensor in zip(LONG_FACTORS, (long, short), strict=True):
        if tensor is None or tensor.kind != gguf.GGMLQuantizationType.F32 or tensor.shape != (dim // 2,):
            raise ModelError(f"{metadata.path}: tensor {tensor_name} must be F32 of {dim // 2} numbers")
        factors.append(tuple(shortest(value) for value in tensor.data.view("<f4").tolist()))
    rope = LongRope(
        original_max_position=metadata.need(f"{name}.rope.scaling.original_context_length", int),
        magnitude=shortest(metadata.get(f"{name}.rope.scaling.attn_factor", float, 1.0)),
        long_factors=factors[0],
        short_factors=factors[1],
    )
    config = msgspec.structs.replace(config, rope_scaling=rope)
    check_shape(config, metadata.path, keys_of(name, ""))
    return config


def _checked_shapes(
    path: Path, tensors: dict[str, GgufTensor], config: ModelConfig, names: Mapping[str, str]
) -> dict[str, Shape]:
    """The tensors to write. Raises ModelError if one is missing or has another shape, or if the file has others."""
    shapes = expected_shapes(config)
    for name, shape in shapes.items():
        tensor = tensors.get(names[name])
        if tensor is None:
            raise ModelError(f"{path}: the tensor {names[name]} is missing")
        if _without_ones(tensor.shape) != _without_ones(shape):  # a matrix of one row is a vector
            raise ModelError(f"{path}: tensor {tensor.name} has shape {tensor.shape}, but the metadata says {shape}")
    unknown = set(tensors) - set(names.values())
    if unknown:
        raise ModelError(f"{path}: tensor {min(unknown)[:200]} is not part of the model that the metadata describes")
    return shapes


def _without_ones(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _row_order(name: str, tensor: GgufTensor, config: ModelConfig) -> "np.ndarray[Any, Any] | None":
    """For each row of q or k, its row in a file with `interleaved_rope`; None for other tensors."""
    return rotated_halves(tensor.shape[0], config.head_dim) if _is_rotated(name) else None


def _is_rotated(name: str) -> bool:
    return "q_proj" in name or "k_proj" in name
