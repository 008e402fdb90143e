"""Embedders with trained weights have the vectors of transformers, from the tokenizer to the layers after the pooling.

These tests are collected only if the model's folder is there: `.venv/bin/python -m tools.models.fetch_test_embedders
NAME` downloads it.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModel, AutoTokenizer

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.test_encoders import cosine
from tests.stages.execute.encoders.tiny_encoders import Texts
from tools.models.fetch_test_embedders import EMBEDDERS
from tools.models.fetch_test_models import FOLDER

FETCHED = [name for name, model in EMBEDDERS.items() if (FOLDER / model.name).is_dir()]
BOUNDS: dict[tuple[Any, Any], float] = {("torch", "float32"): 0.99999, ("auto", "bfloat16"): 0.9999}
TEXTS = [
    "a",
    "Hello world",
    "task: search result | query: What is the capital of France?",
    "naïve Straße, 漢字と仮名, and 🙂",
    "The quick brown fox jumps over the lazy dog. " * 40,
]


@pytest.mark.parametrize("name", FETCHED)
def test_vectors_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    source = FOLDER / EMBEDDERS[name].name
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path)))
    tokenizer, theirs = Tokenizer.from_file(str(folder / "tokenizer.json")), AutoTokenizer.from_pretrained(source)
    texts = [tokenizer.encode(text).ids for text in TEXTS]
    assert texts == [theirs(text)["input_ids"] for text in TEXTS]
    model: Any = AutoModel.from_pretrained(source, dtype=torch.float32).eval()
    dense = [load_file(path / "model.safetensors")["linear.weight"] for path in sorted(source.glob("*_Dense"))]
    expected = []
    with torch.inference_mode():
        for ids in texts:
            vector = model(torch.tensor([ids])).last_hidden_state[0].mean(0)
            for weight in dense:
                vector = weight.float() @ vector
            expected.append(vector.numpy())
    del model
    for (kernels, dtype), bound in BOUNDS.items():
        how = settings(dtype=dtype, kernels=kernels, kv_mib=64, tokens=512)
        for ours, vector in zip(Texts(folder, how).compute(texts), expected, strict=True):
            assert cosine(ours, vector) >= bound, (kernels, np.linalg.norm(ours))
