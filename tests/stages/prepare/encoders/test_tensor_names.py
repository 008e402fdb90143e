"""Encoders' files with the names that tensors had in older versions of transformers, and without the base's prefix."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_folder import notes_of
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.driver import settings
from tests.stages.execute.encoders.test_encoders import MAX_ERROR, reference
from tests.stages.execute.encoders.tiny_encoders import VARIANTS, Texts, make, random_ids
from tests.stages.prepare import checkpoints


@pytest.mark.parametrize("has_prefix", [True, False])
@pytest.mark.parametrize("name", ["bert", "bert, sequence", "roberta", "mpnet, sequence"])
def test_gamma_and_beta_and_names_without_a_prefix(tmp_path: Path, name: str, has_prefix: bool) -> None:
    """google-bert's files are such."""
    variant = VARIANTS[name]
    model = make(variant)
    folder = checkpoints.save_folder(
        tmp_path / "source", model, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"}
    )
    path, base = folder / "model.safetensors", f"{model.base_model_prefix}."
    prefix = base if has_prefix else ""
    tensors = {f"{prefix}embeddings.position_ids": torch.arange(128)[None]}
    for stored, tensor in load_file(path).items():
        old = stored.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        bare = old.removeprefix(base)
        tensors[bare if bare.startswith("classifier") else f"{prefix}{bare}"] = tensor
    tensors["cls.predictions.transform.LayerNorm.gamma"] = torch.ones(64)
    assert sum(stored.endswith(("gamma", "beta")) for stored in tensors) > 10
    save_file(tensors, path, {"format": "pt"})
    prepared = prepare(Settings(model=str(folder), cache_dir=str(tmp_path / "cache")))
    assert {"positions are computed", "heads of other classes are not used"} <= {
        note.rpartition(": ")[2] for note in notes_of(prepared)
    }
    ids = random_ids(50, 6)
    (ours,) = Texts(prepared, settings(kernels="torch", kv_mib=2)).compute([ids])
    np.testing.assert_allclose(ours, reference(variant, model, ids), rtol=0, atol=MAX_ERROR)


def test_pickled_weights_are_refused_and_not_read(tmp_path: Path) -> None:
    model = make(VARIANTS["bert"])
    folder = checkpoints.save_folder(tmp_path / "source", model)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch pickled'\ntR.")
    with pytest.raises(
        ModelError, match=r"weights in pytorch_model\.bin, but only safetensors are supported: save the"
    ):
        prepare(Settings(model=str(folder), cache_dir=str(tmp_path / "cache")))
