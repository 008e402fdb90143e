"""`tools/gpu_check` compares features: with a CPU executor in place of the GPU's, right and wrong."""

from pathlib import Path

import pytest

from pipeline.config.settings import SpeculativeSettings
from tests.tools import gpu_check_fakes as fakes
from tools.gpu_check.child import Context, Task
from tools.gpu_check.readings import Reading
from tools.gpu_check.servers import features

NAMES = [item.name for item in features.items(Context(Task("any", "", 0.0, interpreted=True)))]


def readings_of(name: str, tmp_path: Path) -> list[Reading]:
    context = Context(Task("any", str(tmp_path / "lines"), 60.0, interpreted=True))
    (item,) = (item for item in features.items(context) if item.name == name)
    return list(item.run(context))


@pytest.mark.parametrize("name", NAMES)
def test_equal_executors_pass(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "make_runner", fakes.make_runner)
    readings = readings_of(name, tmp_path)
    assert readings and all(reading.result == "pass" for reading in readings)
    if name != "embeddings":
        assert all(reading.numbers["same"] == reading.numbers["ids"] > 9 for reading in readings if reading.numbers)


@pytest.mark.parametrize("name", ["mixture of experts", "LoRA adapters", "EAGLE head"])
def test_an_executor_that_samples_other_ids_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object) -> fakes.Steps:
        runner = fakes.make_runner(*args)  # type: ignore[arg-type]
        runner.changes_ids = True
        return runner

    monkeypatch.setattr(features, "make_runner", wrong)
    assert "FAIL" in {reading.result for reading in readings_of(name, tmp_path)}


def test_embeddings_that_differ_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "make_runner", fakes.make_runner)
    embed = features._embed
    monkeypatch.setattr(
        features,
        "_embed",
        lambda driver, pooling: embed(driver, pooling) + 0.01 * isinstance(driver.runner, fakes.Steps),
    )
    assert [reading.result for reading in readings_of("embeddings", tmp_path)] == ["FAIL", "FAIL"]


def test_proposals_that_are_never_accepted_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "make_runner", fakes.make_runner)
    monkeypatch.setattr(features, "NUM_DRAFTS", 0)
    monkeypatch.setattr(features, "SpeculativeSettings", lambda **fields: SpeculativeSettings())
    *texts, accepted = readings_of("its own draft model", tmp_path)
    assert {reading.result for reading in texts} == {"pass"} and accepted.result == "FAIL"
