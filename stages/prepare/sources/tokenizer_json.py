"""The tokenizer of a folder in Hugging Face layout: its tokenizer.json, or one that transformers makes."""

import tempfile
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import MAX_TOKENIZER_BYTES, decode_json, find, read
from pipeline.stages.prepare.shape import check_ids
from pipeline.stages.prepare.sources.layout import INDEX, READ_SUFFIXES
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizer_check import MAX_CONVERTED_ID, check_token_ids, check_vocabulary
from pipeline.stages.prepare.tokenizer_probe import first_id


def write_tokenizer(source: Path, target: Path) -> tuple[Tokenizer, int | None]:
    """Write tokenizer.json to `target`. Returns the tokenizer and the first id of every text (None if it has none).

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
    first = first_id(path, source / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    check_token_ids(tokenizer, path, str(source / "tokenizer.json"))
    return tokenizer, first


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


def with_special_ids(
    config: ModelConfig, tokenizer: Tokenizer, first: int | None, tokenizer_config: dict[str, Any], source: Path
) -> ModelConfig:
    """The config with BOS and EOS from tokenizer_config.json first, because chat templates use those.

    `first` is the first id of every text that the tokenizer encodes.
    """
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
    """The id of a token of tokenizer_config.json: a string, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return tokenizer.token_to_id(text) if isinstance(text, str) else None
