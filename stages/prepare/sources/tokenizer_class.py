"""Which class of transformers reads a folder's tokenizer, and what it makes of tokenizer.json.

The general class takes tokenizer.json as it is. Those in `CLASSES` take only its vocabulary, merges and post-processor,
and its added tokens in folders without `added_tokens_decoder`; the rest is the class's own, whatever the file has. So
does this module, as transformers 5 does it (`TokenizersBackend.convert_to_native_format`, `__init__` of each class).
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError

Parts = dict[str, msgspec.Raw]
"""The members of a tokenizer.json."""


class Options(NamedTuple):
    """What the classes take from tokenizer_config.json."""

    add_prefix_space: bool | None = None
    legacy: bool = False
    unk_token: str | None = None


class TokenizerClass(NamedTuple):
    """A class that rebuilds the tokenizer."""

    names: dict[str, str]
    """Its special tokens, if the files name none. null in a file is no token."""
    frame: Callable[[Options], Tokenizer]
    """The tokenizer without vocabulary, merges and post-processor."""
    adds_plainly: bool = False
    """Whether it adds its special tokens once more, with no other flags."""
    adds_as_special: bool = False
    """Whether it adds them once more as special ones."""
    adds_nothing_to_texts: bool = False
    """Whether it replaces the post-processor by one that adds neither BOS nor EOS."""


def _byte_level_bpe() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _gpt2(options: Options) -> Tokenizer:
    tokenizer = _byte_level_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=options.add_prefix_space is True)
    return tokenizer


def _gpt_neox(options: Options) -> Tokenizer:
    tokenizer = _gpt2(options)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _cohere(options: Options) -> Tokenizer:
    tokenizer = _gpt_neox(options)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), tokenizer.pre_tokenizer]
    )
    return tokenizer


_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _qwen(pattern: str, options: Options) -> Tokenizer:
    tokenizer = _byte_level_bpe()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=options.add_prefix_space is True, use_regex=False),
        ]
    )
    return tokenizer


def _llama(options: Options) -> Tokenizer:
    """SentencePiece's BPE. A text gets a space before it; with `legacy`, each text behind a special token, too."""
    adds_space = options.add_prefix_space is not False
    scheme = ("always" if options.legacy else "first") if adds_space else "never"
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if adds_space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _gemma(options: Options) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(fuse_unk=True, byte_fallback=True, unk_token=str(options.unk_token)))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


_END = "<|endoftext|>"
CLASSES = {
    "GPT2Tokenizer": TokenizerClass({"bos_token": _END, "eos_token": _END, "unk_token": _END}, _gpt2),
    "GPTNeoXTokenizer": TokenizerClass(
        {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
        _gpt_neox,
        adds_nothing_to_texts=True,
    ),
    "Qwen2Tokenizer": TokenizerClass(
        {"eos_token": _END, "unk_token": _END, "pad_token": _END}, partial(_qwen, _QWEN2), adds_plainly=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        {"eos_token": _END, "unk_token": _END, "pad_token": _END}, partial(_qwen, _QWEN3_5)
    ),
    "CohereTokenizer": TokenizerClass(
        {
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "unk_token": "<UNK>",
            "sep_token": "<SEP>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "mask_token": "<MASK_TOKEN>",
        },
        _cohere,
        adds_as_special=True,
    ),
    "LlamaTokenizer": TokenizerClass({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}, _llama),
    "GemmaTokenizer": TokenizerClass(
        {
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
        _gemma,
    ),
}
GENERAL = ("TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
"""Names of the general class, without `Fast` at their end."""
OF_MODELS = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "Qwen2Tokenizer"),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "phi", "opt", "starcoder2"), "GPT2Tokenizer"),
    **dict.fromkeys(("gpt_neox", "olmo", "olmoe", "mpt"), "GPTNeoXTokenizer"),
    **dict.fromkeys(("cohere", "cohere2"), "CohereTokenizer"),
    **dict.fromkeys(("bert", "distilbert", "nomic_bert"), "BertTokenizer"),
    "mpnet": "MPNetTokenizer",
    "gte": "XLMRobertaTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "modernbert": None,
    "camembert": "CamembertTokenizer",
    **dict.fromkeys(("mistral", "mistral3", "mixtral", "ministral", "ministral3"), None),
    **dict.fromkeys(
        ("granite", "ernie4_5", "ernie4_5_moe", "phi3", "glm", "glm4", "glm4_moe", "olmo2", "olmo3", "olmo_hybrid"),
        None,
    ),
    **dict.fromkeys(("stablelm", "nemotron", "gpt_bigcode", "smolvlm", "llava"), None),
}
"""The classes of models; None is the general one, whatever class their files name. Models that are missing have none:
their files say it."""
ALWAYS = ("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text")
"""Models whose class counts, too, whatever their files name."""


def class_of(config: Mapping[str, Any], tokenizer_config: Mapping[str, Any], parts: Parts) -> str | None:
    """The class that reads a folder, None if it is the general one. `config` is its config.json, `parts` its
    tokenizer.json. The class may be one that is not in `CLASSES` (`AutoTokenizer.from_pretrained` in
    tokenization_auto.py)."""
    model_type = config.get("model_type")
    model_type = model_type if isinstance(model_type, str) else ""
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    if named in GENERAL:
        named = GENERAL[0]
    registered = OF_MODELS.get(model_type, GENERAL[0])
    if named is None:
        found = registered
    elif _has_own_code(tokenizer_config):
        found = named if named in CLASSES else None  # code of the folder, which is never run, or tokenizer.json
    elif model_type in ALWAYS:
        found = registered
    else:
        is_other = named == "LlamaTokenizer" and any(b'"ByteLevel"' in bytes(part) for part in parts.values())
        found = None if is_other or registered is None else named
    return None if found in GENERAL else found


def as_it_is(config: Mapping[str, Any]) -> str:
    """How a user gets the tokenizer.json of a folder as it is, with "; " before it. `config` is its config.json."""
    if config.get("model_type") in ALWAYS:
        return ""  # the model decides
    return '; set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json to use tokenizer.json as it is'


def _has_own_code(tokenizer_config: Mapping[str, Any]) -> bool:
    """Whether the folder has a class of its own, in Python."""
    match tokenizer_config.get("auto_map"):
        case {"AutoTokenizer": code}:
            return code is not None
        case list():
            return True
    return False


def rebuilt(parts: Parts, name: str, options: Options, where: Path) -> Parts:
    """The parts of the tokenizer that the class `name` makes of a tokenizer.json, without its added tokens. Raises
    ModelError, naming the file as `where`, if the file has another kind of model."""
    model = _members(parts.get("model"))
    kind = msgspec.json.decode(model["type"]) if "type" in model else "BPE"
    vocabulary = bytes(model.get("vocab", msgspec.Raw(b"null"))).lstrip()
    if kind != "BPE" or "merges" not in model or not vocabulary.startswith(b"{"):
        raise ModelError(
            f"{where} has a model of the type {shown(kind)}, and transformers' {name}, which reads the folder, makes a "
            "BPE of it"
        )
    made = msgspec.json.decode(CLASSES[name].frame(options).to_str(), type=dict[str, msgspec.Raw])
    frame = {**_members(made["model"]), "vocab": model["vocab"], "merges": model["merges"]}
    has_post_processor = "post_processor" in parts and not CLASSES[name].adds_nothing_to_texts
    return {
        **made,
        "model": msgspec.Raw(msgspec.json.encode(frame)),
        **({"post_processor": parts["post_processor"]} if has_post_processor else {}),
    }


def replaced(before: Parts, after: Parts) -> list[str]:
    """The parts that split texts and that the class has replaced by others: keys of tokenizer.json."""
    names = ("normalizer", "pre_tokenizer")
    return [name for name in names if not _agree(_value(before.get(name)), _value(after.get(name)))]


def _value(part: msgspec.Raw | None) -> Any:
    return None if part is None else msgspec.json.decode(part)


def _agree(before: Any, after: Any) -> bool:
    """Whether a part says the same; older files lack some keys."""
    match before, after:
        case dict(), dict():
            return all(key in after and _agree(value, after[key]) for key, value in before.items())
        case list(), list():
            return len(before) == len(after) and all(map(_agree, before, after))
    return bool(before == after)


def _members(value: msgspec.Raw | None) -> Parts:
    try:
        return {} if value is None else msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    except ValueError:
        return {}


def added_tokens(parts: Parts, where: Path) -> dict[int, AddedToken]:
    """The `added_tokens` of a tokenizer.json, by id. Raises ModelError, naming the file as `where`."""
    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {
        entry.id: AddedToken(entry.content, **{flag: getattr(entry, flag) for flag in flags})
        for entry in _entries(parts, where)
    }


def special_texts(parts: Parts, where: Path) -> set[str]:
    """The texts of the `added_tokens` that are special, or that another entry for the same text says are: to the
    library, they stay it. Raises ModelError, naming the file as `where`."""
    return {entry.content for entry in _entries(parts, where) if entry.special}


def replaced_tokens(parts: Parts, where: Path) -> list[dict[str, Any]]:
    """The entries of `added_tokens` that later ones for the same text replace. The library keeps some of what they
    say: a text that was normalized is shown as it then was. Raises ModelError, naming the file as `where`."""
    entries = _entries(parts, where)
    last = {entry.content: i for i, entry in enumerate(entries)}
    return [msgspec.structs.asdict(entry) for i, entry in enumerate(entries) if last[entry.content] != i]


def _entries(parts: Parts, where: Path) -> list["_Added"]:
    try:
        return msgspec.json.decode(parts.get("added_tokens", msgspec.Raw(b"null")), type=list[_Added] | None) or []
    except ValueError as error:
        raise ModelError(f"{where}: added_tokens cannot be read: {error}") from error


class _Added(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False
