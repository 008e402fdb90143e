"""Ranks compute models with recurrent layers bit by bit as one does: each has the states of some heads."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.layers.recurrent import slot_floats
from pipeline.stages.execute.ranks.share import share_of, value_heads_of
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import recurrent_models
from tests.stages.execute.native_driver import ISAS
from tests.stages.execute.ranks.test_ranks import compare
from tests.stages.execute.recurrent_models import VARIANTS, Variant, config_of, make
from tests.stages.prepare.checkpoints import save_folder
from tests.stages.prepare.gguf import test_gguf_recurrent

UNEVEN = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
}


def variant(name: str, **changes: Any) -> Variant:
    return replace(VARIANTS[name], changes=VARIANTS[name].changes | changes)


def prepared(folder: Path, model: Variant, quantization: Any = "none", *, is_gguf: bool = False) -> Path:
    if is_gguf:
        made = make(model)
        source = test_gguf_recurrent.save(folder / "tiny.gguf", model.package, made, config_of(model))
    else:
        source = save_folder(folder / "source", make(model))
    return prepare(Settings(model=str(source), cache_dir=str(folder / "cache"), quantization=quantization))


@pytest.mark.parametrize("quantization", ["none", "q8_0", "q4_1"])
@pytest.mark.parametrize("isa", ISAS[:1] + ISAS[-1:])
def test_heads_that_are_dealt_unevenly(tmp_path: Path, isa: str, quantization: str) -> None:
    folder = prepared(tmp_path, variant("qwen3_5", **UNEVEN), quantization)
    config = ModelConfig.load(folder)
    assert [len(share_of(config, rank, 2).delta_keys) for rank in range(2)] == [2, 1]
    assert slot_floats(config, num_ranks=2) == slot_floats(config) // 3 * 2
    compare(folder, isa, 2, kv_mib=2)


@pytest.mark.parametrize("model", ["qwen3_5_moe", "qwen3_next", "olmo_hybrid", "lfm2", "lfm2_moe", "lfm3"])
def test_other_models(tmp_path: Path, model: str) -> None:
    folder, _ = recurrent_models.write(tmp_path, VARIANTS[model])
    compare(folder, ISAS[0], 2, kv_mib=2)


def test_heads_in_tiled_order_and_stages(tmp_path: Path) -> None:
    folder = prepared(tmp_path, variant("qwen3_5", **UNEVEN), is_gguf=True)
    delta = ModelConfig.load(folder).delta
    assert delta is not None and delta.tiled
    assert value_heads_of(delta, range(2, 3)) == [2, 5]
    compare(folder, ISAS[0], 3, kv_mib=2)
    compare(folder, ISAS[0], 2, 2, kv_mib=2, layers=(1, 3))


def test_more_ranks_than_key_heads_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.load(prepared(tmp_path, VARIANTS["qwen3_5"]))
    with pytest.raises(UserError, match=r"execute\.tensor_parallel: 4 ranks, .* choose 1 or 2"):
        share_of(config, 0, 4)
