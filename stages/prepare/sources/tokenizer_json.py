"""The tokenizer of a folder in Hugging Face layout: its tokenizer.json, or one that transformers makes."""

import importlib.util
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import AddedToken, Tokenizer

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import MAX_TOKENIZER_BYTES, decode_json, find, read, shown
from pipeline.stages.prepare.shape import check_ids
from pipeline.stages.prepare.sources import special_tokens, tokenizer_class
from pipeline.stages.prepare.sources.layout import INDEX, READ_SUFFIXES
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.sources.special_tokens import SpecialTokens
from pipeline.stages.prepare.sources.tokenizer_class import CLASSES, Options, Parts
from pipeline.stages.prepare.tokenizers.text_growth import check_growth
from pipeline.stages.prepare.tokenizers.tokenizer_check import (
    MAX_CONVERTED_ID,
    check_num_added,
    check_token_ids,
    check_vocabulary,
)
from pipeline.stages.prepare.tokenizers.tokenizer_probe import AddCall, probe

MAX_WORDS = 300


class WrittenTokenizer(NamedTuple):
    """The tokenizer of a prepared folder."""

    tokenizer: Tokenizer
    first: int | None
    """The first id of every text; None if it has none."""
    special: SpecialTokens
    new: frozenset[str]
    """Tokens that tokenizer.json lacked."""
    notes: tuple[str, ...] = ()
    """Which rule counted where the files disagree."""


def write_tokenizer(source: Path, target: Path, config: Mapping[str, Any]) -> WrittenTokenizer:
    """Write tokenizer.json to `target`: what transformers' `AutoTokenizer` makes of all files of the folder `source`.
    `config` is the folder's config.json. Raises ModelError.

    Padding and truncation are dropped. They are meant for training, but would apply to every prompt: padding to a
    length of 10^9 uses up all memory, and truncation cuts prompts silently.
    """
    path, where = target / "tokenizer.json", source / "tokenizer.json"
    given = special_tokens.json_of(source, special_tokens.CONFIG)
    if (found := find(source, "tokenizer.json")) is None:
        special = _convert_tokenizer(source, target, None)
        _write(path, _parts_of(path))
        return WrittenTokenizer(*_load(path, where), special, frozenset())
    _refuse_versions(given, source)
    parts = _parts_of(found)
    own_tokens = tokenizer_class.added_tokens(parts, where)
    check_num_added(len(own_tokens), str(where))
    name = tokenizer_class.class_of(config, given, parts)
    if (name is not None and name not in CLASSES) or given.get("fix_mistral_regex") is True:
        _write(path, parts)
        before = {*_load(path, where)[0].get_vocab()}
        special = _convert_tokenizer(
            source, target, name or tokenizer_class.GENERAL[0], tokenizer_class.as_it_is(config)
        )
        _write(path, _parts_of(path))
        tokenizer, first = _load(path, where)
        return WrittenTokenizer(tokenizer, first, special, frozenset(tokenizer.get_vocab().keys() - before))
    options = Options(given.get("add_prefix_space"), bool(given.get("legacy")))
    special = special_tokens.read(source, given, name, own_tokens)
    notes = []
    if name is not None:
        options = options._replace(unk_token=special.names.get("unk_token"))
        advice = tokenizer_class.as_it_is(config)
        try:
            given_parts, parts = parts, tokenizer_class.rebuilt(parts, name, options, where)
        except ModelError as error:
            raise ModelError(f"{error}{advice}") from error
        if others := tokenizer_class.replaced(given_parts, parts):
            notes.append(f"tokenizer.json has another {' and '.join(others)} than {name}, whose own counts{advice}")
    _write(path, parts)
    known = [token.content for token in tokenizer_class.added_tokens(parts, where).values()]
    check_growth(path, MAX_TOKENIZER_BYTES, str(where))
    probed = probe(path, where, _calls(special, name, known), tokenizer_class.special_texts(parts, where))
    if (added := probed.added) is None:
        tokenizer, first = _open(path, where), probed.first
    else:
        entries = [*tokenizer_class.replaced_tokens(parts, where), *added]
        _write(path, parts | {"added_tokens": sorted(entries, key=itemgetter("id"))})  # new ids are given in this order
        tokenizer, first = _load(path, where)
    new = {token["content"] for token in added or ()} - tokenizer.get_vocab(with_added_tokens=False).keys()
    new -= {*known, *(token.content for token in own_tokens.values())}
    return WrittenTokenizer(tokenizer, first, special, frozenset(new), tuple(notes))


def _parts_of(path: Path) -> Parts:
    return decode_json(path, MAX_TOKENIZER_BYTES, dict[str, msgspec.Raw])


def _write(path: Path, parts: Mapping[str, Any]) -> None:
    path.write_bytes(
        msgspec.json.encode({key: part for key, part in parts.items() if key not in ("padding", "truncation")})
    )


def _load(path: Path, where: Path) -> tuple[Tokenizer, int | None]:
    """The tokenizer at `path`, and the first id of every text. Raises ModelError, naming the file as `where`."""
    check_growth(path, MAX_TOKENIZER_BYTES, str(where))
    first = probe(path, where).first
    return _open(path, where), first


def _open(path: Path, where: Path) -> Tokenizer:
    """The tokenizer at `path`, which the other process has tried. Raises ModelError, naming the file as `where`."""
    tokenizer = Tokenizer.from_file(str(path))
    check_token_ids(tokenizer, path, str(where))
    return tokenizer


def _refuse_versions(given: Mapping[str, Any], source: Path) -> None:
    """Raises ModelError if transformers reads another file than tokenizer.json."""
    named = given.get("fast_tokenizer_files")
    others = [] if not isinstance(named, list) else [name for name in named if name != "tokenizer.json"]
    if others:
        raise ModelError(
            f"{source / special_tokens.CONFIG}: fast_tokenizer_files is {shown(named)}, files for versions of "
            "transformers; only tokenizer.json is read: copy the newest one to tokenizer.json, and remove the key"
        )


def _calls(special: SpecialTokens, name: str | None, known: Iterable[str]) -> list[AddCall]:
    """How the class `name` of transformers adds the tokens of the other files to those of tokenizer.json, `known`. Not
    here but in the other process, because the library runs the file's normalizer on them."""
    written = [*special.named, *special.extra]
    texts = {*known, *(token.content for token in special.listed)}
    new: list[str | AddedToken] = []
    for token in written:
        if special_tokens.content(token) not in texts and token not in new:
            new.append(token)  # also another one of the same content: the flags of the last count
    tokens = [*special.listed, *map(special_tokens.added, new)]
    names = set(special.names.values())
    for one in tokens:
        one.special = one.special or one.content in names
    calls = [AddCall(tokens)]
    if name is not None and CLASSES[name].adds_plainly:
        plain = [AddedToken(special_tokens.content(token), special=True) for token in written]
        calls.append(AddCall(plain))
    if name is not None and CLASSES[name].adds_as_special:
        calls.append(AddCall(list(map(special_tokens.added, written)), as_special=True))
    return calls


VOCABULARIES = ("tokenizer.model", "spiece.model", "tiktoken.model", "tekken.json", "vocab.json", "vocab.txt")
"""Files of tokenizers that transformers makes a tokenizer.json of."""
PACKAGES = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf", "tiktoken": "tiktoken"}
"""What it needs for some of them, and what they are imported as."""


def _missing_packages(vocabulary: Path) -> list[str]:
    """Packages that transformers needs to read the file, and that are not installed. Raises ModelError."""
    if vocabulary.suffix != ".model":
        return []
    is_sentencepiece = read(vocabulary, MAX_TOKENIZER_BYTES)[:1] == b"\n"  # else lines of base64
    needed = ("sentencepiece", "protobuf") if is_sentencepiece else ("tiktoken",)
    return [name for name in needed if not _is_installed(PACKAGES[name])]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _convert_tokenizer(source: Path, target: Path, name: str | None, advice: str = "") -> SpecialTokens:
    """Let transformers write tokenizer.json to `target`, from a copy of the files that it may read. `name` is the class
    that reads the folder, None if it has no tokenizer.json. Raises ModelError, with `advice` where it has one."""
    vocabulary = next((path for one in VOCABULARIES if (path := find(source, one)) is not None), None)
    if name is None:
        if vocabulary is None:
            raise ModelError(f"{source} has no tokenizer: tokenizer.json (or tokenizer.model) is missing")
        if missing := _missing_packages(vocabulary):
            raise ModelError(
                f"{source} has {vocabulary.name} only, and reading it needs {' and '.join(missing)}; make "
                f"tokenizer.json with: pip install {' '.join(missing)} && {_command(source, 'AutoTokenizer')}"
            )
    # Imported here: the import takes seconds, and most folders have a tokenizer.json of a known class.
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(dir=target, prefix=".tokenizer-") as copy:
        for file in sorted(path.name for path in source.iterdir() if path.suffix in READ_SUFFIXES):
            if not file.endswith(".safetensors") and file != INDEX and (path := find(source, file)) is not None:
                data = read(path, MAX_TOKENIZER_BYTES)
                if file.endswith(".json"):
                    _check_json(path, data)
                (Path(copy) / file).write_bytes(data)
        try:
            with panics_as_errors():
                made = AutoTokenizer.from_pretrained(
                    copy, local_files_only=True, trust_remote_code=False, mistral_format=False
                )
                check_vocabulary(made.backend_tokenizer, str(source), MAX_CONVERTED_ID)
                made.backend_tokenizer.save(str(target / "tokenizer.json"))
                names = {str(key): str(value) for key, value in made.special_tokens_map.items()}
                return SpecialTokens(names=names, split=made.split_special_tokens is True)
        except ModelError:
            raise
        except Exception as error:  # transformers documents no exceptions
            words = (str(error) or type(error).__name__).replace(copy, str(source)).strip().splitlines()[0][:MAX_WORDS]
            if name is not None:
                raise ModelError(
                    f"{source / special_tokens.CONFIG}: transformers cannot read the folder with the class {name} "
                    f"({words}){advice}"
                ) from error
            has_class = not words.startswith("Couldn't instantiate")  # what the general class says of vocab.json
            own_class = "" if has_class else _command(source, "GPT2Tokenizer")
            raise ModelError(
                f"{source} has {vocabulary and vocabulary.name} only, and transformers cannot make a tokenizer.json of "
                f"it ({words}); copy one from where the model is from"
                f"{own_class and f', or make it with the class of the tokenizer, for example: {own_class}'}"
            ) from error


def _command(source: Path, name: str) -> str:
    """A shell command that writes tokenizer.json."""
    code = f"from transformers import {name} as T; T.from_pretrained('.').save_pretrained('.')"
    return f'cd {shlex.quote(str(source))} && python -c "{code}"'


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
    return msgspec.structs.replace(
        config,
        eos_ids=eos_ids,
        bos_id=bos_id,
        add_bos=bos_id is not None and written.first == bos_id,
        special_tokens=special.names,
        split_special_tokens=special.split,
    )
