"""Small vocabularies of each kind, trained on the texts. Their tokens cross the borders between words, so that ids show
where a text was split."""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tools.tokenizer_vectors.texts import TEXTS

SPACE = "▁"
NUM_TOKENS = 900
NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]

Keys = dict[str, Any]
"""The keys below `tokenizer.ggml`."""


def vocabularies() -> dict[str, Keys]:
    """By name."""
    return {
        "byte-level": _byte_level(),
        "gemma4": _raw("gemma4", {}),
        "sarvam-moe": _raw("gpt2", {"pre": "sarvam-moe"}),
        "sentencepiece": _sentencepiece({}),
        "sentencepiece without prefix": _sentencepiece({"add_space_prefix": False, "add_bos_token": False}),
        "wordpiece": _wordpiece({}),
        "wordpiece with case": _wordpiece({"normalizer.lowercase": False}),
        "unigram": _unigram({"add_space_prefix": True, "remove_extra_whitespaces": True}),
        "unigram with all spaces": _unigram({"add_space_prefix": True, "remove_extra_whitespaces": False}),
    }


def save(path: Path, keys: Mapping[str, Any], name: str | None = None, architecture: str = "llama") -> None:
    """A .gguf file with nothing but a vocabulary. `name` is the model's."""
    writer = gguf.GGUFWriter(path, architecture)
    if name is not None:
        writer.add_name(name)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(keys["tokens"]))
    for key, value in keys.items():
        add: Any = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def _texts() -> Iterator[str]:
    yield from TEXTS
    yield from (unicodedata.normalize("NFC", text) for text in TEXTS)


def _trained(tokenizer: Tokenizer, alphabet: list[str], num_tokens: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of BPE."""
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens, min_frequency=1, initial_alphabet=alphabet, show_progress=False, max_token_length=12
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [" ".join(pair) for pair in model["merges"]]


def _byte_level() -> Keys:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens, merges = _trained(tokenizer, pre_tokenizers.ByteLevel.alphabet(), NUM_TOKENS)
    tokens = [*tokens, "<s>", "</s>"]
    types = [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2
    ends = {"bos_token_id": len(tokens) - 2, "eos_token_id": len(tokens) - 1}
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": types, "merges": merges, **ends}


def _spm_pieces() -> tuple[list[str], list[str]]:
    """Tokens in which ▁ stands for a space, without those for a part of the alphabet, and their merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")
    tokens, merges = _trained(tokenizer, [], NUM_TOKENS)
    absent = set("漢字ไ🚀é½")
    tokens = [token for token in tokens if not absent & set(token)]
    return tokens, [merge for merge in merges if not absent & set(merge)]


SPECIALS = ["<unk>", "<s>", "</s>"]
SPECIAL_KEYS = {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _raw(model: str, keys: Keys) -> Keys:
    pieces, merges = _spm_pieces()
    tokens = [*SPECIALS, *BYTES, *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * len(BYTES), *[NORMAL] * len(pieces)]
    return {"model": model, "tokens": tokens, "token_type": types, "merges": merges, **SPECIAL_KEYS, **keys}


def _sentencepiece(keys: Keys) -> Keys:
    vocabulary = _raw("llama", keys)
    del vocabulary["merges"]
    scores = [0.0 if i < len(SPECIALS) + len(BYTES) else -float(i) for i in range(len(vocabulary["tokens"]))]
    return {**vocabulary, "scores": scores}


def _wordpiece(keys: Keys) -> Keys:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    lowercase = keys.get("normalizer.lowercase", True)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=NUM_TOKENS, min_frequency=1, show_progress=False)
    tokenizer.train_from_iterator([text for text in _texts() if "漢" not in text], trainer)
    vocab = tokenizer.get_vocab()
    pieces = [t.removeprefix("##") if t.startswith("##") else SPACE + t for t in sorted(vocab, key=lambda t: vocab[t])]
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces]
    types = [CONTROL] * 4 + [NORMAL] * len(pieces)
    ids = {"padding_token_id": 0, "unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3}
    return {"model": "bert", "tokens": tokens, "token_type": types, **ids, **keys}


def _unigram(keys: Keys) -> Keys:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=NUM_TOKENS, show_progress=False)
    tokenizer.train_from_iterator([text for text in _texts() if "漢" not in text], trainer)
    pieces = json.loads(tokenizer.to_str())["model"]["vocab"]
    tokens = ["<pad>", "</s>", "<unk>", *(token for token, _ in pieces)]
    types = [CONTROL, CONTROL, UNKNOWN, *[NORMAL] * len(pieces)]
    scores = [0.0, 0.0, 0.0, *(score for _, score in pieces)]
    ids = {"padding_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}
    return {"model": "t5", "tokens": tokens, "token_type": types, "scores": scores, **ids, **keys}
