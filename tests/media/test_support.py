"""Whether a server takes images: what the folder has, what is installed, what the settings say."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.media import support
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.runtime.model.weight_headers import weight_facts
from pipeline.supervisor.models.memory import needs_of
from tests.stages.execute.vision.tiny_towers import VARIANTS, make, prepared, save

MIB = 1024**2


def settings(**changes: Any) -> Settings:
    return Settings(execute=ExecuteSettings(**changes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, variant = tmp_path_factory.mktemp("model"), VARIANTS["idefics3"]
    return prepared(path, save(path, variant, make(variant)))


def test_a_model_with_a_tower_takes_images_unless_the_settings_say_no(folder: Path) -> None:
    assert support.encodes(settings(), folder)
    assert not support.encodes(settings(encoder_cache_bytes=0), folder)
    assert not support.encodes(settings(device="cuda"), folder)


def test_without_pillow_no_tower_is_loaded_and_the_reason_names_the_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "has_pillow", lambda: False)
    assert not support.encodes(settings(), folder)
    assert "without the extra 'media' (Pillow)" in support.why_not(folder)


def test_the_memory_of_a_model_has_its_tower_and_its_encoder_cache(folder: Path) -> None:
    vision = VisionConfig.load(folder)
    assert vision is not None
    with_images = needs_of(settings(encoder_cache_bytes=100 * MIB), folder)
    without = needs_of(settings(encoder_cache_bytes=0), folder)
    tower = weight_facts(set(vision.encoder.weight_paths(folder))).num_bytes
    assert 100 * MIB <= with_images.awake - without.awake <= 100 * MIB + tower
