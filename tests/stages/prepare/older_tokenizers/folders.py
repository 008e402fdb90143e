"""Folders without tokenizer.json: vocab.json and merges.txt, tekken.json, tiktoken's files, SentencePiece's.

    python -m tests.stages.prepare.older_tokenizers.folders FOLDER

compares all of the last two kinds with transformers. It needs the packages in requirements.txt beside it.
"""

import base64
import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.stages.prepare import checkpoints
from tests.stages.prepare.tokenizers.test_tokenizer_classes import NAMES, SPECIAL, built, check, named

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Folder(msgspec.Struct, frozen=True, kw_only=True):
    model_type: str
    files: dict[str, bytes]
    config: dict[str, Any] | None = None

    def write(self, path: Path) -> Path:
        path.mkdir()
        files = {"config.json": _json({"model_type": self.model_type, "bos_token_id": 1, "eos_token_id": 2})}
        if self.config is not None:
            files["tokenizer_config.json"] = _json(self.config)
        for name, content in (files | self.files).items():
            (path / name).write_bytes(content)
        return path


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


@cache
def bpe() -> dict[str, bytes]:
    model = json.loads(built("bytes"))["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    return {"vocab.json": _json(model["vocab"]), "merges.txt": f"#version: 0.2\n{merges}".encode()}


@cache
def _tokens() -> list[bytes]:
    """The bytes of each token but the special ones, in order of their ids."""
    vocab = json.loads(built("bytes"))["model"]["vocab"]
    numbers = {char: byte for byte, char in bytes_to_unicode().items()}
    return [bytes(numbers[char] for char in text) for text in sorted(vocab, key=vocab.get) if text not in SPECIAL]


def tekken(*, is_old: bool = False) -> dict[str, bytes]:
    special = [{"rank": i, "token_str": text, "is_control": True} for i, text in enumerate([*SPECIAL, "[INST]"])]
    config = {"pattern": PATTERN, "default_vocab_size": len(_tokens()) + 8, "default_num_special_tokens": 8}
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(one).decode(), "token_str": None} for i, one in enumerate(_tokens())
    ]
    return {
        "tekken.json": _json({"config": config, "vocab": entries, **({} if is_old else {"special_tokens": special})})
    }


def tiktoken(name: str) -> dict[str, bytes]:
    return {name: b"\n".join(b"%s %d" % (base64.b64encode(one), i) for i, one in enumerate(_tokens()))}


def sentencepiece(kind: str) -> bytes:
    """A model of SentencePiece: "bpe" or "unigram"."""
    import sentencepiece as package

    lines = [line for text in checkpoints.TEXTS[:3] for line in text.splitlines() if line.strip()]
    made = io.BytesIO()
    package.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines, "quick fox"] * 20),
        model_writer=made,
        model_type=kind,
        vocab_size=400 if kind == "bpe" else 330,
        hard_vocab_limit=False,
        byte_fallback=True,
        user_defined_symbols=["<x>"],
        minloglevel=2,
    )
    return made.getvalue()


ADDS = {"add_bos_token": True, "add_eos_token": True}
WITH_PACKAGES: list[tuple[str, dict[str, Any] | None]] = [
    ("llama", None),
    ("llama", named("LlamaTokenizer")),
    ("llama", named("LlamaTokenizer", legacy=True, **ADDS)),
    ("llama", named("LlamaTokenizer", legacy=False, add_bos_token=True)),
    ("llama", named("LlamaTokenizerFast", add_prefix_space=False, split_special_tokens=True)),
    ("llama", named("LlamaTokenizer", additional_special_tokens=["<|im_start|>"], eos_token="<|im_end|>")),
    ("llama", named("T5Tokenizer")),
    ("mistral", named("LlamaTokenizer", add_bos_token=True)),
    ("mistral", None),
    ("gemma", None),
    ("gemma2", {"tokenizer_class": "GemmaTokenizer", "add_bos_token": True}),
    ("phi3", named("LlamaTokenizer", add_bos_token=False)),
    ("granite", {}),
]


def main(folder: Path) -> None:
    folders = [
        Folder(model_type=model_type, files={name: data}, config=config)
        for data in (sentencepiece("bpe"), sentencepiece("unigram"))
        for model_type, config in WITH_PACKAGES
        for name in (["tokenizer.model", "spiece.model"] if config == named("T5Tokenizer") else ["tokenizer.model"])
    ]
    folders += [
        Folder(model_type="llama", files=tiktoken("tiktoken.model"), config=NAMES),
        Folder(model_type="llama", files=tiktoken("tokenizer.model"), config=named("PreTrainedTokenizerFast", **ADDS)),
    ]
    for i, one in enumerate(folders):
        print(i, one.model_type, *one.files, one.config, flush=True)
        check(one.write(folder / str(i)), folder / f"{i}-prepared")
    print("compared", len(folders))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
