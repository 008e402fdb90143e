"""A .gguf file in transformers, for `check-model`: dequantized, with matrices rounded to bfloat16 as prepare stores
them.

transformers' own `from_pretrained(gguf_file=...)` needs one more package, and ignores tensors without a word. And it
takes its defaults for what a file does not say, or for what it does not know of a file: then there is nothing to
compare with, and the difference is an error that names both values.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch

from pipeline.runtime.model_folder import ModelConfig
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.model import ROPE_FREQUENCIES
from pipeline.stages.prepare.gguf.parts import read_parts
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.gguf_files import parts_of
from pipeline.stages.prepare.sources.source import ModelError

SUFFIX = ".gguf"
ROPE = "rope_"
"""Beginning of the names of tensors that change what is computed, and that transformers ignores. Those of
`ROPE_FREQUENCIES` divide the frequencies, as in llama.cpp: `load` does that."""
ELSEWHERE = "; check the model's folder in Hugging Face layout instead, or the kernels with --fidelity"
COMPARED = (
    "compared with what transformers reads of the same file, both with matrices in bfloat16: neither the file's blocks "
    "(--fidelity measures those) nor its tokenizer are compared"
)
NOT_COMPUTED = {"name", "eos_ids", "bos_id", "add_bos", "weight_files", "layout", "modules", "eagle3", "max_position"}
NOT_COMPUTED |= {"special_tokens", "split_special_tokens", "vocab_size", "norm_offset"}
"""Fields of ModelConfig that logits do not depend on, that tensors have to fit, or that are in the file's tensors."""
WINDOW = {"sliding_window", "sliding_layers"}
FUSED = "mlp.experts.gate_up_proj"
"""One tensor in transformers, and two in the file."""
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight")
"""Matrices that prepare stores in float32."""
UNREAD = {
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
    "qwen3": {"attention.key_length": "head_dim"},
}
"""Keys of sizes that transformers has defaults for instead, and their names in its config. Tensors have to fit them."""
TOLERANCE = 1e-6
"""Relative, of numbers: files have them in float32."""


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == SUFFIX and path.is_file()


def require_readable(path: Path) -> Path:
    """The file, the first one if it is one of several parts. Raises ModelError if transformers reads only a part of its
    model."""
    path = parts_of(path)[0]
    _, tensors = read_parts(parts_of(path))
    ignored = (name for name in tensors if name.startswith(ROPE) and name != ROPE_FREQUENCIES)
    if (name := next(ignored, None)) is not None:
        raise ModelError(f"{path}: transformers ignores the tensor {shown(name)}{ELSEWHERE}")
    return path


def require_same_reading(path: Path, ours: ModelConfig, num_tokens: int) -> None:
    """Raises ModelError if transformers reads another model of the file than prepare did, `ours`. A window longer than
    `num_tokens` does not count."""
    ignored = NOT_COMPUTED | (WINDOW if (ours.sliding_window or 0) >= num_tokens else set())
    _, tensors = read_parts(parts_of(path))
    ignored |= {"rope_scaling"} if ROPE_FREQUENCIES in tensors else set()
    config = _config(path)
    try:
        theirs = ConfigReader(path, config.to_dict()).model(ours.name, [], {})
    except ModelError as error:
        raise ModelError(f"transformers reads another model of the file: {error}{ELSEWHERE}") from error
    differing = [
        f"{name} {shown(other)} (here {shown(mine)})"
        for name in ModelConfig.__struct_fields__
        if name not in ignored and not _agree(mine := _plain(ours, name), other := _plain(theirs, name))
    ]
    if differing:
        raise ModelError(f"{path}: transformers reads the file otherwise: {', '.join(differing)}{ELSEWHERE}")


def load(path: Path, dtype: torch.dtype) -> Any:
    """The model. Raises ModelError if transformers can't load it, or not all of it."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = _config(path)
    _, tensors = read_parts(parts_of(path))
    divisors = tensors.pop(ROPE_FREQUENCIES, None)  # prepare has checked its type and shape
    try:
        how = {"attn_implementation": "eager"} if getattr(config, "attn_logit_softcapping", None) else {}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **how)
        with redirect_stderr(StringIO()), _as_one_file(path):  # its progress bar
            state = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
        left = model.load_state_dict(state, strict=False)
        model.tie_weights()
        if divisors is not None:
            factors = torch.from_numpy(divisors.data.view("<f4").copy())
            for name in ("inv_freq", "original_inv_freq"):
                getattr(model.model.rotary_emb, name).div_(factors)
    except Exception as error:  # transformers documents no exceptions
        raise _cannot_load(path, error) from error
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else ()
    if missing := sorted(set(left.missing_keys) - set(tied)):
        raise ModelError(
            f"{path}: transformers finds no weights for {shown(missing[0])} and makes up {len(missing)} tensors"
            f"{ELSEWHERE}"
        )
    num_read = sum(2 if name.endswith(FUSED) else 1 for name in state)
    if num_ignored := len(tensors) - num_read + len(left.unexpected_keys):
        raise ModelError(f"{path}: transformers ignores {num_ignored} of its {len(tensors)} tensors{ELSEWHERE}")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and not name.endswith(ROUTERS):
                parameter.copy_(parameter.bfloat16())
    return model.to(dtype).eval()


def _config(path: Path) -> Any:
    """The file's config in transformers, with the sizes that transformers doesn't read. Raises ModelError."""
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with _as_one_file(path):
            config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers documents no exceptions
        raise _cannot_load(path, error) from error
    metadata, _ = read_parts(parts_of(path))
    architecture = metadata.need("general.architecture", str)
    for key, name in UNREAD.get(architecture, {}).items():
        if (size := metadata.get(f"{architecture}.{key}", int)) is not None:
            setattr(config, name, size)
    return config


@contextmanager
def _as_one_file(path: Path) -> Iterator[None]:
    """Let transformers, which reads one file, read all parts of a model as one."""
    if len(paths := parts_of(path)) == 1:
        yield
        return
    reader = gguf.GGUFReader

    def read_all(_: Any) -> "_Parts":
        return _Parts([reader(part) for part in paths])

    gguf.GGUFReader = read_all
    try:
        yield
    finally:
        gguf.GGUFReader = reader


class _Parts:
    """What transformers uses of a reader: the keys of the first part, and the tensors of all."""

    def __init__(self, readers: "list[gguf.GGUFReader]") -> None:
        self.fields = readers[0].fields
        self.tensors = [tensor for reader in readers for tensor in reader.tensors]


def _cannot_load(path: Path, error: Exception) -> ModelError:
    words = (str(error) or type(error).__name__).strip().splitlines()[0].rstrip(".:")
    return ModelError(f"transformers can't load {path}: {words}{ELSEWHERE}")


def _plain(model: ModelConfig, name: str) -> Any:
    """A field, in numbers, texts, lists and objects. All layers may be listed, or None."""
    value = msgspec.to_builtins(getattr(model, name))
    if name == "sliding_layers" and (value is None or model.sliding_window is None):
        return list(range(model.num_layers)) if model.sliding_window is not None else []
    if name in ("rotary_dim", "query_scale") and value is None:
        return model.head_dim if name == "rotary_dim" else model.head_dim**-0.5
    return value


def _agree(mine: Any, theirs: Any) -> bool:
    match mine, theirs:
        case dict(), dict():
            return mine.keys() == theirs.keys() and all(_agree(mine[key], theirs[key]) for key in mine)
        case list(), list():
            return len(mine) == len(theirs) and all(map(_agree, mine, theirs))
        case (bool(), _) | (_, bool()):
            return bool(mine == theirs)
        case ((int() | float()), (int() | float())):
            return math.isclose(mine, theirs, rel_tol=TOLERANCE)
    return bool(mine == theirs)
