"""A tiny random encoder of each architecture, made by transformers from a config and prepared from its folder."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification

from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.execute.publishing import Sampled
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import Driver, row_add
from tests.stages.prepare import checkpoints

VOCAB_SIZE = 608
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODERN = {"cls_token_id": 1, "sep_token_id": 2}
AUTO = {"": AutoModel, "sequence": AutoModelForSequenceClassification, "tokens": AutoModelForTokenClassification}


@dataclass(frozen=True)
class Variant:
    kind: str
    changes: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=lambda: SIZES)
    head: str = ""
    """A key of `AUTO`."""


VARIANTS: dict[str, Variant] = {
    "bert": Variant("bert"),
    "bert, one type, relu": Variant("bert", {"type_vocab_size": 1, "hidden_act": "relu"}),
    "bert, sequence": Variant("bert", {"num_labels": 3}, head="sequence"),
    "bert, tokens": Variant("bert", {"num_labels": 5}, head="tokens"),
    "roberta": Variant("roberta", {"pad_token_id": 1}),
    "xlm-roberta, sequence": Variant(
        "xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1}, head="sequence"
    ),
    "camembert, tokens": Variant("camembert", {"pad_token_id": 1, "type_vocab_size": 1}, head="tokens"),
    "mpnet": Variant("mpnet", {"pad_token_id": 1}),
    "mpnet, sequence": Variant("mpnet", {"pad_token_id": 1, "num_labels": 2}, head="sequence"),
    "modernbert": Variant("modernbert", {"local_attention": 12, **MODERN}),
    "modernbert, sequence": Variant(
        "modernbert",
        {"local_attention": 13, "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True, **MODERN},
        head="sequence",
    ),
    "modernbert, tokens": Variant("modernbert", {"attention_bias": True, **MODERN}, head="tokens"),
    "eurobert": Variant("eurobert", {"num_key_value_heads": 2, "mask_token_id": 3}),
    "eurobert, sequence": Variant("eurobert", {"classifier_pooling": "bos", "mask_token_id": 3}, head="sequence"),
    "nomic_bert": Variant("nomic_bert"),
    "nomic_bert, sequence": Variant("nomic_bert", {"num_labels": 3}, head="sequence"),
    "gte": Variant("gte"),
    "gte, two types": Variant("gte", {"type_vocab_size": 2}),
    "gte, tokens": Variant("gte", {"type_vocab_size": 0, "num_labels": 4}, head="tokens"),
    "gemma3, bidirectional": Variant(
        "gemma3_text",
        {
            "use_bidirectional_attention": True,
            "sliding_window": 21,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3, sequence": Variant("qwen3", {"head_dim": 16, "num_key_value_heads": 2, "num_labels": 3}, head="sequence"),
    "qwen3, tokens": Variant("qwen3", {"head_dim": 16, "num_key_value_heads": 2, "num_labels": 3}, head="tokens"),
    "distilbert": Variant(
        "distilbert", {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "max_position_embeddings": 128}, {}
    ),
    "distilbert, sequence": Variant(
        "distilbert", {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}, {}, head="sequence"
    ),
    "distilbert, tokens": Variant(
        "distilbert", {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4}, {}, head="tokens"
    ),
}


def make(variant: Variant, seed: int = 0) -> Any:
    """The model in transformers, float32, whose hidden states differ enough to detect errors."""
    config = AutoConfig.for_model(variant.kind, vocab_size=VOCAB_SIZE, **{**variant.sizes, **IDS, **variant.changes})
    config.pad_token_id = {**IDS, **variant.changes}["pad_token_id"]
    model = AUTO[variant.head].from_config(config)
    checkpoints.randomize(model, seed)
    return model.eval()


def write(folder: Path, variant: Variant) -> tuple[Path, Any]:
    """A prepared folder of the model, and the model in transformers."""
    model = make(variant)
    source = checkpoints.save_folder(
        folder / "source", model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache"))), model


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num).tolist()


class Texts:
    """Computes whole texts with a runner, some in one step."""

    def __init__(self, folder: Path, settings: Settings | None = None, driver: Driver | None = None) -> None:
        """With the settings, or with a driver of several ranks."""
        if driver is None:
            assert settings is not None
            driver = Driver(folder, settings)
        self.driver = driver
        self.runner: CpuRunner = self.driver.runner
        pooler = ModelConfig.load(folder).pooler
        self.pooling = m.Pooling.MEAN if pooler is None else m.Pooling[pooler.pooling.upper()]

    def compute(
        self,
        texts: Sequence[list[int]],
        pooling: m.Pooling | None = None,
        segment_starts: Sequence[int] = (),
        adapter_ids: Sequence[str] = (),
    ) -> list[np.ndarray]:
        """The results of texts that are computed in one step, each float32 [width] or [tokens, width]."""
        how = self.pooling if pooling is None else pooling
        adds = []
        for row, ids in enumerate(texts):
            start = segment_starts[row] if segment_starts else 0
            adapter_id = adapter_ids[row] if adapter_ids else ""
            options = m.GenerationOptions(pooling=how, max_tokens=1, segment_start=start, adapter_id=adapter_id)
            adds.append(row_add(row, ids, self.driver.take_blocks(len(ids)), options))
        sampled = self.driver.step([(row, 0, len(ids), True) for row, ids in enumerate(texts)], adds=adds)
        self.driver.step(drops=list(range(len(texts))))
        self.driver.clear()
        return self._results(sampled, how, [len(ids) for ids in texts])

    def _results(self, sampled: Sampled, how: m.Pooling, lengths: list[int]) -> list[np.ndarray]:
        """Those of texts that failed are NaN."""
        width, is_all = self.runner.facts.hidden_size, how == m.Pooling.ALL
        has_failed = (sampled.finishes == m.Finish.ERROR).tolist()
        numbers = sampled.token_outputs.view(np.float32).reshape(-1, width)
        found = []
        for length, failed in zip(lengths, has_failed, strict=True):
            rows = length if is_all else 1
            part = np.full((rows, width), np.nan, np.float32) if failed else numbers[:rows]
            numbers = numbers if failed else numbers[rows:]
            found.append(part if is_all else part[0])
        assert not len(numbers)
        return found
