"""The tokenizer of a folder in Hugging Face layout: its tokenizer.json, or one that transformers makes."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Tokenizer

from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import MAX_TOKENIZER_BYTES, decode_json, find, read
from pipeline.stages.prepare.shape import check_ids
from pipeline.stages.prepare.sources import special_tokens
from pipeline.stages.prepare.sources.layout import INDEX, READ_SUFFIXES
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.sources.special_tokens import SpecialTokens
from pipeline.stages.prepare.tokenizer_check import MAX_CONVERTED_ID, check_token_ids, check_vocabulary
from pipeline.stages.prepare.tokenizer_probe import probe

PREFIXED = ("GPT2Tokenizer", "GPTNeoXTokenizer", "Qwen2Tokenizer")
"""Classes of transformers that take `add_prefix_space` from tokenizer_config.json. Others take tokenizer.json's."""


class WrittenTokenizer(NamedTuple):
    """The tokenizer of a prepared folder."""

    tokenizer: Tokenizer
    first: int | None
    """The first id of every text; None if it has none."""
    special: SpecialTokens
    new: frozenset[str]
    """Tokens that tokenizer.json lacked."""


def write_tokenizer(source: Path, target: Path, config: Mapping[str, Any]) -> WrittenTokenizer:
    """Write tokenizer.json to `target`, with the special tokens of the other files. `config` is the folder's
    config.json.

    Padding and truncation are dropped. They are meant for training, but would apply to every prompt: padding to a
    length of 10^9 uses up all memory, and truncation cuts prompts silently.
    """
    path = target / "tokenizer.json"
    found = find(source, "tokenizer.json")
    if found is None:
        _convert_tokenizer(source, target)
    parts = decode_json(found or path, MAX_TOKENIZER_BYTES, dict[str, msgspec.Raw])
    parts = {key: part for key, part in parts.items() if key not in ("padding", "truncation")}
    path.write_bytes(msgspec.json.encode(parts))
    is_byte_level = b'"ByteLevel"' in bytes(parts.get("pre_tokenizer", msgspec.Raw(b"")))
    special = special_tokens.read(source, config, is_byte_level=is_byte_level)
    # In the other process, too: to add a token, the library runs the file's normalizer.
    probed = probe(path, source / "tokenizer.json", special.tokens if found is not None else ())
    tokenizer = Tokenizer.from_file(str(path))
    check_token_ids(tokenizer, path, str(source / "tokenizer.json"))
    before = tokenizer.get_vocab()
    changes: dict[str, Any] = {} if probed.added is None else {"added_tokens": probed.added}
    if found is not None and special.add_prefix_space is not None and special.tokenizer_class in PREFIXED:
        changes |= _with_prefix_space(parts, special.add_prefix_space)
    if changes:
        path.write_bytes(msgspec.json.encode(parts | changes))
        probed = probe(path, source / "tokenizer.json")
        tokenizer = Tokenizer.from_file(str(path))
        check_token_ids(tokenizer, path, str(source / "tokenizer.json"))
    return WrittenTokenizer(tokenizer, probed.first, special, frozenset(tokenizer.get_vocab().keys() - before.keys()))


def _with_prefix_space(parts: Mapping[str, msgspec.Raw], adds: bool) -> dict[str, Any]:
    """The part of tokenizer.json that adds a space before a text, changed to do so or not."""

    def changed(value: Any) -> Any:
        match value:
            case {"type": "ByteLevel"}:
                return {**value, "add_prefix_space": adds}
            case {"type": "Sequence", "pretokenizers": list() as each}:
                return {**value, "pretokenizers": [changed(one) for one in each]}
        return value

    before = msgspec.json.decode(parts.get("pre_tokenizer", msgspec.Raw(b"null")))
    after = changed(before)
    return {} if after == before else {"pre_tokenizer": after}


def _convert_tokenizer(source: Path, target: Path) -> None:
    """Let transformers write tokenizer.json to `target`, from a copy of the files that it may read."""
    vocabularies = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if not any(find(source, name) for name in vocabularies):
        raise ModelError(f"{source} has no tokenizer: tokenizer.json (or tokenizer.model) is missing")
    # Imported here: the import takes seconds, and most folders have a tokenizer.json.
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
        except Exception as error:  # transformers documents no exceptions
            words = str(error).replace(copy, str(source))
            raise ModelError(
                f"{source} has no tokenizer.json, and transformers could not make one ({words}); "
                "save it with AutoTokenizer.from_pretrained(...).save_pretrained(...) and give that folder"
            ) from error


def _check_json(path: Path, data: bytes) -> None:
    """Raises ModelError unless it is JSON that is not nested too deeply for readers without a limit of their own."""
    try:
        msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def with_special_ids(config: ModelConfig, written: WrittenTokenizer, source: Path) -> ModelConfig:
    """The config with the special tokens of the tokenizer's files. Its BOS and EOS come before those of config.json,
    because chat templates use those."""
    tokenizer, special = written.tokenizer, written.special
    ids: dict[str, int | None] = {}
    for name in ("bos_token", "eos_token"):
        text = special.names.get(name)
        token_id = None if text is None else tokenizer.token_to_id(text)
        if token_id is not None and token_id >= config.vocab_size and text in written.new:
            token_id = None  # files name it, but the model has no row for it
        if token_id is not None:
            check_ids([token_id], config.vocab_size, source / special_tokens.CONFIG, f"the id of {name}")
        ids[name] = token_id
    bos_id = config.bos_id if ids["bos_token"] is None else ids["bos_token"]
    eos_ids = list(dict.fromkeys([*([] if ids["eos_token"] is None else [ids["eos_token"]]), *config.eos_ids]))
    has_names = any(find(source, name) for name in (special_tokens.CONFIG, special_tokens.MAP))
    return msgspec.structs.replace(
        config,
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=bos_id is not None and written.first == bos_id,
        special_tokens=special.names if has_names else None,
        split_special_tokens=special.split,
    )
