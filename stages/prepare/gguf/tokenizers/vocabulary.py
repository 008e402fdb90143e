"""Reads the `tokenizer.ggml.*` keys of a .gguf file, with llama.cpp's defaults for those that it lacks."""

import msgspec

from pipeline.stages.prepare.gguf.metadata import (
    BOS_KEY,
    EOS_KEY,
    MASK_KEY,
    MODEL_KEY,
    PAD_KEY,
    SEP_KEY,
    UNKNOWN_KEY,
    Metadata,
)
from pipeline.stages.prepare.gguf.tokenizers import special_tokens
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from pipeline.stages.prepare.sources.source import ModelError

PRE_KEY = "tokenizer.ggml.pre"
CLS_KEY = "tokenizer.ggml.cls_token_id"
NAMED = {
    "bos_token": BOS_KEY,
    "eos_token": EOS_KEY,
    "unk_token": UNKNOWN_KEY,
    "pad_token": PAD_KEY,
    "cls_token": CLS_KEY,
    "sep_token": SEP_KEY,
    "mask_token": MASK_KEY,
}
"""The names of special tokens in chat templates."""
ALWAYS_BOS = ("gemma4", "granite-embed-multi-311m")
"""Pre-tokenizers of vocabularies whose texts begin with BOS even if the file says otherwise, as in llama.cpp."""

MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 1024
MAX_VOCABULARY_BYTES = 16 * 1024**2
"""Of all tokens together. Finding SentencePiece's merges tries every split of every token."""
MAX_MERGES = 2**21


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The `tokenizer.ggml.*` keys of a GGUF file."""

    model: str
    pre: str
    """"default" if the file names no pre-tokenizer."""
    tokens: list[str]
    types: list[int]
    """Control tokens have theirs even if the file says otherwise."""
    scores: list[float]
    merges: list[str]
    bos_id: int | None
    """For WordPiece vocabularies, the id of [CLS]."""
    eos_id: int | None
    """For WordPiece vocabularies, and others whose texts end with it, the id of the separator."""
    unknown_id: int | None
    names: dict[str, str]
    """Texts of special tokens, by the names that chat templates use."""
    end_ids: list[int]
    """The tokens that end a reply; the file's `eos_token_id` first."""
    left_strip: frozenset[int] = frozenset()
    """Special tokens that take the spaces before them."""
    right_strip: frozenset[int] = frozenset()
    """Special tokens that take the spaces behind them."""
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool
    remove_extra_whitespaces: bool = False
    charsmap: bytes = b""
    """SentencePiece's normalization rules, compiled."""
    lowercase: bool = True
    """Of WordPiece vocabularies."""
    strip_accents: bool = True
    """Of WordPiece vocabularies."""


def read_vocabulary(metadata: Metadata, vocab_size: int) -> GgufVocabulary:
    """The vocabulary of a file. Raises ModelError if its lists have different lengths, or more entries than
    `vocab_size`, the number of rows of the embedding."""
    tokens = metadata.list_of("tokenizer.ggml.tokens", str)
    if tokens is None:
        raise ModelError(f"{metadata.path}: the key tokenizer.ggml.tokens is missing")
    count = len(tokens)
    _check_sizes(metadata, tokens, vocab_size)
    merges = metadata.list_of("tokenizer.ggml.merges", str) or []
    if len(merges) > MAX_MERGES:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.merges has {len(merges)} merges; at most {MAX_MERGES} are supported"
        )
    model = metadata.need(MODEL_KEY, str)
    eos_key = SEP_KEY if model == "bert" or _adds_sep(metadata) else EOS_KEY
    bos_id = metadata.token_id(BOS_KEY, count)
    if model == "bert" and metadata.get(BOS_KEY, int) is None and metadata.get(CLS_KEY, int) is not None:
        bos_id = metadata.token_id(CLS_KEY, count)
    lowercase = metadata.get("tokenizer.ggml.normalizer.lowercase", bool, True)
    joins_spaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    has_prefix = model == "llama" or (model == "t5" and joins_spaces)  # if the file doesn't say it
    types = metadata.list_of("tokenizer.ggml.token_type", int, count) or [special_tokens.NORMAL] * count
    special = special_tokens.find(metadata, tokens, types)
    return GgufVocabulary(
        model=model,
        pre=metadata.get(PRE_KEY, str) or "default",
        tokens=tokens,
        types=special.types,
        scores=metadata.list_of("tokenizer.ggml.scores", float, count) or [0.0] * count,
        merges=merges,
        bos_id=bos_id,
        eos_id=metadata.token_id(eos_key, count),
        unknown_id=metadata.token_id(UNKNOWN_KEY, count),
        names=_names(metadata, tokens),
        end_ids=special.end_ids,
        left_strip=special.left_strip,
        right_strip=special.right_strip,
        add_bos=adds_bos(metadata),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", bool, model == "t5") or _adds_sep(metadata),
        add_space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", bool, has_prefix),
        remove_extra_whitespaces=joins_spaces,
        charsmap=_bytes(metadata, "tokenizer.ggml.precompiled_charsmap"),
        lowercase=lowercase,
        strip_accents=metadata.get("tokenizer.ggml.normalizer.strip_accents", bool, lowercase),
    )


def _names(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    """The texts of the tokens with names. Without BOS or EOS, these are empty, as in llama.cpp."""
    names = {"bos_token": "", "eos_token": ""}
    for name, key in NAMED.items():
        if (token_id := metadata.token_id(key, len(tokens))) is not None:
            names[name] = tokens[token_id]
    return names


def adds_bos(metadata: Metadata) -> bool:
    """Whether texts begin with BOS. Without the flag, as in llama.cpp: SentencePiece and WordPiece vocabularies, and
    the pre-tokenizers with `adds_bos`. Gemma 4's always do, whatever the flag says."""
    model, pre = metadata.get(MODEL_KEY, str), metadata.get(PRE_KEY, str)
    if model == "gemma4" or (model == "gpt2" and pre in ALWAYS_BOS):
        return True
    default = model in ("llama", "bert") or (model == "gpt2" and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].adds_bos)
    return bool(metadata.get("tokenizer.ggml.add_bos_token", bool, default))


def _adds_sep(metadata: Metadata) -> bool:
    model, pre = metadata.get(MODEL_KEY, str), metadata.get(PRE_KEY, str)
    default = model == "bert" or (model == "gpt2" and pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].adds_sep)
    return bool(metadata.get("tokenizer.ggml.add_sep_token", bool, default))


def _check_sizes(metadata: Metadata, tokens: list[str], vocab_size: int) -> None:
    count = len(tokens)
    if count > MAX_TOKENS:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.tokens has {count} tokens; at most {MAX_TOKENS} are supported"
        )
    sizes = [len(token.encode()) for token in tokens]
    if max(sizes, default=0) > MAX_TOKEN_BYTES or sum(sizes) > MAX_VOCABULARY_BYTES:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.tokens has {sum(sizes)} bytes, and up to {max(sizes)} in one token; at "
            f"most {MAX_VOCABULARY_BYTES} and {MAX_TOKEN_BYTES} are supported"
        )
    if count > vocab_size:
        raise ModelError(
            f"{metadata.path}: tokenizer.ggml.tokens has {count} tokens, but token_embd.weight has {vocab_size} rows"
        )


def _bytes(metadata: Metadata, key: str) -> bytes:
    """An array of bytes, signed or not; empty if the file lacks the key. Raises ModelError for other values."""
    values = metadata.list_of(key, int) or []
    if not all(-128 <= value <= 255 for value in values):
        raise ModelError(f"{metadata.path}: {key} has values that are not bytes")
    return bytes(value & 0xFF for value in values)
