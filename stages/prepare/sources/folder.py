"""A folder in Hugging Face layout as ours: its config in our words, its tokenizer and template beside it, and its
weights read where they are, or quantised."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from tokenizers import Tokenizer

from pipeline.config.settings import PreparedFormat
from pipeline.runtime.model_folder import Architecture, Llama3Rope, ModelConfig
from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES, ConfigFault, flags_of
from pipeline.stages.prepare.files import (
    MAX_INDEX_BYTES,
    MAX_JSON_BYTES,
    MAX_TEMPLATE_BYTES,
    MAX_TOKENIZER_BYTES,
    find,
    read,
    shown,
)
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.shape import MAX_LAYERS, as_float, check_ids, check_shape, derived_head_dim
from pipeline.stages.prepare.sources.source import ModelError, is_file
from pipeline.stages.prepare.tensors import check_tensors
from pipeline.stages.prepare.tokenizer_check import MAX_CONVERTED_ID, check_token_ids, check_vocabulary
from pipeline.stages.prepare.tokenizer_probe import first_id

T = TypeVar("T")

READ_SUFFIXES = (".json", ".jinja", ".model", ".safetensors", ".tiktoken", ".txt")
"""Of the files whose change makes what was prepared stale. Not a list of names: which ones a tokenizer of an older form
consists of is known to transformers alone."""

INDEX = "model.safetensors.index.json"

TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
"""Where transformers leaves the template that is for chats with tools; none but this name and the default are used."""

KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
    "original_max_position": "original_max_position_embeddings",
}
"""What config.json calls our fields, where it calls them something else."""


def state(folder: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of everything that `convert` reads, to tell whether it has changed.

    Raises ModelError where the index of the weights can't be read.
    """
    try:
        beside = [path.name for path in folder.iterdir() if path.suffix in READ_SUFFIXES]
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error.strerror}") from error
    named = [] if (index := find(folder, INDEX)) is None else shards_of(index)
    for name in named:
        find(folder, name)
    stats = [
        (name, (folder / name).stat()) for name in sorted({*beside, *named, TOOL_TEMPLATE}) if is_file(folder / name)
    ]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]


def convert(source: Path, target: Path, name: str, quantization: PreparedFormat, progress: Progress) -> None:
    """Leave in `target` what the stages need to serve the model in `source`; `name` is what clients call it.

    With `quantization` "none" the weights stay where they are and as they are.

    Raises ModelError, naming file and key, where it isn't complete or is of a kind that isn't supported.
    """
    config_path = source / "config.json"
    config = _json(source, "config.json")
    generation = _json(source, "generation_config.json", {})
    tokenizer_config = _json(source, "tokenizer_config.json", {})
    weight_files = _weight_files(source)
    tokenizer, first = _tokenizer(source, target)
    model = Reader(config_path, config).model(name, weight_files, generation)
    model = _with_ends(model, tokenizer, first, tokenizer_config, source)
    places = check_tensors(model, weight_files)
    templates = {
        "chat_template.jinja": _chat_template(source, tokenizer_config),
        "chat_template.tool_use.jinja": _tool_template(source, tokenizer_config),
    }
    for file, template in templates.items():
        if template is not None:
            data = template.encode()
            if len(data) > MAX_TEMPLATE_BYTES:
                raise ModelError(
                    f"{source}: the chat template has {len(data)} bytes; at most {MAX_TEMPLATE_BYTES} may be"
                )
            (target / file).write_bytes(data)
    if quantization != "none":
        # Imported here: it loads numpy's and gguf's quantizers, and most models stay as they are.
        from pipeline.stages.prepare.weight_file import WEIGHTS, quantise

        with progress.measure(f"quantising {name} to {quantization}") as report:
            quantise(target, places, quantization, report)
        model = msgspec.structs.replace(model, weight_files=[WEIGHTS])
    model.save(target)


class Reader:
    """Reads a Hugging Face config.json. Absent keys mean what transformers takes for its architecture."""

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.path = path
        self._config = config
        self._defaults: Mapping[str, Any] = {}

    def model(self, name: str, weight_files: list[Path], generation: dict[str, Any]) -> ModelConfig:
        name_of_kind = self._architecture()
        kind = HF_ARCHITECTURES[name_of_kind]
        self._defaults = kind.defaults
        self._refuse_quantised()
        activation = self._get("hidden_act", str, "silu")
        if activation not in ("silu", "swish"):
            raise ModelError(f"{self.path}: hidden_act is {shown(activation)}; 'silu' is supported")
        heads = self._need("num_attention_heads")
        hidden = self._need("hidden_size")
        vocab_size = self._need("vocab_size")
        head_dim = self._get("head_dim", int, None)
        theta, scaling = self._rope()
        eos_ids = _ids("eos_token_id", self._config, vocab_size, self.path)
        eos_ids += _ids("eos_token_id", generation, vocab_size, self.path.parent / "generation_config.json")
        num_layers = self._need("num_hidden_layers")
        try:
            window, windowed = kind.windows(self._config, min(num_layers, MAX_LAYERS))
            flags = flags_of(kind, self._config)
        except ConfigFault as fault:
            raise ModelError(f"{self.path}: {fault}") from fault
        config = ModelConfig(
            name=name,
            architecture=name_of_kind,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=self._need("intermediate_size"),
            num_heads=heads,
            num_kv_heads=self._num_kv_heads(heads),
            head_dim=derived_head_dim(hidden, heads, self.path, KEYS) if head_dim is None else head_dim,
            vocab_size=vocab_size,
            max_position=self._get("max_position_embeddings", int, 2048),
            rms_norm_eps=as_float(self._get("rms_norm_eps", (int, float), 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=window,
            sliding_layers=windowed,
            tie_embeddings=self._get("tie_word_embeddings", bool, False),
            qkv_bias=flags["qkv_bias"],
            out_bias=flags["out_bias"],
            mlp_bias=flags["mlp_bias"],
            qk_norm=flags.get("qk_norm", False),
            eos_ids=list(dict.fromkeys(eos_ids)),
            bos_id=next(iter(_ids("bos_token_id", self._config, vocab_size, self.path)), None),
            weight_files=[str(path) for path in weight_files],
        )
        check_shape(config, self.path, KEYS)
        return config

    def _architecture(self) -> Architecture:
        kind = self._config.get("model_type")
        classes = self._config.get("architectures") or []
        if not isinstance(classes, list):
            raise ModelError(f"{self.path}: architectures is {shown(classes)}; it must be a list of names")
        for name, architecture in HF_ARCHITECTURES.items():
            if kind == name:
                if classes and classes[0] != architecture.class_name:
                    raise ModelError(
                        f"{self.path}: architectures is {shown(classes)}; of model_type {kind!r}, "
                        f"{architecture.class_name} is supported"
                    )
                return name
        known = ", ".join(map(repr, HF_ARCHITECTURES))
        raise ModelError(f"{self.path}: model_type is {shown(kind)}; supported are {known}")

    def _num_kv_heads(self, num_heads: int) -> int:
        """As many as queries where the file says null; where it says nothing, what the architecture takes for it."""
        default = None if "num_key_value_heads" in self._config else self._defaults.get("num_key_value_heads")
        number = self._get("num_key_value_heads", int, None) if default is None else default
        return num_heads if number is None else int(number)

    def _refuse_quantised(self) -> None:
        quantisation = self._config.get("quantization_config")
        if not quantisation:
            return
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else quantisation
        raise ModelError(
            f"{self.path}: quantization_config says {shown(method)}: quantised checkpoints are not supported; "
            "give the unquantised one, or a .gguf file"
        )

    def _rope(self) -> tuple[float, Llama3Rope | None]:
        """Base and scaling: `rope_parameters` as transformers 5 writes them, or `rope_theta` and `rope_scaling`, which
        win where both are there, as they do in transformers."""
        key = "rope_scaling" if self._config.get("rope_scaling") else "rope_parameters"
        rope = self._config.get(key) or {}
        if not isinstance(rope, dict):
            raise ModelError(f"{self.path}: {key} is {shown(rope)}, not an object")
        if by_layer := next((name for name, value in rope.items() if isinstance(value, dict)), None):
            raise ModelError(f"{self.path}: {key} has parameters of its own for {shown(by_layer)}: not supported")
        part = rope.get("partial_rotary_factor", self._config.get("partial_rotary_factor"))
        if part not in (None, 1):
            raise ModelError(
                f"{self.path}: partial_rotary_factor is {shown(part)}: rotating a part of each head is not supported"
            )
        theta = rope.get("rope_theta", self._config.get("rope_theta", 10000.0))
        if not isinstance(theta, int | float) or isinstance(theta, bool):
            raise ModelError(f"{self.path}: rope_theta is {shown(theta)}, not a number")
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "default":
            return as_float(theta), None
        if kind != "llama3":
            raise ModelError(f"{self.path}: {key} has rope_type {shown(kind)}; supported are 'default' and 'llama3'")
        names = {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            "original_max_position": "original_max_position_embeddings",
        }
        if "original_max_position_embeddings" in self._config:  # transformers prefers it to the one in `rope`
            rope = {**rope, "original_max_position_embeddings": self._config["original_max_position_embeddings"]}
        missing = [theirs for theirs in names.values() if theirs not in rope]
        if missing:
            raise ModelError(f"{self.path}: {key} of type 'llama3' lacks {missing[0]!r}")
        try:
            return as_float(theta), msgspec.convert({ours: rope[theirs] for ours, theirs in names.items()}, Llama3Rope)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self.path}: {key}: {error}") from error

    def _need(self, key: str) -> int:
        value = self._get(key, int, None)
        if value is None or value < 1:
            raise ModelError(f"{self.path}: {key} is {shown(value)}; it must be a positive integer")
        return int(value)

    def _get(self, key: str, kind: type | tuple[type, ...], default: Any) -> Any:
        value = self._config.get(key)
        if value is None:
            return self._defaults.get(key, default)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ModelError(f"{self.path}: {key} is {shown(value)}, not of type {kind}")
        return value


def _ids(key: str, where: dict[str, Any], vocab_size: int, path: Path) -> list[int]:
    """The ids under a key that has one, a list of them, or none. Raises ModelError where they are something else."""
    value = where.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{path}: {key} is {shown(value)}; it must be an id or a list of ids")
    check_ids(ids, vocab_size, path, key)
    return list(ids)


def _json(source: Path, name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    path = find(source, name)
    if path is None:
        if default is not None:
            return default
        raise ModelError(f"{source / name} is missing: a model folder needs config.json, a tokenizer and *.safetensors")
    return _decode(path, MAX_JSON_BYTES, dict[str, Any])


def _decode(path: Path, max_bytes: int, type: type[T]) -> T:
    data = read(path, max_bytes)
    try:
        return msgspec.json.decode(data, type=type)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON object: {error}") from error


def shards_of(index: Path) -> list[str]:
    """The files that the index of a sharded model names. Raises ModelError where it isn't an index."""
    places = _decode(index, MAX_INDEX_BYTES, dict[str, msgspec.Raw]).get("weight_map", msgspec.Raw(b"null"))
    try:
        files = msgspec.json.decode(places, type=dict[str, str])
    except ValueError:
        files = {}
    if not files:
        raise ModelError(f"{index}: weight_map must be an object that gives the file of each tensor")
    return sorted(set(files.values()))


def _weight_files(source: Path) -> list[Path]:
    """Absolute paths of the safetensors files: those the index names, or all there are."""
    if (index := find(source, INDEX)) is not None:
        names = shards_of(index)
        paths = [find(source, name) for name in names]
        if missing := [name for name, path in zip(names, paths, strict=True) if path is None]:
            raise ModelError(
                f"{index} names {missing[0][:200]}, which is missing ({len(missing)} of {len(names)} files are)"
            )
        return [path.absolute() for path in paths if path is not None]
    names = ["model.safetensors"]
    if find(source, names[0]) is None:
        names = sorted(path.name for path in source.glob("*.safetensors"))
    files = [path.absolute() for name in names if (path := find(source, name)) is not None]
    if not files:
        if others := [*source.glob("*.bin"), *source.glob("*.pth"), *source.glob("*.pt")]:
            raise ModelError(
                f"{source} has its weights as {others[0].name}: only safetensors are read; "
                "save the model with save_pretrained(..., safe_serialization=True)"
            )
        raise ModelError(f"{source} has no weights: *.safetensors files are missing")
    return files


def _tokenizer(source: Path, target: Path) -> tuple[Tokenizer, int | None]:
    """Leave tokenizer.json in `target`, and read it; with it the id that its texts begin with.

    Padding and truncation are left out. They are for batches of a trainer, and would apply to every prompt: a padding
    to a fixed length of 10^9 takes all memory there is, and a truncation would cut prompts silently.
    """
    path = target / "tokenizer.json"
    found = find(source, "tokenizer.json")
    if found is None:
        _convert_tokenizer(source, target)
    parts = _decode(found or path, MAX_TOKENIZER_BYTES, dict[str, msgspec.Raw])
    parts = {key: part for key, part in parts.items() if key not in ("padding", "truncation")}
    path.write_bytes(msgspec.json.encode(parts))
    first = first_id(path, source / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    check_token_ids(tokenizer, path, str(source / "tokenizer.json"))
    return tokenizer, first


def _convert_tokenizer(source: Path, target: Path) -> None:
    """Have transformers make tokenizer.json in `target` of a copy of the files that a tokenizer may be made from."""
    vocabularies = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any(find(source, name) for name in vocabularies):
        raise ModelError(f"{source} has no tokenizer: tokenizer.json (or tokenizer.model) is missing")
    # Imported here: it takes seconds, and most folders have a tokenizer.json.
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(dir=target, prefix=".tokenizer-") as copy:
        for name in sorted(path.name for path in source.iterdir() if path.suffix in READ_SUFFIXES):
            if not name.endswith(".safetensors") and name != INDEX and (path := find(source, name)) is not None:
                data = read(path, MAX_TOKENIZER_BYTES)
                if name.endswith(".json"):
                    _check_json(path, data)
                (Path(copy) / name).write_bytes(data)
        try:
            with panics_as_errors():
                tokenizer = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
                check_vocabulary(tokenizer.backend_tokenizer, str(source), MAX_CONVERTED_ID)
                tokenizer.backend_tokenizer.save(str(target / "tokenizer.json"))
        except ModelError:
            raise
        except Exception as error:  # it passes on what any of its parts raises
            words = str(error).replace(copy, str(source))
            raise ModelError(
                f"{source} has no tokenizer.json, and transformers could not make one ({words}); "
                "save it with AutoTokenizer.from_pretrained(...).save_pretrained(...) and give that folder"
            ) from error


def _check_json(path: Path, data: bytes) -> None:
    """Raises ModelError unless it is JSON whose depth a reader without a limit of its own can take."""
    try:
        msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def _with_ends(
    config: ModelConfig, tokenizer: Tokenizer, first: int | None, tokenizer_config: dict[str, Any], source: Path
) -> ModelConfig:
    """The tokenizer's own words for beginning and end come first: templates are written for them. `first` is the id
    that its texts begin with."""
    eos_id = _token_id(tokenizer, tokenizer_config.get("eos_token"))
    bos_id = _token_id(tokenizer, tokenizer_config.get("bos_token"))
    for key, token_id in (("eos_token", eos_id), ("bos_token", bos_id)):
        if token_id is not None:
            check_ids([token_id], config.vocab_size, source / "tokenizer_config.json", f"the id of {key}")
    bos_id = config.bos_id if bos_id is None else bos_id
    eos_ids = list(dict.fromkeys([*([eos_id] if eos_id is not None else []), *config.eos_ids]))
    changed = {"eos_ids": eos_ids, "bos_id": bos_id, "add_bos": bos_id is not None and first == bos_id}
    return msgspec.structs.replace(config, **changed)


def _token_id(tokenizer: Tokenizer, token: Any) -> int | None:
    """The id of a token as tokenizer_config.json spells it: its text, or an object with its text."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None


def _chat_template(source: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The file chat_template.jinja, or tokenizer_config's: a template, or a list of which the default is taken."""
    if (path := find(source, "chat_template.jinja")) is not None:
        return _text(path)
    match tokenizer_config.get("chat_template"):
        case None:
            return None
        case str() as template:
            return template
        case list() as named:
            for entry in named:
                match entry:
                    case {"name": "default", "template": str() as template}:
                        return template
    raise ModelError(
        f"{source / 'tokenizer_config.json'}: chat_template must be a template, or a list of named ones "
        "with one called 'default'"
    )


def _tool_template(source: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """The template for chats with tools, where the model has one of its own: a file beside chat_template.jinja, or in
    the list that tokenizer_config has where there is no such file."""
    if (path := find(source, TOOL_TEMPLATE)) is not None:
        return _text(path)
    named = tokenizer_config.get("chat_template")
    if find(source, "chat_template.jinja") is not None or not isinstance(named, list):
        return None
    for entry in named:
        match entry:
            case {"name": "tool_use", "template": str() as template}:
                return template
    return None


def _text(path: Path) -> str:
    try:
        return read(path, MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 text: {error}") from error
