"""Makes a tiny checkpoint with random weights from a config.json.

It keeps the architecture and its special keys, and is small enough to run in a second.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pipeline.runtime.model import foreign
from pipeline.stages.prepare.architectures import find_architecture
from pipeline.stages.prepare.check_model.pooled_reference import loader_of
from pipeline.stages.prepare.families.architecture import text_part
from pipeline.stages.prepare.families.keys import ConfigFault
from pipeline.stages.prepare.files import MAX_JSON_BYTES, read, shown
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.source import ModelError

MAX_LAYERS = 4
MAX_KV_HEADS = 2
MAX_GROUP = 7
"""Query heads per KV head."""
MAX_HEAD_DIM = 32
MAX_POSITION = 512
MAX_WINDOW = 24
"""Size of a sliding window; shorter than the prompts of a check."""
ORIGINAL_POSITION = 64
"""`original_max_position_embeddings` of rope scaling."""
MAX_EXPERTS = 8
EXPERT_GROUPS = 2
"""Of models that have groups of experts."""
MAX_STATE_HEADS = 2
"""Heads of keys in a layer with a recurrent state."""
MAX_STATE_GROUP = 3
"""Heads of values for each of them."""
ROUTERS = ("mlp.gate.weight", "mlp.router.weight")
NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts")
NUMBERS_OF_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
MAX_WORDS, MAX_KEYS = 300, 10
"""Of an error message."""
MAY_BE_NULL = ("architectures", "bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "sliding_window")
"""Keys of config.json that are null in most files."""
BOS_ID, EOS_ID, VOCAB_SIZE = 256, 257, 320


def make(config_path: Path, folder: Path, seed: int) -> None:
    """Write a checkpoint and a tokenizer into `folder`. Raises ModelError if transformers can't make a causal model of
    the config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    data = read(config_path, MAX_JSON_BYTES)
    try:
        config = msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{config_path} is not a JSON object: {error}") from error
    config.pop("quantization_config", None)  # the random weights are floats
    try:
        config = text_part(config) or config
    except ConfigFault as error:
        raise ModelError(f"{config_path}: {error}") from error
    kind = config.pop("model_type", None)
    if not isinstance(kind, str):
        raise ModelError(f"{config_path}: model_type is {kind!r}; it must name an architecture")
    foreign.register(kind)
    torch.manual_seed(seed)
    try:
        full = AutoConfig.for_model(kind, **config)
    except Exception as error:  # transformers documents no exceptions
        _check_keys(config_path, data)
        raise ModelError(f"{config_path}: transformers does not take this config: {why(error, config)}") from error
    try:
        known = find_architecture(kind)
        is_encoder = known is not None and known.always.get("causal") is False
        is_encoder = is_encoder or bool(config.get("use_bidirectional_attention"))
        changes = shrink(full) | (_encoder_ids(full) if is_encoder else {})
        config.pop("per_layer_config", None)  # its keys are the numbers of layers
        shrunk = AutoConfig.for_model(kind, **{**config, **changes})
        loader = loader_of(config, is_encoder=is_encoder) or AutoModelForCausalLM
        model = loader.from_config(shrunk, dtype=torch.float32)
    except Exception as error:
        _check_keys(config_path, data)
        raise ModelError(
            f"{config_path}: cannot make a tiny model of model_type {kind!r} ({why(error, config)}): use a checkpoint "
            "with weights"
        ) from error
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # With norms of ones and biases of zeros, a check can't see whether they are read.
                parameter.add_(torch.randn_like(parameter) * (0.1 if "norm" in name else 0.5))
            if name.endswith(ROUTERS):
                # Like a trained router, it is rarely undecided, and then between experts with small weights.
                parameter.mul_(4)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.7, 1.1)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id, model.generation_config.bos_token_id = EOS_ID, BOS_ID
    model.save_pretrained(folder)
    _tokenizer().save(str(folder / "tokenizer.json"))
    # Not that of the model's class, which may be of another kind.
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")


def shrink(config: Any) -> dict[str, Any]:
    """As `_shrink`. Where layers differ, transformers warns of keys that are those of most."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    config.allow_global_per_layer_attribute_access = True
    try:
        changes = _shrink(config)
        if hasattr(config, "num_kv_shared_layers"):
            changes |= _fewer_sizes(config, changes)
            del changes["rope_scaling"]  # another name of rope_parameters
        if (heads := getattr(config, "num_attention_heads_per_layer", None)) is not None:
            changes["num_attention_heads_per_layer"] = _fewer_heads(config, list(heads), changes)
            del changes["rope_scaling"]
        return changes
    finally:
        logging.set_verbosity(level)


def _shrink(config: Any) -> dict[str, Any]:
    """The keys of a transformers config to change. Ratios and kinds stay: query heads per KV head, whether
    heads * head_dim is the hidden size, which layers have a window."""
    layers, heads = int(config.num_hidden_layers), int(config.num_attention_heads)
    kv_heads = next((int(getattr(config, name)) for name in NUMBERS_OF_KV_HEADS if getattr(config, name, None)), heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    fills = head_dim * heads == config.hidden_size
    num_layers = min(layers, MAX_LAYERS)
    num_kv_heads = min(kv_heads, MAX_KV_HEADS)
    num_heads = num_kv_heads * min(max(heads // kv_heads, 1), MAX_GROUP)
    new_head_dim = min(head_dim, MAX_HEAD_DIM)
    hidden_size = num_heads * (new_head_dim if fills else max(16, new_head_dim // 2))
    changes: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "hidden_size": hidden_size,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": min(int(config.max_position_embeddings), MAX_POSITION),
        # Keeps a matrix's outputs as large as its inputs. With less, as with transformers' default, all logits are
        # nearly equal; with more, every layer amplifies rounding errors.
        "initializer_range": hidden_size**-0.5,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if (inner := getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None)) is not None:
        name = "ffn_dim" if hasattr(config, "ffn_dim") else "intermediate_size"
        changes[name] = min(int(inner), 2 * hidden_size + 32)
    changes |= _fewer_experts(config, num_layers, hidden_size)
    if (key_heads := getattr(config, "linear_num_key_heads", None)) is not None:
        group = max(1, min(int(config.linear_num_value_heads) // int(key_heads), MAX_STATE_GROUP))
        changes["linear_num_key_heads"] = min(int(key_heads), MAX_STATE_HEADS)
        changes["linear_num_value_heads"] = group * changes["linear_num_key_heads"]
        for name in ("linear_key_head_dim", "linear_value_head_dim"):
            changes[name] = min(int(getattr(config, name)), MAX_HEAD_DIM)
    for name in NUMBERS_OF_KV_HEADS:
        if getattr(config, name, None) is not None:
            changes[name] = num_kv_heads
    if getattr(config, "head_dim", None) is not None or not fills:
        changes["head_dim"] = new_head_dim
    if getattr(config, "query_pre_attn_scalar", None) is not None:
        changes["query_pre_attn_scalar"] = new_head_dim
    if getattr(config, "word_embed_proj_dim", None) is not None:
        changes["word_embed_proj_dim"] = hidden_size
    if getattr(config, "no_rope_layers", None) is not None:
        changes["no_rope_layers"] = [int((i + 1) % num_layers != 0) for i in range(num_layers)]
    if getattr(config, "sliding_window", None):
        changes["sliding_window"] = min(int(config.sliding_window), MAX_WINDOW)
    if getattr(config, "max_window_layers", None) is not None:
        first = int(config.max_window_layers)
        changes["max_window_layers"] = num_layers if first >= layers else -(-first * num_layers // layers)
    if (kinds := getattr(config, "layer_types", None)) is not None:
        changes["layer_types"] = _fewer(list(kinds), num_layers)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope:
        by_layer = {name: value for name, value in rope.items() if isinstance(value, dict)}
        shrunk = {name: _shrink_rope(value, new_head_dim) for name, value in by_layer.items()}
        changes["rope_parameters"] = shrunk or _shrink_rope(rope, new_head_dim)
        changes["rope_scaling"] = None
    if getattr(config, "original_max_position_embeddings", None) is not None:
        changes["original_max_position_embeddings"] = MAX_POSITION if "long_factor" in rope else ORIGINAL_POSITION
    return changes


def _fewer_sizes(config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes of a model whose layers have different sizes (Gemma 4). Half of the layers read the keys and values
    of others, if any do; these have layers of all kinds."""
    num_layers, kinds = changes["num_hidden_layers"], list(config.layer_types)
    full = config.per_layer_config[kinds.index("full_attention")]
    found: dict[str, Any] = {"global_head_dim": min(int(full.head_dim), 2 * MAX_HEAD_DIM)}
    if int(full.num_key_value_heads) != int(config.num_key_value_heads):
        found["num_global_key_value_heads"] = 1
    if (shared := int(getattr(config, "num_kv_shared_layers", 0))) > 0:
        own = num_layers // 2
        parts = kinds[: len(kinds) - shared], kinds[len(kinds) - shared :]
        found["layer_types"] = _fewer(parts[0], own) + _fewer(parts[1], num_layers - own)
        found["num_kv_shared_layers"] = num_layers - own
    if size := getattr(config, "hidden_size_per_layer_input", 0):
        found["hidden_size_per_layer_input"] = min(int(size), MAX_HEAD_DIM)
        found["vocab_size_per_layer_input"] = VOCAB_SIZE
    return found


def _fewer_heads(config: Any, heads: list[int], changes: Mapping[str, Any]) -> list[int]:
    """The query heads of each layer, with the ratios to KV heads of layers of the same kind."""
    kinds, kv_heads = list(config.layer_types), int(config.num_key_value_heads)
    groups = [min(max(heads[kinds.index(kind)] // kv_heads, 1), MAX_GROUP) for kind in changes["layer_types"]]
    return [int(changes["num_key_value_heads"]) * group for group in groups]


def _encoder_ids(config: Any) -> dict[str, Any]:
    """The ids of special tokens that encoders have, within the vocabulary. Positions begin after that of padding."""
    names = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    found = {name: getattr(config, name, None) for name in names}
    return {name: value if value < VOCAB_SIZE else 0 for name, value in found.items() if value is not None}


def _fewer_experts(config: Any, num_layers: int, hidden_size: int) -> dict[str, Any]:
    """The changes of a mixture of experts; none of other models. Some experts stay unused by a token."""
    changes: dict[str, Any] = {}
    for name in NUMBERS_OF_EXPERTS:
        if (num := getattr(config, name, None)) is not None:
            changes[name] = min(int(num), MAX_EXPERTS)
            chosen = "top_k_experts" if hasattr(config, "top_k_experts") else "num_experts_per_tok"
            changes[chosen] = min(int(getattr(config, chosen)), max(1, changes[name] // 2))
    if not changes:
        return changes
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if (inner := getattr(config, name, None)) is not None:
            changes[name] = min(int(inner), hidden_size + 32)
    if (groups := getattr(config, "n_group", None)) is not None and groups > 1:
        num_chosen = EXPERT_GROUPS * int(config.topk_group) // int(groups)
        changes["n_group"], changes["topk_group"] = EXPERT_GROUPS, min(max(1, num_chosen), EXPERT_GROUPS)
    for name in ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"):
        if (first := getattr(config, name, None)) is not None:
            changes[name] = min(int(first), num_layers - 1)
    for name in ("moe_layer_end_index", "moe_layer_interval"):
        if (value := getattr(config, name, None)) is not None:
            changes[name] = min(int(value), num_layers - (name == "moe_layer_end_index"))
    if (step := getattr(config, "decoder_sparse_step", None)) is not None:
        changes["decoder_sparse_step"] = min(int(step), num_layers)
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        changes["mlp_layer_types"] = _fewer(list(kinds), num_layers)
    if (dense := getattr(config, "mlp_only_layers", None)) is not None:
        changes["mlp_only_layers"] = [layer for layer in dense if layer < num_layers - 1]
    return changes


def _shrink_rope(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters of a rotary embedding for heads of size `head_dim`."""
    changes: dict[str, Any] = {}
    if "original_max_position_embeddings" in rope:
        # With LongRoPE, transformers computes prompts up to this length with other factors than longer ones.
        changes["original_max_position_embeddings"] = MAX_POSITION if "long_factor" in rope else ORIGINAL_POSITION
    num = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            factors = rope[name]
            changes[name] = [factors[i * len(factors) // num] for i in range(num)]
    return {**rope, **changes}


def _check_keys(config_path: Path, data: bytes) -> None:
    """Raises ModelError if prepare knows which key of a config.json is wrong. transformers often does not say it."""
    config = msgspec.json.decode(data, type=dict[str, Any])
    if find_architecture(config.get("model_type")) is not None:
        ConfigReader(config_path, config).model("tiny", [], {})


def why(error: Exception, config: Mapping[str, Any]) -> str:
    """transformers' reason not to take a config.json, in one line, with the keys that may be the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    words = f"{type(error).__name__}: {' '.join(lines)[:MAX_WORDS]}" if lines else type(error).__name__
    nulls = [key for key, value in config.items() if value is None and key not in MAY_BE_NULL]
    return f"{words}; its null keys are {', '.join(map(shown, nulls[:MAX_KEYS]))}" if nulls else words


def _fewer(kinds: list[str], num: int) -> list[str]:
    """`num` layer kinds sampled evenly from `kinds`, with at least one of each."""
    taken = [kinds[i * len(kinds) // num] for i in range(num)]
    for i, kind in enumerate(sorted(set(kinds) - set(taken)), 1):
        taken[-i] = kind
    return taken


def _tokenizer() -> Tokenizer:
    """A tokenizer with one id per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    return tokenizer
