"""`pipeline cache`, `pipeline models` and `pipeline config presets`."""

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.cli import models
from pipeline.cli.cache import entries
from pipeline.cli.option_types import age
from pipeline.config.load import presets
from pipeline.metrics.stats import ServerStats
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import hold, is_held
from pipeline.stages.execute.models import features
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES
from pipeline.stages.prepare.cache import Cache
from tests.metrics.test_exposition import server

OLD_S = 40 * 86400
WHEEL, FROM_WHEEL, TINY = "wheel-llm-tiny-1.0-abc", "model-Tiny-Q8_0-1", "model-tiny-2"
NEW = ("program-avx2-1", "model-tiny-2")


def fill(cache: Cache, key: str, source: str, config: ModelConfig | None = None) -> Path:
    def write(folder: Path) -> None:
        (folder / "data").write_bytes(bytes(3 * 1024**2))
        if config is not None:
            config.save(folder)

    return cache.ensure(key, source, write, lambda _: None, 1.0)


@pytest.fixture
def root(tmp_path: Path, smollm2_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a wheel, a model made from it, a newer one, a killed fill, compiled libraries, and a folder that is
    not of a server."""
    for module in (entries, models):
        monkeypatch.setattr(module, "find_servers", list)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    cache = Cache(tmp_path / "cache")
    config = ModelConfig.load(smollm2_dir)
    wheel = fill(cache, WHEEL, "wheel:llm-tiny==1.0")
    fill(cache, FROM_WHEEL, f"{wheel}/Tiny.Q8_0.gguf", config)
    fill(cache, TINY, "/models/tiny", config)
    (cache.root / ".partial-model-broken-3").mkdir()
    (cache.root / "notes").mkdir()
    (cache.root / "kernels").mkdir()
    for name in ("program-avx2-1", "program-amx-2"):
        (cache.root / "kernels" / f"{name}.so").write_bytes(bytes(4096))
    (cache.root / "kernels" / "program-amx-2.log").write_text("warnings")
    old_s = time.time() - OLD_S
    for path in [*cache.root.iterdir(), *(cache.root / "kernels").iterdir()]:
        if path.stem not in NEW:
            os.utime(path, (old_s, old_s))
    return cache.root


@pytest.fixture
def held(root: Path) -> Iterator[Path]:
    """The cache while a server has the model of the wheel, and a library is loaded."""
    library = root / "kernels" / "program-amx-2.so"
    with library.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    mark = hold(root / FROM_WHEEL)
    assert mark is not None
    yield root
    mark.close()
    mapped.close()


def run(root: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main([*words, "--set", f"cache_dir={root}"])
    out, err = capsys.readouterr()
    return code, out, err


def kept(root: Path) -> set[str]:
    """What is left, without locks and the folder of libraries."""
    return (
        {path.stem for path in root.rglob("*") if path.parent in (root, root / "kernels")}
        - {path.stem for path in root.glob(".lock-*")}
        - {"kernels"}
    )


def test_the_list_has_kinds_sizes_and_times_of_use(
    held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run(held, capsys, "cache", "ls")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["kind", "name", "size", "last", "used", "in", "use"]
    assert ["model", "Tiny-Q8_0-1", "3", "MiB", "40", "d", "ago", "yes"] in rows
    assert ["model", "tiny-2", "3", "MiB", "just", "now", "no"] in rows
    assert ["wheel", "llm-tiny-1.0-abc", "3", "MiB", "40", "d", "ago", "yes"] in rows
    assert ["kernels", "2", "compiled", "libraries", "8", "KiB", "just", "now", "yes"] in rows
    assert ["unfinished", ".partial-model-broken-3", "0", "KiB", "40", "d", "ago", "no"] in rows
    assert out.splitlines()[-1] == f"9 MiB in {held}"


def test_no_line_wraps_in_80_columns(
    held: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"model-{'Some-Long-Name-' * 4}Q8_0-{'0123456789abcdef'}"
    (held / TINY).rename(held / name)
    num_rows = len(run(held, capsys, "cache", "ls")[1].splitlines())
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(held, capsys, "cache", "ls")
    rows = out.splitlines()[:-1]
    assert len(rows) == num_rows - 1 and max(map(len, rows)) <= 80
    (row,) = [row for row in rows if "Some-Long" in row]
    assert row.split()[1].startswith("Some-Long-Name-") and row.split()[1].endswith("0123456789abcdef")
    assert "…" in row
    shown = row.split()[1]
    assert run(held, capsys, "cache", "rm", "…", "Some-…", "model-…0")[0] == 1, "not the begin and end of one name"
    assert run(held, capsys, "cache", "rm", shown)[0] == 0 and not (held / name).exists()


def test_the_json_has_every_library(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(held, capsys, "cache", "ls", "--json")
    found = {one["name"]: one for one in json.loads(out)}
    assert {name for name, one in found.items() if one["in_use"]} == {WHEEL, FROM_WHEEL, "program-amx-2"}
    assert found[TINY]["path"] == str(held / TINY) and found[TINY]["source"] == "/models/tiny"
    assert found["program-amx-2"]["num_bytes"] == 4096 + len("warnings")


def test_what_is_old_and_not_in_use_is_removed(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(held, capsys, "cache", "prune", "--older-than", "30d")
    assert (code, err) == (0, "")
    assert kept(held) == {WHEEL.removesuffix(".0-abc"), FROM_WHEEL, TINY, "notes", "program-amx-2", "program-avx2-1"}
    assert "removed .partial-model-broken-3 (0 KiB)\n" in out
    assert f"kept {FROM_WHEEL}: in use\n" in out and f"kept {WHEEL}: in use\n" in out
    assert "kept notes: not made by a server\n" in out and "kept 1 compiled library: in use\n" in out


def test_names_of_other_folders_are_shown_as_they_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "x[b]\x1b[2J").mkdir()
    for command in (["ls"], ["prune", "--all", "--dry-run"]):
        code, out, _ = run(root, capsys, "cache", *command)
        assert code == 0 and "x[b]\\x1b[2J" in out


def test_without_a_server_everything_can_be_removed(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = kept(root)
    code, out, _ = run(root, capsys, "cache", "prune", "--all", "--dry-run")
    assert code == 0 and kept(root) == before
    assert "would remove 2 compiled libraries (8 KiB)\n" in out
    assert out.splitlines()[-1] == f"would remove 9 MiB from {root}"
    code, out, _ = run(root, capsys, "cache", "prune", "--all")
    assert code == 0 and kept(root) == {"notes"}
    assert out.splitlines()[-1] == f"removed 9 MiB from {root}"


def test_crash_reports_are_one_row_and_are_removed_by_age(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age_s in (("20260101T000000.000000Z-1-execute.0-1", OLD_S), ("20260131T000000.000000Z-1-ingest.0-2", 0)):
        report = root / "crashes" / name
        report.mkdir(parents=True)
        (report / "report.json").write_bytes(bytes(2048))
        os.utime(report, (time.time() - age_s,) * 2)
    _, out, _ = run(root, capsys, "cache", "ls")
    assert ["crashes", "2", "crash", "reports", "4", "KiB", "just", "now", "no"] in [
        line.split() for line in out.splitlines()
    ]
    code, out, _ = run(root, capsys, "cache", "prune", "--older-than", "30d")
    assert code == 0 and "removed 1 crash report (2 KiB)\n" in out
    assert [path.name for path in (root / "crashes").iterdir()] == ["20260131T000000.000000Z-1-ingest.0-2"]


def test_what_a_starting_server_may_be_about_to_load_is_kept(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = msgspec.structs.replace(server(), state="starting", uptime_s=60.0)
    monkeypatch.setattr(entries, "find_servers", lambda: ["1-ab"])
    monkeypatch.setattr(entries, "look", lambda names: ([starting], []))
    _, out, _ = run(root, capsys, "cache", "prune", "--all", "--dry-run")
    assert f"kept {TINY}: in use\n" in out and f"would remove {FROM_WHEEL}" in out


def test_a_fill_that_another_process_does_is_kept(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", program, str(root / ".lock-model-broken-3")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        _, out, _ = run(root, capsys, "cache", "prune", "--all")
        other.stdin.close()
    assert "kept .partial-model-broken-3: in use\n" in out
    assert (root / ".partial-model-broken-3").is_dir()


def test_a_model_is_removed_by_name_with_the_wheel_it_came_from(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = kept(root)
    name = ModelConfig.load(root / TINY).name
    code, out, _ = run(root, capsys, "cache", "rm", name, "--dry-run")
    assert code == 0 and kept(root) == before
    assert [line.split()[2] for line in out.splitlines()[:-1]] == [FROM_WHEEL, TINY, WHEEL]
    code, out, err = run(root, capsys, "cache", "rm", "wheel:llm-tiny==1.0")
    assert (code, err) == (0, "") and kept(root) == before - {
        FROM_WHEEL.partition(".")[0],
        WHEEL.removesuffix(".0-abc"),
    }
    assert out.splitlines()[-1] == f"removed 6 MiB from {root}"
    assert run(root, capsys, "cache", "rm", "tiny-2", "/models/tiny")[0] == 0
    assert not (root / TINY).exists() and (root / "notes").is_dir()


def test_what_a_server_has_is_not_removed_by_name(held: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(held, capsys, "cache", "rm", FROM_WHEEL)
    assert (code, out.splitlines()[0]) == (1, f"kept {FROM_WHEEL}: in use")
    assert (held / FROM_WHEEL).is_dir() and (held / WHEEL).is_dir()


@pytest.mark.parametrize("name", ["tinny-2", "notes", "kernels"])
def test_a_name_that_nothing_has_removes_nothing(root: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    before = kept(root)
    code, out, err = run(root, capsys, "cache", "rm", TINY, name)
    near = "; did you mean tiny-2?" if name == "tinny-2" else ""
    words = f"nothing in the cache has the name {name}{near}; `pipeline cache ls` lists what it holds"
    assert (code, out, err) == (1, "", f"pipeline cache rm: error: {words}\n")
    assert kept(root) == before


def test_pruning_needs_a_choice(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(root, capsys, "cache", "prune")
    assert (code, err) == (2, "pipeline: error: cache prune: needs --older-than TIME, such as 30d, or --all\n")
    with pytest.raises(SystemExit):
        run(root, capsys, "cache", "prune", "--older-than", "a year")
    assert "needs a time such as 12h, 30d or 2w, got 'a year'" in capsys.readouterr().err
    assert (age("12h"), age("2w")) == (43200.0, 1209600.0)


def test_an_empty_cache_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none", capsys, "cache", "ls") == (0, f"{tmp_path / 'none'} is empty\n", "")
    assert run(tmp_path / "none", capsys, "cache", "prune", "--all")[0] == 0


def test_using_an_entry_sets_its_time_of_use(root: Path) -> None:
    assert time.time() - (root / FROM_WHEEL).stat().st_mtime > OLD_S - 60
    assert Cache(root).lookup(FROM_WHEEL) == root / FROM_WHEEL
    assert time.time() - (root / FROM_WHEEL).stat().st_mtime < 60


def test_a_mark_ends_with_its_holder(root: Path) -> None:
    marks = hold(root / TINY), hold(root / TINY)
    assert is_held(root / TINY)
    for mark in marks:
        assert mark is not None and is_held(root / TINY)
        mark.close()
    assert not is_held(root / TINY)
    assert hold(root / "missing") is None and not is_held(root / "missing")


def test_models_lists_what_is_served_cached_and_supported(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stats: ServerStats = msgspec.structs.replace(server(), model="served-model")
    monkeypatch.setattr(models, "find_servers", lambda: ["1-ab"])
    monkeypatch.setattr(models, "look", lambda names: ([stats], []))
    code, out, err = run(root, capsys, "models", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [(one["model"], one["address"]) for one in found["served"]] == [("served-model", "http://x")]
    assert [(one["model"], one["in_use"]) for one in found["cached"]] == [
        ("/models/tiny", False),
        ("wheel:llm-tiny==1.0", False),
    ], "the last used first; the model of a wheel is served by the wheel's name"
    assert {one["architecture"] for one in found["supported"]} == set(HF_ARCHITECTURES)
    _, out, _ = run(root, capsys, "models")
    for words in ("served-model", "wheel:llm-tiny==1.0", "Llama, SmolLM, Falcon3"):
        assert words in out


def test_supported_models_are_listed_with_their_backends(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "TRITON", features.TRITON - {features.Feature.ATTENTION_SOFTCAP})
    code, out, err = run(root, capsys, "models", "--supported")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= 80
    rows = {line.split()[0]: line for line in lines}
    assert rows.keys() == {"architecture", *HF_ARCHITECTURES}
    assert "native, torch, triton" in rows["qwen3"]
    assert "native, torch " in rows["gemma2"] and "triton" not in rows["gemma2"], "it lacks a feature"
    _, out, _ = run(root, capsys, "models", "--supported", "--json")
    found = {one["architecture"]: one for one in json.loads(out)}
    assert found["phi3"]["backends"] == ["native", "torch", "triton"]
    assert (found["gemma3_text"]["gguf"], found["opt"]["gguf"]) == ("gemma3", "")


def test_the_formats_of_a_model_s_weights_are_known(smollm2_dir: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(smollm2_dir)
    assert models.weights_of(config, str(smollm2_dir)) == "q4_1+q8_0"
    assert models.weights_of(config, str(tmp_path)) == ""


def test_presets_are_listed_with_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "presets"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in presets())
    assert "For one NVIDIA GPU and many clients" in out
    assert main(["config", "presets", "--json"]) == 0
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["exact"]["settings"]["execute"]["dtype"] == "float32"


def test_libraries_of_a_user_beside_those_of_others_are_listed(tmp_path: Path) -> None:
    """As in a cache that several users share: kernels/cpu/build.py makes a folder for each."""
    for folder in ("kernels", "kernels-1000"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"of {folder}.so").write_bytes(bytes(10))
    found = {one.name: one for one in entries.entries_of(tmp_path)}
    assert {one.kind for one in found.values()} == {"kernels"}
    assert set(found) == {"of kernels", "of kernels-1000"}
    entries.remove(tmp_path, found["of kernels-1000"])
    assert not list((tmp_path / "kernels-1000").iterdir())


def test_models_of_the_hubs_cache_are_listed_and_removed_by_name_only(
    root: Path, smollm2_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repos = {"tiny": "models--org--tiny", "smollm2": "models--bartowski--SmolLM2-1.7B-Instruct-GGUF"}
    for name in repos.values():
        blob = root.parent / "hub" / name / "blobs" / "0123.incomplete"
        blob.parent.mkdir(parents=True)
        blob.write_bytes(bytes(2 * 1024**2))
    (root.parent / "hub" / "datasets--org--tiny").mkdir()
    fill(Cache(root), "model-tiny-3", "org/tiny:Q8_0@v1", ModelConfig.load(smollm2_dir))
    models_json = json.loads(run(root, capsys, "models", "--json")[1])
    shown = [one["model"] for one in models_json["cached"]]
    assert shown.count("bartowski/SmolLM2-1.7B-Instruct-GGUF") == 1 and "org/tiny" not in shown, "that is prepared"
    rows = [line.split()[:3] for line in run(root, capsys, "cache", "ls")[1].splitlines()]
    assert ["hub", "org/tiny", "2"] in rows and len([row for row in rows if row[0] == "hub"]) == 2
    assert run(root, capsys, "cache", "prune", "--all")[0] == 0
    assert all((root.parent / "hub" / name).exists() for name in repos.values())
    fill(Cache(root), "model-tiny-3", "org/tiny:Q8_0@v1", ModelConfig.load(smollm2_dir))
    mark = hold(root / "model-tiny-3")
    assert mark is not None
    code, out, _ = run(root, capsys, "cache", "rm", "org/tiny", "smollm2")
    assert (code, "kept org/tiny: in use\n" in out, "and the hub's cache\n" in out) == (1, True, True)
    mark.close()
    assert run(root, capsys, "cache", "rm", "org/tiny")[0] == 0
    assert [path.name for path in (root.parent / "hub").iterdir()] == ["datasets--org--tiny"]
