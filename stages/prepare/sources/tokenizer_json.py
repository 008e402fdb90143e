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
    """Leave tokenizer.json in `target`, and read it; with it the id that its texts begin with.

    Padding and truncation are left out. They are for batches of a trainer, and would apply to every prompt: a padding
    to a fixed length of 10^9 takes all memory there is, and a truncation would cut prompts silently.
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


def with_special_ids(
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
