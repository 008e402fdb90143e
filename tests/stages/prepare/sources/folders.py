"""A Hugging Face folder, prepared."""

from pathlib import Path

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def prepared(folder: Path) -> Path:
    return prepare(Settings(model=str(folder), cache_dir=str(folder.parent / "cache")))


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.load(prepared(folder))
