"""Small tokenizers of the two common kinds."""

from functools import cache
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.pooler import Pooler
from tests.stages.ingest import models as prepared

CORPUS = [
    "the quick brown fox jumps over the lazy dog. ",
    "naïve café — 你好,世界! 👩‍👩‍👧 🤖 мир ",
    "\n\n  def f(x):\n\treturn x\n",
] * 20

CHARACTERS = "aé€你🤖👧 \n\u0800\uffff\U0010ffff"


@cache
def byte_level() -> Tokenizer:
    """Byte-level BPE with merges inside of characters, special tokens, and an added token that is not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|start|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("ナ ナ", special=False)])
    return tokenizer


@cache
def byte_fallback(strip: int = 1) -> Tokenizer:
    """As in Llama 2: `▁` for a space, byte tokens for unknown characters, and a leading space is stripped."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "▁fox", "the", "fox", "▁▁", "é", "你", ".", "\n", "▁<0x"]
    tokenizer = Tokenizer(
        models.BPE({token: index for index, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strip:
        steps.append(decoders.Strip(" ", strip, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def id_of(tokenizer: Tokenizer, token: str) -> int:
    token_id = tokenizer.token_to_id(token)
    assert token_id is not None, token
    return token_id


def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The id of each byte's token."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
        return [id_of(tokenizer, letters[byte]) for byte in range(256)]
    return [id_of(tokenizer, f"<0x{byte:02X}>") for byte in range(256)]


def save(tokenizer: Tokenizer, folder: Path, pooler: Pooler | None = None) -> None:
    """A prepared folder without weights; with a `pooler` that of a model that generates no text."""
    prepared.folder(folder, None, tokenizer)
    msgspec.structs.replace(ModelConfig.load(folder), pooler=pooler).save(folder)
