"""The special tokens of a folder in Hugging Face layout, as transformers' `AutoTokenizer` adds and names them.

tokenizer.json has most of them, but not their names. And some are only in the files beside it:

    tokenizer_config.json    names, as `eos_token`; `added_tokens_decoder`; `extra_special_tokens`, a list or an object
                             of names; `additional_special_tokens`, its older name
    special_tokens_map.json  names and lists that replace those, in folders without `added_tokens_decoder`
    added_tokens.json        ids of tokens, in such folders

The order in which tokens are added decides their ids. Here it is that of transformers 5 (`_from_pretrained` in
tokenization_utils_base.py, `TokenizersBackend.__init__` in tokenization_utils_tokenizers.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import AddedToken

from pipeline.stages.prepare.files import MAX_JSON_BYTES, decode_json, find, shown
from pipeline.stages.prepare.sources.source import ModelError

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, ADDITIONAL, DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

MAX_NAMES = 1024
"""Named tokens. Models have up to twenty; each is a variable of each prompt's template."""
MAX_ID_DIGITS = 10

_END = "<|endoftext|>"
DEFAULTS = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "GemmaTokenizer": {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
}
"""What transformers' classes name if the files don't. null in a file is no token."""
_CLASS_OF = {
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma3_text"), "GemmaTokenizer"),
    **dict.fromkeys(("gpt2", "phi", "opt"), "GPT2Tokenizer"),
    "gpt_neox": "GPTNeoXTokenizer",
}
"""The classes of models whose files may name another one. Without an entry, transformers has none of its own."""
_ALWAYS = ("qwen2",)
"""Models whose class counts whatever their files say."""
_NO_CLASS_OF_THEIR_OWN = ("mistral", "mixtral", "phi3", "olmo2", "granite", "glm4")
"""Models for which transformers takes tokenizer.json as it is, whatever class their files name."""


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the files beside tokenizer.json say of special tokens."""

    names: dict[str, str]
    """The text of each token with a name, for templates."""
    tokens: list[AddedToken]
    """Those to add to the tokenizer, in order. It ignores those that it has."""
    tokenizer_class: str | None
    """Of those in `DEFAULTS`."""
    split: bool
    """Whether special tokens in texts are plain text."""
    add_prefix_space: bool | None


def read(source: Path, config: Mapping[str, Any], *, is_byte_level: bool) -> SpecialTokens:
    """The special tokens of the folder `source`. `config` is its config.json. `is_byte_level` says how its
    tokenizer.json splits texts. Raises ModelError for values of other kinds."""
    found = _json(source, CONFIG)
    tokenizer_class = _class_of(config, found, is_byte_level)
    if found.get(ADDITIONAL) is not None and not found.get(EXTRA):
        found[EXTRA] = found.pop(ADDITIONAL)
    own = {key: found.pop(key) for key in list(found) if _is_own_name(key) and isinstance(found[key], str)}
    if isinstance(found.get(EXTRA), dict):
        own |= found.pop(EXTRA)
    where = source / CONFIG
    decoder: dict[int, AddedToken] = {}
    if DECODER in found:
        entries = found[DECODER]
        if not isinstance(entries, dict) or not all(map(_is_id, entries)):
            raise ModelError(f"{where}: {DECODER} is {shown(entries)}; it must be an object from ids to tokens")
        decoder = {int(key): _token(value, where, DECODER) for key, value in entries.items()}
    else:
        _merge(found, own, _json(source, MAP), source / MAP)
        special = {_token(found[name], where, name).content for name in NAMES if found.get(name)}
        special |= {token.content for token in _tokens(found.get(EXTRA), where, EXTRA)}
        for text, number in _json(source, ADDED).items():
            if type(number) is not int:
                raise ModelError(f"{source / ADDED}: {shown(text)} is {shown(number)}; it must be an id")
            decoder[number] = AddedToken(text, normalized=text not in special, special=text in special)
    extra = _tokens(found[EXTRA] if EXTRA in found else found.get(ADDITIONAL), where, EXTRA)
    given = {**DEFAULTS.get(tokenizer_class or "", {}), **{name: found[name] for name in NAMES if name in found}}
    named = {name: _token(given[name], where, name) for name in NAMES if given.get(name) not in (None, "")}
    auto = {key: value for key, value in found.items() if _is_own_name(key) and isinstance(value, str | dict) and value}
    named |= {name: _token(value, where, name) for name, value in {**auto, **own}.items()}
    if len(named) > MAX_NAMES:
        raise ModelError(f"{where}: {len(named)} special tokens have names; at most {MAX_NAMES} are supported")
    known = {token.content: token for token in decoder.values()}
    tokens = [token for _, token in sorted(decoder.items(), key=lambda item: item[0])]
    for token in [*(known.get(token.content, token) for token in named.values()), *extra]:
        if token.content not in known:
            tokens.append(token)
            known[token.content] = token
    prefix = found.get("add_prefix_space")
    return SpecialTokens(
        names={name: token.content for name, token in named.items()},
        tokens=tokens,
        tokenizer_class=tokenizer_class,
        split=found.get("split_special_tokens") is True,
        add_prefix_space=prefix if isinstance(prefix, bool) else None,
    )


def _class_of(config: Mapping[str, Any], found: Mapping[str, Any], is_byte_level: bool) -> str | None:
    """The class of transformers that reads the folder; None if that is the general one."""
    model_type = config.get("model_type")
    named = found.get("tokenizer_class") or config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    registered = _CLASS_OF.get(model_type) if isinstance(model_type, str) else None
    if named == "LlamaTokenizer" and is_byte_level and model_type not in _ALWAYS:
        return None
    if named is None or model_type in _ALWAYS:
        return registered
    return named if named in DEFAULTS and model_type not in _NO_CLASS_OF_THEIR_OWN else None


def _merge(found: dict[str, Any], own: dict[str, Any], special: Mapping[str, Any], where: Path) -> None:
    """Let special_tokens_map.json replace what tokenizer_config.json says."""
    for key, value in special.items():
        if key == EXTRA and isinstance(value, list):
            merged = _list(found.get(EXTRA), where.with_name(CONFIG), EXTRA)
            seen = set(map(_written, merged))
            found[EXTRA] = [*merged, *(_special(token) for token in value if _written(token) not in seen)]
        elif key == EXTRA and isinstance(value, dict):
            own |= value
        elif value is None or isinstance(value, str | list | dict):
            found[key] = value
        else:
            raise ModelError(f"{where}: {shown(key)} is {shown(value)}; it must be a token or a list of tokens")


def _written(token: Any) -> bytes:
    return msgspec.json.encode(token, order="sorted")


def _special(token: Any) -> Any:
    return {**token, "special": True} if isinstance(token, dict) else token


def _is_own_name(key: str) -> bool:
    """Whether it is the name of a token that only some models have, as `image_token`."""
    return key.endswith("_token") and key not in NAMES


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS


def _tokens(value: Any, where: Path, key: str) -> list[AddedToken]:
    return [_token(each, where, key) for each in _list(value, where, key)]


def _list(value: Any, where: Path, key: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelError(f"{where}: {key} is {shown(value)}; it must be a list of tokens, or an object of named ones")
    return value


def _token(value: Any, where: Path, key: str) -> AddedToken:
    """A token: a text, or an object as transformers saves it."""
    match value:
        case str() if value:
            return AddedToken(value, special=True)
        case {"content": str() as content, **flags_of} if content:
            flags = {name: flags_of.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
            is_typed = flags_of.get("__type") == "AddedToken" and key == EXTRA
            special = flags_of.get("special") is True if key == DECODER or is_typed else True
            normalized = flags_of.get("normalized")
            normalized = normalized if isinstance(normalized, bool) else flags_of.get("special") is not True
            return AddedToken(content, special=special, normalized=normalized, **flags)
    raise ModelError(f"{where}: {key} is {shown(value)}; it must be a token's text, or an object with its content")


def _json(source: Path, name: str) -> dict[str, Any]:
    path = find(source, name)
    return {} if path is None else decode_json(path, MAX_JSON_BYTES, dict[str, Any])
