"""Folders with random tokenizers and random files beside them give the ids and texts of transformers' AutoTokenizer.

A case is a number: `PIPELINE_TOKENIZER_SEED=N` runs that one alone.
"""

import json
import os
import random
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from pipeline.runtime.process.rust_panics import RustPanic, panics_as_errors
from pipeline.stages.prepare.sources.source import ModelError
from tests.stages.prepare import checkpoints
from tests.stages.prepare.tokenizers.test_special_tokens import TEXTS, prepared, token

NASTY = [
    *TEXTS,
    *checkpoints.TEXTS,
    "fox <b> <c> <a><tool> <A>fox<pad>fo fo<tool>  <tool>\n<tool>x",
    "\ufb01 \uff1cs\uff1e \uff1c/s\uff1e e\u0301 \u00e9 \u212b \u1100\u1161 \u0130i \u0000\u00ad\ufeff\u2028",
    "\u2581fox \u2581\u2581 \u0120fox ##fox <0x41> <0xE4> [UNK] \ud7ff \U0010ffff",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "</s></s> </s>\t</s>\r\n</S><S><s ><s><unk><unk>",
    "A" * 300 + " " * 40 + "fox" * 20,
]
POOL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<tool>", "<pad>", "fox", "fo", "<a>", "<b> ", " <c>"]
POOL += ["\u00e9", "\uff1cd\uff1e", "A", "\n", "  "]
SPECIAL = ["<unk>", "<s>", "</s>"]
CLASSES = ["PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2TokenizerFast", "TokenizersBackend"]
CLASSES += ["GPTNeoXTokenizerFast", "CohereTokenizer", "GemmaTokenizerFast", "LlamaTokenizer"]
MODEL_TYPES = ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "mistral", "cohere", "phi3", "gemma3_text", "olmo2"]
IN_BRIEF = [*range(60, 75), 230, 742, 841]
"""Three of the first had other ids once. 230 can't encode all texts, 742 and 841 have tokens twice."""
CASES = range(1000) if os.environ.get("PIPELINE_ALL_CASES") else IN_BRIEF
SEEDS = [int(seed)] if (seed := os.environ.get("PIPELINE_TOKENIZER_SEED")) else CASES


class Dice(random.Random):
    """Random parts of a tokenizer's files."""

    def sometimes(self, share: float) -> bool:
        return self.random() < share

    def some(self, values: list[Any], most: int) -> list[Any]:
        return [self.choice(values) for _ in range(self.randrange(1, most + 1))]

    def flags(self) -> dict[str, bool]:
        return {flag: self.sometimes(0.4) for flag in ("lstrip", "rstrip", "normalized", "single_word")}

    def token(self) -> Any:
        """As the files beside tokenizer.json have it."""
        text = self.choice(POOL)
        if self.sometimes(0.6):
            return text
        special = {"special": self.sometimes(0.6)} if self.sometimes(0.5) else {}
        typed = {"__type": "AddedToken"} if self.sometimes(0.8) else {}
        return {**token(text, **self.flags()), **special, **typed}

    def listed(self) -> Any:
        return token(self.choice(POOL), **self.flags(), special=self.sometimes(0.5))

    def normalizer(self) -> Any:
        kinds: list[Callable[[], Any]] = [
            normalizers.NFC,
            normalizers.NFKC,
            normalizers.NFD,
            normalizers.Lowercase,
            normalizers.StripAccents,
            normalizers.Nmt,
            lambda: normalizers.BertNormalizer(lowercase=self.sometimes(0.5), strip_accents=self.sometimes(0.5)),
            lambda: normalizers.Strip(left=self.sometimes(0.5), right=self.sometimes(0.5)),
            lambda: normalizers.Replace(Regex(r" {2,}"), "\u2581"),
            lambda: normalizers.Replace(" ", "\u2581"),
            lambda: normalizers.Prepend("\u2581"),
        ]
        made = [kind() for kind in self.some(kinds, 3)]
        return made[0] if len(made) == 1 else normalizers.Sequence(made)

    def pre_tokenizer(self) -> Any:
        kinds: list[Callable[[], Any]] = [
            lambda: pre_tokenizers.ByteLevel(add_prefix_space=self.sometimes(0.5), use_regex=self.sometimes(0.7)),
            lambda: pre_tokenizers.Metaspace(
                prepend_scheme=self.choice(["first", "always", "never"]), split=self.sometimes(0.5)
            ),
            lambda: pre_tokenizers.Digits(individual_digits=self.sometimes(0.5)),
            lambda: pre_tokenizers.Split(
                Regex(self.choice([r"\w+|\s+", r"(?=[A-Z])", r"[^\s\w]+", r"\s+(?!\S)"])),
                self.choice(["isolated", "removed", "merged_with_previous", "merged_with_next", "contiguous"]),
                invert=self.sometimes(0.3),
            ),
            pre_tokenizers.Whitespace,
            pre_tokenizers.WhitespaceSplit,
            pre_tokenizers.BertPreTokenizer,
            pre_tokenizers.UnicodeScripts,
            lambda: pre_tokenizers.Punctuation(self.choice(["isolated", "removed", "contiguous"])),
        ]
        made = [kind() for kind in self.some(kinds, 2)]
        return made[0] if len(made) == 1 else pre_tokenizers.Sequence(made)

    def tokenizer(self) -> dict[str, Any]:
        """The members of a tokenizer.json."""
        if self.sometimes(0.5):
            made = checkpoints.byte_level()
        else:
            model, trainer = self.choice(
                [
                    (models.BPE(unk_token="<unk>", fuse_unk=self.sometimes(0.5)), trainers.BpeTrainer),
                    (models.Unigram(), trainers.UnigramTrainer),
                    (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer),
                    (models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer),
                ]
            )
            made = Tokenizer(model)
            made.pre_tokenizer = pre_tokenizers.Metaspace()
            unknown = {"unk_token": "<unk>"} if trainer is trainers.UnigramTrainer else {}
            made.train_from_iterator(
                [*checkpoints.TEXTS[:3], "fox fo pad tool"] * 4,
                trainer(vocab_size=300, special_tokens=SPECIAL, show_progress=False, **unknown),
            )
            made.decoder = self.choice([decoders.Metaspace(), decoders.WordPiece(), decoders.Fuse(), None])
        made.add_special_tokens(SPECIAL)
        if self.sometimes(0.5):
            made.normalizer = self.normalizer()
        if self.sometimes(0.6):
            made.pre_tokenizer = self.pre_tokenizer()
        for _ in range(self.randrange(4)):
            made.add_tokens([AddedToken(self.choice(POOL), special=self.sometimes(0.4), **self.flags())])
        if self.sometimes(0.4):
            made.post_processor = processors.TemplateProcessing(
                single=self.choice(["<s> $A", "<s> $A </s>", "$A </s>"]), special_tokens=[("<s>", 1), ("</s>", 2)]
            )
        parts: dict[str, Any] = json.loads(made.to_str())
        if self.sometimes(0.1):  # the same token again, with other flags
            again = self.choice(parts["added_tokens"])
            parts["added_tokens"].append({**again, **self.flags(), "special": self.sometimes(0.5)})
        return parts

    def config(self) -> dict[str, Any]:
        """tokenizer_config.json."""
        made: dict[str, Any] = {}

        def maybe(key: str, value: Callable[[], Any], share: float) -> None:
            if self.sometimes(share):
                made[key] = value()

        for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
            maybe(name, lambda: self.choice([self.token(), self.token(), None]), 0.3)
        maybe(
            "added_tokens_decoder",
            lambda: {str(self.randrange(598, 612)): self.listed() for _ in range(self.randrange(4))},
            0.4,
        )
        maybe("additional_special_tokens", lambda: [self.token() for _ in range(self.randrange(3))], 0.3)
        maybe(
            "extra_special_tokens",
            lambda: self.choice(
                [[self.token() for _ in range(self.randrange(3))], {"image_token": self.token(), "b_token": "<b> "}, {}]
            ),
            0.3,
        )
        maybe("image_token", self.token, 0.2)
        maybe("x_token", self.token, 0.1)
        maybe("model_specific_special_tokens", lambda: {"boi_token": self.token()}, 0.1)
        for flag, share in [("add_bos_token", 0.3), ("add_eos_token", 0.3), ("legacy", 0.2), ("add_prefix_space", 0.2)]:
            maybe(flag, lambda: self.sometimes(0.5), share)
        maybe("split_special_tokens", lambda: self.sometimes(0.5), 0.15)
        maybe("tokenizer_class", lambda: self.choice([*CLASSES, None]), 0.5)
        return made

    def map(self) -> dict[str, Any]:
        """special_tokens_map.json."""
        made = {name: self.token() for name in ("bos_token", "eos_token", "pad_token") if self.sometimes(0.5)}
        if self.sometimes(0.4):
            made["additional_special_tokens"] = [self.token()]
        if self.sometimes(0.2):
            made["extra_special_tokens"] = self.choice([[self.token()], {"image_token": self.choice(POOL)}])
        return made

    def folder(self, folder: Path) -> Path:
        folder.mkdir()
        files: dict[str, Any] = {
            "tokenizer.json": self.tokenizer(),
            "config.json": {"model_type": self.choice(MODEL_TYPES), "bos_token_id": 1, "eos_token_id": 2},
        }
        if self.sometimes(0.9):
            files["tokenizer_config.json"] = self.config()
        if self.sometimes(0.4):
            files["special_tokens_map.json"] = self.map()
        if self.sometimes(0.3):
            files["added_tokens.json"] = {self.choice(POOL): self.randrange(600, 606) for _ in range(2)}
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content), "utf-8")
        return folder


def compare(folder: Path, target: Path) -> str:
    """What came of the folder: "same", "refused" by name, or "neither", if transformers can't read it either. Fails if
    ids or texts differ."""
    theirs = None
    with suppress(Exception):  # transformers documents no exceptions
        theirs = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    try:
        written, config = prepared(folder, target)
    except ModelError as error:
        assert "\n" not in str(error)
        return "neither" if theirs is None else "refused"
    if theirs is None:
        return "neither"
    ours = Tokenizer.from_file(str(target / "tokenizer.json"))
    ours.encode_special_tokens = config.split_special_tokens
    assert ours.get_vocab() == theirs.get_vocab()
    assert written.special.names == theirs.special_tokens_map
    for text in NASTY:
        try:
            with panics_as_errors():
                ids = theirs(text)["input_ids"]
        except RustPanic:  # on tokens that overlap once their spaces are stripped
            with pytest.raises(RustPanic), panics_as_errors():
                ours.encode(text)
            continue
        except Exception as error:  # noqa: BLE001 - the unknown token of its model is not in the vocabulary
            with pytest.raises(type(error), match=re.escape(str(error))):
                ours.encode(text)
            continue
        assert ours.encode(text).ids == ids, text
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips), text
    if (eos := theirs.eos_token_id) is not None and eos < config.vocab_size:
        assert config.eos_ids[0] == eos
    return "same"


def test_ids_and_texts_are_those_of_auto_tokenizer(tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    found = []
    for seed in SEEDS:
        dice, folder = Dice(seed), tmp_path / str(seed)
        folder.mkdir()
        try:
            found.append(compare(dice.folder(folder / "source"), folder / "target"))
        except Exception as error:
            raise AssertionError(f"PIPELINE_TOKENIZER_SEED={seed}: {error}") from error
    assert len(SEEDS) == 1 or found.count("same") > len(found) / 4
    assert found.count("refused") < max(2, len(found) / 4)
