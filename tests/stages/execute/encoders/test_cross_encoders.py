"""Cross-encoders score pairs as transformers and sentence-transformers do: joined, typed, cut and activated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.gateway.replies.pooled import activated
from pipeline.stages.ingest.prompts import prompt_processor
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.tiny_encoders import Texts, Variant, make
from tests.stages.prepare import checkpoints

MAX_ERROR = 1e-4
LONGEST = 128
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LONG = "The quick brown fox, 12 345 dogs! " * 12
PAIRS = [("what is a fox?", "A fox."), ("Fox", LONG), (LONG, "dogs"), (LONG, LONG[5:]), ("", "a"), ("Straße", "")]


def word_pieces() -> Tokenizer:
    """BERT's, uncased."""
    words = [*SPECIALS, *"abcdefghijklmnopqrstuvwxyz0123456789?,.!", "the", "quick", "fox", "dog", "##s", "##x"]
    words += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwyz0123456789"]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def byte_pairs() -> Tokenizer:
    """RoBERTa's: two separators between the texts, and no types."""
    tokenizer = checkpoints.byte_level()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 1), add_prefix_space=False)
    return tokenizer


BERT_NAMES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIALS, strict=True))
ROBERTA_NAMES = {"bos_token": "<s>", "cls_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "unk_token": "<unk>"}
KINDS: dict[str, tuple[Variant, Any, dict[str, str]]] = {
    "bert": (Variant("bert", {"num_labels": 1}, head="sequence"), word_pieces, BERT_NAMES),
    "roberta": (
        Variant("roberta", {"num_labels": 1, "pad_token_id": 0, "type_vocab_size": 1}, head="sequence"),
        byte_pairs,
        {**ROBERTA_NAMES, "pad_token": "<unk>"},
    ),
}


def save(source: Path, kind: str, **config: Any) -> Path:
    """A folder with a tiny random one."""
    variant, tokenizer, names = KINDS[kind]
    make(variant).save_pretrained(source)
    tokenizer().save(str(source / "tokenizer.json"))
    named: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": LONGEST, **names}
    if kind == "bert":  # as transformers' own class, which its files have
        named["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (source / "tokenizer_config.json").write_text(json.dumps(named))
    checkpoints.edit_config(source, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}, **config)
    return source


class CrossEncoder:
    """A tiny random one, in transformers and prepared."""

    def __init__(self, folder: Path, kind: str, **config: Any) -> None:
        self.source = save(folder / "source", kind, **config)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(self.source)
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(self.source).eval()
        self.longest = LONGEST if kind == "bert" else LONGEST - 1
        prepared = prepare(Settings(model=str(self.source), cache_dir=str(folder / "cache")))
        self.config = ModelConfig.load(prepared)
        facts = m.ExecuteFacts(
            num_blocks=64, block_size=16, max_model_len=self.longest, vocab_size=self.config.vocab_size
        )
        self.processor = prompt_processor.load(prepared, facts, Tokenizer.from_file(str(prepared / "tokenizer.json")))
        self.texts = Texts(prepared, settings(kernels="torch", kv_mib=2, tokens=256))

    def theirs(self, first: str, second: str, most: int | None) -> tuple[list[int], float]:
        """The ids of a pair, and its logit. As in sentence-transformers, pairs are those of a batch."""
        inputs = self.tokenizer(
            [(first, second)], truncation="longest_first", max_length=most or self.longest, return_tensors="pt"
        )
        with torch.inference_mode():
            return inputs["input_ids"][0].tolist(), float(self.model(**inputs).logits[0, 0])

    def ours(self, first: str, second: str, most: int | None) -> tuple[list[int], float]:
        submit = m.Submit(
            *(1, 1, 0, 0.0),
            m.TextPrompt(first, second),
            m.GenerationOptions(max_tokens=1, pooling=m.Pooling.CLS),
            prompt_options=m.PromptOptions(truncate=most or -1, truncates_right=True),
        )
        ids, segment_start = self.processor.encode_pooled(submit)
        (logits,) = self.texts.compute([ids.tolist()], segment_starts=[segment_start])
        return ids.tolist(), float(logits[0])


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_have_the_ids_and_logits_of_transformers(tmp_path: Path, kind: str) -> None:
    encoder = CrossEncoder(tmp_path, kind)
    assert encoder.config.tasks == ("classify", "score")
    found = []
    for most in (None, 9, 40):
        for pair in PAIRS:
            ids, logit = encoder.ours(*pair, most)
            their_ids, their_logit = encoder.theirs(*pair, most)
            assert ids == their_ids
            assert logit == pytest.approx(their_logit, abs=MAX_ERROR)
            found.append(logit)
    assert np.std(found) > 100 * MAX_ERROR


SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("config", "settings_json", "function"),
    [
        ({}, {}, torch.sigmoid),
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}}, {}, torch.nn.Identity()),
        ({"sbert_ce_default_activation_function": IDENTITY}, {}, torch.nn.Identity()),
        ({"sbert_ce_default_activation_function": SIGMOID, "problem_type": "regression"}, {}, torch.sigmoid),
        ({}, {"activation_fn": IDENTITY}, torch.nn.Identity()),
        # As in sentence-transformers, whose own file counts before config.json.
        ({"sentence_transformers": {"activation_fn": SIGMOID}}, {"activation_fn": IDENTITY}, torch.nn.Identity()),
    ],
)
def test_the_activation_is_what_the_files_say(
    tmp_path: Path, config: dict[str, Any], settings_json: dict[str, Any], function: Any
) -> None:
    if settings_json:
        (tmp_path / "source").mkdir()
        (tmp_path / "source" / "config_sentence_transformers.json").write_text(json.dumps(settings_json))
        (tmp_path / "source" / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.Transformer"}])
        )
    encoder = CrossEncoder(tmp_path, "bert", **config)
    assert encoder.config.pooler is not None
    classifier = encoder.config.pooler.classifier
    assert classifier is not None
    for logit in (-2.0, 0.5):
        ours = activated(np.array([logit]), classifier.activation)[0]
        assert ours == pytest.approx(float(function(torch.tensor(logit))), abs=1e-6)
