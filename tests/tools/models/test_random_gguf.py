"""The random .gguf files that speeds are compared with have the shapes that they are named after."""

from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare
from tools.models.random_recurrent_gguf import LFM2, write_lfm2


def test_a_file_of_the_shape_of_an_lfm2_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "lfm2.gguf"
    write_lfm2(path, 3, LFM2["lfm2-350m"])
    config = ModelConfig.load(prepare(Settings(model=str(path), cache_dir=str(tmp_path / "cache"))))
    assert config.architecture == "lfm2"
    assert (config.hidden_size, config.intermediate_size, config.num_layers) == (1024, 4608, 3)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 64)
    assert config.short_conv is not None and (config.short_conv.layers, config.short_conv.taps) == ([0, 1], 3)
