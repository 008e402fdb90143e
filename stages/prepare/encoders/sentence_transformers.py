"""Reads the files that sentence-transformers adds to a model's folder.

modules.json                       the modules, in order: Transformer, Pooling, Dense, Normalize, or LogitScore
1_Pooling/config.json, …           a module's configuration, in the folder that modules.json names
2_Dense/model.safetensors, …       its weights
config_sentence_transformers.json  the prompts
sentence_bert_config.json          the longest text; whether inputs are chats, and variables for their template
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from pipeline.runtime.model.pooler import HeadActivation, PoolingKind
from pipeline.runtime.model.weight_headers import TensorEntry
from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, find, shown
from pipeline.stages.prepare.shape import MAX_COUNT
from pipeline.stages.prepare.sources.layout import SINGLE
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import STORED, float_rows, read_header

MODULES = "modules.json"
SETTINGS = "config_sentence_transformers.json"
LENGTHS = tuple(
    f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta", "distilbert", "camembert")
)
CONFIG = "config.json"
WITH_CONFIG = ("Pooling", "Dense", "LogitScore")
"""Modules whose folder has a config.json."""
MAX_MODULES = 16
MAX_PROMPTS = 256
MAX_PROMPT_CHARS = 16_384

POOLINGS: dict[str, PoolingKind] = {
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
}
"""Names of poolings since version 5.3; before, each was a flag `pooling_mode_NAME`."""
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS: dict[str, HeadActivation] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""The last parts of torch's names."""

FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class DenseModule(NamedTuple):
    """activation(weight x + bias)"""

    weight: FloatArray
    bias: FloatArray | None
    activation: HeadActivation


class LogitScore(NamedTuple):
    """The logit of one token minus that of another: a reranker of which yes or no is asked."""

    true_id: int
    false_id: int | None


@dataclass(slots=True)
class Modules:
    """What the files say."""

    pooling: PoolingKind | None = None
    dense: list[DenseModule] = field(default_factory=list)
    normalize: bool = False
    score: LogitScore | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_seq_length: int | None = None
    label_activation: str | None = None
    """Torch's name of what a cross-encoder applies to its logits."""
    pairs_are_chats: bool = False
    """The model's chat template makes the prompt of a pair, if it writes both texts."""
    pair_variables: str = ""
    """As in `PairTemplates`."""


class _Module(msgspec.Struct):
    type: str
    path: str = ""


class _Settings(msgspec.Struct):
    prompts: dict[str, str] | None = None
    default_prompt_name: str | None = None
    activation_fn: str | None = None


class _Dense(msgspec.Struct):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str | None = None


class _LogitScore(msgspec.Struct):
    true_token_id: int
    false_token_id: int | None = None


def extra_files(source: Path) -> list[str]:
    """The names of the files below the folder that `read` reads, for what depends on their content."""
    if find(source, MODULES) is None:
        return []
    folders = [module.path for module in _modules(source) if module.path]
    return [f"{folder}/{name}" for folder in folders for name in (CONFIG, SINGLE)]


def configs(source: Path) -> list[str]:
    """Of these, the files that the folder must have."""
    if find(source, MODULES) is None:
        return []
    return [f"{module.path}/{CONFIG}" for module in _modules(source) if _kind(module) in WITH_CONFIG]


def read(source: Path) -> Modules | None:
    """What the files of a folder say; None if it has no modules.json. Raises ModelError, naming the file and the
    field, if they are invalid or have a module that is not supported."""
    if find(source, MODULES) is None:
        return None
    found = Modules()
    for module in _modules(source):
        _add(found, module, source)
    settings = _decoded(source, SETTINGS, _Settings) or _Settings()
    found.prompts, found.default_prompt = _prompts(settings, source / SETTINGS)
    found.label_activation = settings.activation_fn
    found.max_seq_length = _max_seq_length(source)
    found.pairs_are_chats, found.pair_variables = _chats(source)
    return found


def _modules(source: Path) -> list[_Module]:
    path = source / MODULES
    modules: list[_Module] = decode_json(path, MAX_JSON_BYTES, list[_Module])
    if not 1 <= len(modules) <= MAX_MODULES:
        raise ModelError(f"{path} has {len(modules)} modules; it must have 1 to {MAX_MODULES}")
    return modules


def _kind(module: _Module) -> str:
    return module.type.rpartition(".")[2]


def _add(found: Modules, module: _Module, source: Path) -> None:
    kind, path = _kind(module), source / MODULES
    name = f"{module.path}/{CONFIG}"
    match kind:
        case "Transformer":
            if module.path:
                raise ModelError(
                    f"{path}: the path of module {kind} is {shown(module.path)}; the model must be in the folder itself"
                )
        case "Pooling":
            if found.pooling is not None:
                raise ModelError(f"{path} has several Pooling modules")
            found.pooling = _pooling(_required(source, name, dict[str, Any]), source / name)
        case "Dense":
            if found.pooling is None:
                raise ModelError(f"{path}: a Dense module before Pooling is not supported")
            found.dense.append(_dense(source, module.path))
        case "Normalize":
            found.normalize = True
        case "LogitScore":
            values = _required(source, name, _LogitScore)
            found.score = LogitScore(values.true_token_id, values.false_token_id)
        case _:
            raise ModelError(
                f"{path}: the module {shown(module.type)} is not supported; supported are Transformer, Pooling, Dense, "
                "Normalize and LogitScore"
            )


def _pooling(config: dict[str, Any], path: Path) -> PoolingKind:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in OLD_POOLINGS.items() if config.get(key) is True]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1:
        raise ModelError(f"{path}: pooling_mode is {shown(modes)}; exactly one is supported")
    if not isinstance(modes[0], str) or modes[0] not in POOLINGS:
        raise ModelError(f"{path}: pooling_mode is {shown(modes[0])}; supported are {', '.join(POOLINGS)}")
    if config.get("include_prompt") is False:
        raise ModelError(f"{path}: include_prompt is false: leaving prompts out of the pooling is not supported")
    return POOLINGS[modes[0]]


def _dense(source: Path, folder: str) -> DenseModule:
    path = source / folder / CONFIG
    values = _required(source, f"{folder}/{CONFIG}", _Dense)
    for key, size in (("in_features", values.in_features), ("out_features", values.out_features)):
        if not 1 <= size <= MAX_COUNT:
            raise ModelError(f"{path}: {key} is {size}; it must be an integer from 1 to {MAX_COUNT}")
    named = "torch.nn.modules.activation.Tanh" if values.activation_function is None else values.activation_function
    activation = ACTIVATIONS.get(named.rpartition(".")[2])
    if activation is None:
        raise ModelError(f"{path}: activation_function is {shown(named)}; supported are {', '.join(ACTIVATIONS)}")
    weights = find(source, f"{folder}/{SINGLE}")
    if weights is None:
        raise ModelError(f"{source / folder / SINGLE} is missing: only safetensors are supported")
    tensors = read_header(weights)
    weight = read_tensor(weights, tensors, "linear.weight", (values.out_features, values.in_features))
    bias = read_tensor(weights, tensors, "linear.bias", (values.out_features,)) if values.bias else None
    return DenseModule(weight, bias, activation)


def read_tensor(path: Path, tensors: dict[str, TensorEntry], name: str, shape: tuple[int, ...]) -> FloatArray:
    """A tensor of a file as float32. Raises ModelError unless it has this shape."""
    entry = tensors.get(name)
    if entry is None:
        raise ModelError(f"{path} has no tensor {name!r}")
    if entry.shape != shape:
        raise ModelError(f"{path}: tensor {name!r} has shape {shown(entry.shape)}, its config.json says {shape}")
    if entry.dtype not in STORED:
        raise ModelError(f"{path}: tensor {name!r} is {entry.dtype}; weights must be one of {', '.join(STORED)}")
    (array,) = float_rows(path, entry, shape[0])
    return np.ascontiguousarray(array)


def _prompts(settings: _Settings, path: Path) -> tuple[dict[str, str], str | None]:
    prompts, default = settings.prompts or {}, settings.default_prompt_name
    if len(prompts) > MAX_PROMPTS or any(len(text) > MAX_PROMPT_CHARS for text in (*prompts, *prompts.values())):
        raise ModelError(
            f"{path}: prompts has {len(prompts)} texts; at most {MAX_PROMPTS} of {MAX_PROMPT_CHARS} characters are "
            "supported"
        )
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name is {shown(default)}, which prompts does not have")
    return prompts, default


def _max_seq_length(source: Path) -> int | None:
    for name in LENGTHS:
        values = _decoded(source, name, dict[str, Any])
        if values is None:
            continue
        if values.get("do_lower_case") is True:
            raise ModelError(f"{source / name}: do_lower_case is true: the tokenizer must do that itself")
        length = values.get("max_seq_length")
        if length is None:
            return None
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= MAX_COUNT:
            raise ModelError(f"{source / name}: max_seq_length is {shown(length)}; it must be a positive integer")
        return length
    return None


NOT_VARIABLES = ("max_length", "padding", "restore_suffix", "return_tensors", "truncation")
"""Keys of `processing_kwargs.chat_template` that are no variables of the template."""


def _chats(source: Path) -> tuple[bool, str]:
    """Whether inputs are made by the chat template, and the JSON of its variables."""
    values: dict[str, Any] = next(
        (found for name in LENGTHS if (found := _decoded(source, name, dict[str, Any])) is not None), {}
    )
    modalities, kwargs = values.get("modality_config"), values.get("processing_kwargs")
    of_template = kwargs.get("chat_template") if isinstance(kwargs, dict) else None
    if of_template is not None and not isinstance(of_template, dict):
        raise ModelError(f"{source / LENGTHS[0]}: processing_kwargs.chat_template is {shown(of_template)}, no object")
    variables = {key: value for key, value in (of_template or {}).items() if key not in NOT_VARIABLES}
    is_chat = isinstance(modalities, dict) and "message" in modalities
    return is_chat, msgspec.json.encode(variables).decode() if variables else ""


def _decoded(source: Path, name: str, kind: Any) -> Any:
    """A JSON file of the folder as `kind`; None if it is missing. Raises ModelError if it is something else."""
    path = find(source, name)
    return None if path is None else decode_json(path, MAX_JSON_BYTES, kind)


def _required(source: Path, name: str, kind: Any) -> Any:
    values = _decoded(source, name, kind)
    if values is None:
        raise ModelError(f"{source / name} is missing, which {MODULES} names")
    return values
