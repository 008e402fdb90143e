"""A .gguf file in transformers, for `check-model`: dequantized, with matrices rounded to bfloat16 as prepare stores
them.

transformers reads the config of some files itself (`from_pretrained(gguf_file=...)`). That is compared with what
prepare reads: a difference is an error that names both values, unless transformers has its default for what it does not
know of a file. `gguf_rebuilt` has the model.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import msgspec
import torch

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import PoolingKind
from pipeline.stages.prepare.check_model import gguf_rebuilt
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.parts import read_parts
from pipeline.stages.prepare.gguf.ropes import ROPE_FREQUENCIES
from pipeline.stages.prepare.sources.config_json import ConfigReader
from pipeline.stages.prepare.sources.gguf_files import parts_of
from pipeline.stages.prepare.sources.source import ModelError

SUFFIX = ".gguf"
ELSEWHERE = "; check the model's folder in Hugging Face layout instead, or the kernels with --fidelity"
COMPARED = (
    "compared with what transformers reads of the same file, both with matrices in bfloat16: neither the file's blocks "
    "(--fidelity measures those) nor its tokenizer are compared"
)
NOT_COMPUTED = {"name", "eos_ids", "bos_id", "add_bos", "weight_files", "layout", "modules", "eagle3", "max_position"}
NOT_COMPUTED |= {"special_tokens", "split_special_tokens", "vocab_size", "norm_offset"}
"""Fields of ModelConfig that logits do not depend on, that tensors have to fit, or that are in the file's tensors."""
POOLED = {"pooler", "tie_embeddings"}
"""The same of models that generate no text: what follows the hidden states is computed by pooled_reference."""
WINDOW = {"sliding_window", "sliding_layers"}
ROUTERS = ("mlp.gate.weight", "mlp.shared_expert_gate.weight", "router.proj.weight", "e_score_correction_bias")
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


def how_compared(path: Path, ours: ModelConfig, num_tokens: int) -> list[str]:
    """Lines that say what is compared. `ours` is what prepare has read of the file. A window longer than `num_tokens`
    does not count. Raises ModelError if transformers reads another model of the file, or has no such model."""
    ignored = (
        NOT_COMPUTED
        | (set() if ours.generates else POOLED)
        | (WINDOW if (ours.sliding_window or 0) >= num_tokens else set())
    )
    _, tensors = read_parts(parts_of(path))
    has_frequencies = ROPE_FREQUENCIES in tensors
    rebuilt = _reading(path, gguf_rebuilt.config_of(path, ours).to_dict(), ours.name)
    if differing := _differing(ours, rebuilt, ignored | ({"rope_scaling"} if has_frequencies else set())):
        raise ModelError(f"{path}: transformers has no model like it: {_words(ours, rebuilt, differing)}{ELSEWHERE}")
    try:
        config = _config(path)
    except ModelError as error:
        return [COMPARED, f"{error}, so its keys are compared with nothing: they are as prepare reads them"]
    theirs = _reading(path, config.to_dict(), ours.name)
    differing = _differing(ours, theirs, ignored | ({"rope_scaling"} if has_frequencies else set()))
    defaults = _reading(path, _default_of(config, ours.num_layers), ours.name)
    if others := [name for name in differing if not _agree(_plain(theirs, name), _plain(defaults, name))]:
        raise ModelError(f"{path}: transformers reads the file otherwise: {_words(ours, theirs, others)}{ELSEWHERE}")
    unread = f"transformers does not read {', '.join(differing)} of the file, so prepare's reading counts"
    return [COMPARED, *([unread] if differing else [])]


def head_of(path: Path, ours: ModelConfig) -> tuple[PoolingKind, list[tuple[Any, Any, str]]]:
    """How the hidden states of a model that generates no text are pooled, and the layers after that: matrix, bias or
    None, and activation."""
    parts = parts_of(path)
    return gguf_rebuilt.pooling_of(parts, ours), gguf_rebuilt.head_of(path, parts, ours)


def load(path: Path, dtype: torch.dtype, ours: ModelConfig) -> Any:
    """The model, with matrices in bfloat16. Raises ModelError if transformers has not all of its tensors."""
    model = gguf_rebuilt.load(path, parts_of(path), ours)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "norm" not in name and not name.endswith(ROUTERS):
                parameter.copy_(parameter.bfloat16())
    return model.to(dtype).eval()


def _reading(path: Path, config: dict[str, Any], name: str) -> ModelConfig:
    """What prepare reads of a config of transformers. Raises ModelError."""
    try:
        return ConfigReader(path, config).model(name, [], {})
    except ModelError as error:
        raise ModelError(f"transformers reads another model of the file: {error}{ELSEWHERE}") from error


def _default_of(config: Any, num_layers: int) -> dict[str, Any]:
    """The architecture's config in transformers, of which it takes what it does not read of a file."""
    from transformers import AutoConfig

    given = {"bos_token_id": None, "eos_token_id": 0, "pad_token_id": None, "num_hidden_layers": num_layers}
    found: dict[str, Any] = AutoConfig.for_model(config.model_type, **given).to_dict()
    return found


def _differing(ours: ModelConfig, theirs: ModelConfig, ignored: set[str]) -> list[str]:
    names = (name for name in ModelConfig.__struct_fields__ if name not in ignored)
    return [name for name in names if not _agree(_plain(ours, name), _plain(theirs, name))]


def _words(ours: ModelConfig, theirs: ModelConfig, names: list[str]) -> str:
    return ", ".join(f"{name} {shown(_plain(theirs, name))} (here {shown(_plain(ours, name))})" for name in names)


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
    return ModelError(f"transformers can't read the keys of {path} ({words})")


def _plain(model: ModelConfig, name: str) -> Any:
    """A field, in numbers, texts, lists and objects. All layers may be listed, or None."""
    value = msgspec.to_builtins(getattr(model, name))
    if name == "sliding_layers" and (value is None or model.sliding_window is None):
        return list(range(model.num_layers)) if model.sliding_window is not None else []
    if name == "query_scale" and value is None:
        return model.head_dim**-0.5
    if name == "rotary_dim":  # the share, which is what configs have
        return 1.0 if value is None else value / model.head_dim
    return None if name == "qk_norm_kind" and not model.qk_norm else value


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
