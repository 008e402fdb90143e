"""A repository's vision tower comes with each quantization of its model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.prepare.sources.hub.quantizations import projector_of
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute.vision.tiny_towers import VARIANTS, make
from tests.stages.prepare.fake_hub import COMMIT, FakeHub, Repo, use
from tests.stages.prepare.gguf.projector_files import save_language_model, save_projector


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    (folder := tmp_path / "files").mkdir()
    model = make(VARIANTS["idefics3"])
    save_language_model(folder / "Tiny-F16.gguf", model)
    save_projector(folder / "mmproj-F16.gguf", model)
    save_projector(folder / "mmproj-F32.gguf", model)
    hub = FakeHub()
    hub.repos["org/tiny"] = Repo({COMMIT: {path.name: path.read_bytes() for path in folder.iterdir()}})
    use(hub, tmp_path, monkeypatch)
    yield hub
    hub.close()


def test_a_projector_is_downloaded_with_its_model(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("org/tiny:F16", "org/tiny"):
        folder = prepare(Settings(model=name, cache_dir=str(tmp_path / "cache")))
        assert VisionConfig.load(folder) is not None
        assert sorted(hub.fetched()) == ["Tiny-F16.gguf", "mmproj-F16.gguf"], "once, and none of another kind"


def test_the_projector_of_a_repository_is_found_by_its_name() -> None:
    names = ["Q4_K_M/a-Q4_K_M-00001-of-00002.gguf", "a-Q8_0.gguf", "mmproj-BF16.gguf", "mmproj-F32.gguf", "mmproj.json"]
    assert projector_of(names[0], names) == projector_of(names[1], names) == "mmproj-BF16.gguf"
    assert projector_of("a-Q8_0.gguf", [*names, "b-Q8_0.gguf"]) is None
    assert projector_of("b-Q8_0.gguf", [*names, "b-Q8_0.gguf", "x/mmproj-b-f16.gguf"]) == "x/mmproj-b-f16.gguf"
    assert projector_of("a-Q8_0.gguf", ["a-Q8_0.gguf"]) is None
