"""The special tokens of a folder in Hugging Face layout, as transformers' `AutoTokenizer` adds and names them.

tokenizer.json has most of them, but not their names. And some are only in the files beside it:

    tokenizer_config.json    names, as `eos_token`; `added_tokens_decoder`; `extra_special_tokens`, a list or an object
                             of names; `additional_special_tokens`, its older name; `model_specific_special_tokens`,
                             names that count if no others do
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
from pipeline.stages.prepare.sources.tokenizer_class import CLASSES

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
EXTRA, ADDITIONAL, DECODER = "extra_special_tokens", "additional_special_tokens", "added_tokens_decoder"
SPECIFIC, TYPE = "model_specific_special_tokens", "AddedToken"
CONFIG, MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"

MAX_NAMES = 1024
"""Named tokens. Models have up to twenty; each is a variable of each prompt's template."""
MAX_ID_DIGITS = 10


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """What the files beside tokenizer.json say of special tokens."""

    names: dict[str, str]
    """The text of each token with a name, for templates."""
    listed: list[AddedToken] = []
    """Those with ids in the files, in order of the ids."""
    named: list[str | AddedToken] = []
    """Those with names; a text is one that the files give without flags. Some may have the same content."""
    extra: list[str | AddedToken] = []
    """Other special ones."""
    split: bool
    """Whether special tokens in texts are plain text."""


def read(
    source: Path, found: dict[str, Any], tokenizer_class: str | None, own_tokens: Mapping[int, AddedToken]
) -> SpecialTokens:
    """The special tokens of the folder `source`. `found` is its tokenizer_config.json, which is changed, and
    `tokenizer_class` the class of transformers that reads the folder. `own_tokens` are those of its tokenizer.json, by
    id. Raises ModelError for values of other kinds."""
    if found.get(ADDITIONAL) is not None and not found.get(EXTRA):
        found[EXTRA] = found.pop(ADDITIONAL)
    own = {key: found.pop(key) for key in list(found) if _is_own_name(key) and isinstance(found[key], str)}
    if isinstance(found.get(EXTRA), dict):
        own |= found.pop(EXTRA)
    where = source / CONFIG
    specific = found.pop(SPECIFIC, None)
    if not isinstance(specific, dict | None):
        raise ModelError(f"{where}: {SPECIFIC} is {shown(specific)}; it must be an object of named tokens")
    own = own or dict(specific or {})
    decoder: dict[int, AddedToken] = {}
    known: dict[str, AddedToken] = {}
    if DECODER in found:
        entries = found[DECODER]
        if not isinstance(entries, dict) or not all(map(_is_id, entries)):
            raise ModelError(f"{where}: {DECODER} is {shown(entries)}; it must be an object from ids to tokens")
        decoder = {int(key): _added(value, where, DECODER) for key, value in entries.items()}
        known = {token.content: token for token in decoder.values()}
    else:
        _merge(found, own, json_of(source, MAP), source / MAP)
        special = {content(_token(found[name], where, name)) for name in NAMES if found.get(name)}
        special |= {content(token) for token in _tokens(found.get(EXTRA), where, EXTRA)}
        for text, number in json_of(source, ADDED).items():
            if type(number) is not int:
                raise ModelError(f"{source / ADDED}: {shown(text)} is {shown(number)}; it must be an id")
            decoder[number] = AddedToken(text, normalized=text not in special, special=text in special)
        known = {token.content: token for token in (*decoder.values(), *own_tokens.values())}
        decoder |= own_tokens
    extra = _tokens(found[EXTRA] if EXTRA in found else found.get(ADDITIONAL), where, EXTRA)
    defaults = CLASSES[tokenizer_class].names if tokenizer_class in CLASSES else {}
    given = {**defaults, **{name: found[name] for name in NAMES if name in found}}
    named = {name: _token(given[name], where, name) for name in NAMES if given.get(name) not in (None, "")}
    auto = {key: value for key, value in found.items() if _is_own_name(key) and _is_token(value)}
    named |= {name: _token(value, where, name) for name, value in {**auto, **own}.items()}
    if len(named) > MAX_NAMES:
        raise ModelError(f"{where}: {len(named)} special tokens have names; at most {MAX_NAMES} are supported")
    return SpecialTokens(
        names={name: content(token) for name, token in named.items()},
        listed=[token for _, token in sorted(decoder.items(), key=lambda item: item[0])],
        named=[known.get(content(token), token) if name in NAMES else token for name, token in named.items()],
        extra=extra,
        split=found.get("split_special_tokens") is True,
    )


def _merge(found: dict[str, Any], own: dict[str, Any], special: Mapping[str, Any], where: Path) -> None:
    """Let special_tokens_map.json replace what tokenizer_config.json says."""
    for key, value in special.items():
        if key == EXTRA and isinstance(value, list):
            merged = _list(found.get(EXTRA), where.with_name(CONFIG), EXTRA)
            seen = set(map(_written, merged))
            found[EXTRA] = [*merged, *(_special(token) for token in value if _written(token) not in seen)]
        elif key == EXTRA and isinstance(value, dict):
            found.pop(EXTRA, None)  # the list of tokenizer_config.json, which this replaces
            own |= value
        elif value is None or isinstance(value, str | list | dict):
            found[key] = {**value, "__type": TYPE} if isinstance(value, dict) else value
        else:
            raise ModelError(f"{where}: {shown(key)} is {shown(value)}; it must be a token or a list of tokens")


def _written(token: Any) -> bytes:
    return msgspec.json.encode(token, order="sorted")


def _special(token: Any) -> Any:
    return {**token, "special": True} if isinstance(token, dict) else token


def _is_own_name(key: str) -> bool:
    """Whether it is the name of a token that only some models have, as `image_token`."""
    return key.endswith("_token") and key not in NAMES


def _is_token(value: Any) -> bool:
    """Whether transformers takes the value of a token's own name for a token: an object only if it says that it is one,
    as all those of special_tokens_map.json are."""
    return (isinstance(value, str) and value != "") or (isinstance(value, dict) and value.get("__type") == TYPE)


def _is_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS


def _tokens(value: Any, where: Path, key: str) -> list[str | AddedToken]:
    return [_token(each, where, key) for each in _list(value, where, key)]


def _list(value: Any, where: Path, key: str) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelError(f"{where}: {key} is {shown(value)}; it must be a list of tokens, or an object of named ones")
    return value


def content(token: str | AddedToken) -> str:
    """The text of a token."""
    return token if isinstance(token, str) else token.content


def added(token: str | AddedToken) -> AddedToken:
    """The token as it is added: one without flags is special."""
    return AddedToken(token, special=True) if isinstance(token, str) else token


def _added(value: Any, where: Path, key: str) -> AddedToken:
    return added(_token(value, where, key))


def _token(value: Any, where: Path, key: str) -> str | AddedToken:
    """A token: a text, or an object as transformers saves it."""
    match value:
        case str() if value:
            return value
        case {"content": str() as text, **flags_of} if text:
            flags = {name: flags_of.get(name) is True for name in ("single_word", "lstrip", "rstrip")}
            is_typed = flags_of.get("__type") == TYPE and key == EXTRA
            special = flags_of.get("special") is True if key == DECODER or is_typed else True
            normalized = flags_of.get("normalized")
            normalized = normalized if isinstance(normalized, bool) else flags_of.get("special") is not True
            return AddedToken(text, special=special, normalized=normalized, **flags)
    raise ModelError(f"{where}: {key} is {shown(value)}; it must be a token's text, or an object with its content")


def json_of(source: Path, name: str) -> dict[str, Any]:
    """The object in a file beside tokenizer.json; empty if there is no such file. Raises ModelError."""
    path = find(source, name)
    return {} if path is None else decode_json(path, MAX_JSON_BYTES, dict[str, Any])
