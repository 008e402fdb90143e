"""Downloads from the hub: resumed, compared with their digests, one at a time, and refused in one clear line."""

import errno
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # no __all__

from pipeline.cli import pull as pull_command
from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.progress import Report, SilentProgress
from pipeline.stages.prepare.pull import pull
from pipeline.stages.prepare.sources.hub import download, local, retries
from pipeline.stages.prepare.sources.hub.quantizations import choose, models_of
from pipeline.stages.prepare.sources.source import HubSource, ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints
from tests.stages.prepare.fake_hub import COMMIT, OTHER_COMMIT, SIGNATURE, FakeHub, Repo, use

CUT = 60_000
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def ggufs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Repositories have one model in several quantizations, some in parts."""
    folder = tmp_path_factory.mktemp("ggufs")
    model = checkpoints.tiny_llama()
    checkpoints.save_gguf(folder / "Tiny-F16.gguf", model)
    checkpoints.save_gguf(folder / "Tiny-Q8_0.gguf", model, tensors_per_file=8)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert len(files) == 4 and max(map(len, files.values())) > CUT
    q8 = {f"Q8_0/{name}": data for name, data in files.items() if "Q8_0" in name}
    more = {"a-imatrix.gguf": b"not to be fetched", "README.md": b"neither", "config.json": b"{}"}
    return {"Tiny-F16.gguf": files["Tiny-F16.gguf"], **q8, **more}


@pytest.fixture
def hub(ggufs: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with `org/tiny`, and a machine that uses it, with an empty cache."""
    hub = FakeHub()
    hub.repos["org/tiny"] = Repo({COMMIT: dict(ggufs)})
    use(hub, tmp_path, monkeypatch)
    monkeypatch.setattr(retries, "BACKOFF_S", 0.0)
    yield hub
    hub.close()


class ReportedLines(SilentProgress):
    """What a download reports."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.totals: set[int] = set()
        self.most = 0

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextmanager
    def measure(self, what: str) -> Iterator[Report]:
        def report(done: int, total: int) -> None:
            self.totals.add(total)
            self.most = max(self.most, done)

        yield report


def got(model: str, tmp_path: Path, progress: SilentProgress | None = None) -> str:
    return pull(Settings(model=model, cache_dir=str(tmp_path / "cache")), progress or ReportedLines())


def refused(model: str, tmp_path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        got(model, tmp_path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def blobs(tmp_path: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in tmp_path.glob("hub/models--org--tiny/blobs/*")}


def test_a_quantization_is_fetched_with_all_its_parts_and_served_without_a_request(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    reported = ReportedLines()
    assert f"org/tiny:Q8_0 at commit {COMMIT[:12]} is in " in got("hf.co/org/tiny:q8_0", tmp_path, reported)
    parts = {name for name in ggufs if name.startswith("Q8_0/")}
    assert len(parts) > 1 and hub.fetched() == parts
    assert reported.totals == {sum(len(ggufs[name]) for name in parts)}
    hub.requests.clear()
    settings = Settings(model="org/tiny:Q8_0", cache_dir=str(tmp_path / "cache"))
    assert ModelConfig.load(prepare(settings)).name == "Tiny"
    assert hub.requests == []


def test_without_a_quantization_the_nearest_is_taken_and_named(hub: FakeHub, tmp_path: Path) -> None:
    reported = ReportedLines()
    got("org/tiny", tmp_path, reported)
    assert reported.lines == ["org/tiny: using Q8_0, as the repository has no Q4_K_M of it"]
    assert {path.partition("/")[0] for path in hub.fetched()} == {"Q8_0"}


def test_a_file_or_its_page_can_be_named(hub: FakeHub, tmp_path: Path) -> None:
    got("https://huggingface.co/org/tiny/blob/main/Tiny-F16.gguf?download=true", tmp_path)
    assert hub.fetched() == {"Tiny-F16.gguf"}
    hub.requests.clear()
    assert local.find(HubSource("org/tiny", "main", file="Tiny-F16.gguf")) is not None and hub.requests == []


def test_what_the_hubs_own_client_has_fetched_is_found_and_the_reverse(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    theirs = huggingface_hub.snapshot_download("org/tiny", allow_patterns=["*F16*"], cache_dir=tmp_path / "hub")
    found = local.find(HubSource("org/tiny", "main", quantization="F16"))
    assert found is not None and found.ggufs == [Path(theirs) / "Tiny-F16.gguf"]
    got("org/tiny:Q8_0", tmp_path)
    hub.requests.clear()
    for name in (name for name in ggufs if name.startswith("Q8_0/")):
        path = huggingface_hub.hf_hub_download("org/tiny", name, cache_dir=tmp_path / "hub", local_files_only=True)
        assert Path(path).read_bytes() == ggufs[name]
    assert hub.requests == []


def test_a_broken_connection_is_resumed_where_it_broke(hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path) -> None:
    hub.cut_after, reported = CUT, ReportedLines()
    got("org/tiny/Tiny-F16.gguf", tmp_path, reported)
    assert hub.ranges == ["", f"bytes={CUT}-"]
    assert reported.most == len(ggufs["Tiny-F16.gguf"]) and "trying again" in reported.lines[0]


def test_a_connection_that_stalls_is_given_up_and_resumed(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    hub.stall_after = CUT
    got("org/tiny:F16", tmp_path)
    assert hub.ranges == ["", f"bytes={CUT}-"]


def test_a_download_that_was_killed_is_resumed(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was written stays, as Ctrl-C or kill -9 leaves it."""
    hub.cut_after = CUT
    with monkeypatch.context() as patch:
        patch.setattr(retries, "MAX_TRIES", 1)
        assert "the connection broke" in refused("org/tiny:F16", tmp_path)
    ((name, size),) = blobs(tmp_path).items()
    assert name.endswith(".incomplete") and size == CUT
    assert local.find(HubSource("org/tiny", "main", quantization="F16")) is None
    got("org/tiny:F16", tmp_path)
    assert hub.ranges == ["", f"bytes={CUT}-"]


def test_a_server_without_ranges_sends_all_again(hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path) -> None:
    hub.cut_after, hub.has_ranges = CUT, False
    got("org/tiny:F16", tmp_path)
    assert list(blobs(tmp_path).values()) == [len(ggufs["Tiny-F16.gguf"])]


def test_altered_bytes_are_refused_and_not_kept(hub: FakeHub, tmp_path: Path) -> None:
    hub.is_altered = True
    assert "Tiny-F16.gguf arrived with the digest" in refused("org/tiny:F16", tmp_path)
    assert blobs(tmp_path) == {}
    hub.is_altered = False
    got("org/tiny:F16", tmp_path)


def test_what_is_left_of_another_file_is_fetched_again(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_after = CUT
    got("org/tiny:F16", tmp_path)
    (blob,) = (tmp_path / "hub/models--org--tiny/blobs").iterdir()
    blob.write_bytes(bytes(CUT))
    blob.rename(blob.with_name(f"{blob.name}.incomplete"))
    reported = ReportedLines()
    got("org/tiny:F16", tmp_path, reported)
    assert "not of this file: once more" in reported.lines[-1] and hub.ranges[-2:] == [f"bytes={CUT}-", ""]


def test_a_mirror_without_digests_in_its_list_is_asked_for_each_file(hub: FakeHub, tmp_path: Path) -> None:
    hub.lists_blobs = False
    got("org/tiny:F16", tmp_path)
    assert ("HEAD", f"/org/tiny/resolve/{COMMIT}/Tiny-F16.gguf") in hub.requests
    hub.is_altered = True
    assert "arrived with the digest" in refused("org/tiny:Q8_0", tmp_path)


def test_passing_errors_are_waited_for(hub: FakeHub, tmp_path: Path) -> None:
    hub.replies = [(429, {"Retry-After": "0"}), (429, {"RateLimit": '"resolvers";r=0;t=0'}), (503, {})]
    reported = ReportedLines()
    got("org/tiny:F16", tmp_path, reported)
    assert [line.partition("; ")[0].partition(": ")[2] for line in reported.lines] == ["status 429"] * 2 + [
        "status 503"
    ]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            (429, {"Retry-After": "3600"}),
            "too many requests from here (429) to download org/tiny:F16: try again in 3600 s",
        ),
        ((500, {}), "returned an error for org/tiny:F16 (500) several times: try again later"),
        ((403, {"X-Error-Code": "GatedRepo"}), "org/tiny:F16 is gated: accept its terms at "),
        ((404, {"X-Error-Code": "EntryNotFound"}), "lists a file of org/tiny:F16 that it doesn't have"),
        ((418, {}), "returned an error for org/tiny:F16 ("),
    ],
)
def test_other_errors_are_one_line(hub: FakeHub, tmp_path: Path, reply: tuple[int, dict[str, str]], words: str) -> None:
    hub.replies = [reply] * retries.MAX_TRIES
    assert words in (line := refused("org/tiny:F16", tmp_path)) and SIGNATURE not in line
    assert len(hub.replies) == (0 if reply[0] == 500 else retries.MAX_TRIES - 1)


def test_what_does_not_exist_is_named_with_what_does(hub: FakeHub, tmp_path: Path) -> None:
    assert refused("org/tiny:Q5_K_M", tmp_path) == "org/tiny has no .gguf file of Q5_K_M; it has Q8_0, F16"
    assert refused("org/tiny:Q8", tmp_path) == "org/tiny has no .gguf file of Q8; did you mean Q8_0?; it has Q8_0, F16"
    assert "org/tiny has no model in a file tiny-f16.gguf; did you mean Tiny-F16.gguf?" in refused(
        "org/tiny/tiny-f16.gguf", tmp_path
    )
    assert "has no model org/none, or it is private, and there is no file org/none/x.gguf here" in refused(
        "org/none/x.gguf", tmp_path
    )
    hub.repos["org/folder"] = Repo({COMMIT: {"config.json": b"{}", "model.safetensors": b""}})
    assert refused("org/folder:Q4_0", tmp_path) == "org/folder has no .gguf file of Q4_0; it has no .gguf files"
    hub.repos["org/pickle"] = Repo({COMMIT: {"config.json": b"{}", "pytorch_model.bin": b"", "x.pt": b""}})
    assert "It has pytorch_model.bin: save the model again" in refused("org/pickle", tmp_path)
    assert not any("resolve" in path for _, path in hub.requests)


def test_an_architecture_that_the_hub_names_is_refused_before_a_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/tiny"].architecture = "wonderformer"
    assert "general.architecture is 'wonderformer', which is not supported" in refused("org/tiny", tmp_path)
    assert hub.fetched() == set()


@pytest.mark.parametrize("name", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "x\0.gguf"])
def test_a_list_with_names_that_leave_the_folder_is_refused(hub: FakeHub, tmp_path: Path, name: str) -> None:
    hub.repos["org/evil"] = Repo({COMMIT: {name: b"x", "Tiny-F16.gguf": b"y"}})
    assert "is not the name of a file inside the model folder" in refused("org/evil", tmp_path)
    assert hub.fetched() == set()


def test_a_link_below_a_commits_folder_leads_no_file_out_of_it(hub: FakeHub, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--tiny/snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (outside := tmp_path / "outside").mkdir()
    (snapshot / "Q8_0").symlink_to(outside)
    assert "leads out of the cache" in refused("org/tiny:Q8_0", tmp_path)
    assert list(outside.iterdir()) == []


def test_an_etag_that_is_no_name_is_refused(tmp_path: Path) -> None:
    file = download.RemoteFile("org/tiny", COMMIT, "x.gguf", "http://127.0.0.1:9/", "../../x", 1)
    with pytest.raises(ModelError, match="which is none"):
        download.download([file], tmp_path, "x", SilentProgress(), 1.0)


def test_a_file_is_downloaded_once_for_two_at_a_time(hub: FakeHub, tmp_path: Path) -> None:
    lines: list[str] = []
    threads = [threading.Thread(target=lambda: lines.append(got("org/tiny:F16", tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(lines) == 2 and hub.ranges == [""]


def test_a_file_that_another_process_holds_is_waited_for_so_long(hub: FakeHub, tmp_path: Path) -> None:
    file = hub.repos["org/tiny"].commits[COMMIT]["Tiny-F16.gguf"]
    storage = tmp_path / "hub/models--org--tiny"
    remote = download.RemoteFile("org/tiny", COMMIT, "Tiny-F16.gguf", "", "0" * 64, len(file))
    lock = storage.parent / ".locks" / storage.name / f"{remote.etag}.lock"
    lock.parent.mkdir(parents=True)
    reported = ReportedLines()
    with WeakFileLock(lock), pytest.raises(ModelError, match="end that process, or raise"):
        download.download([remote], storage, "x", reported, 0.0)
    assert reported.lines == ["waiting for another process that downloads Tiny-F16.gguf"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES])
def test_a_disk_that_takes_no_more_is_reported(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, "no")

    with monkeypatch.context() as patch:
        patch.setattr(download, "_write", fail)
        line = refused("org/tiny:F16", tmp_path)
    assert f"{tmp_path / 'hub'} " in line and "set HF_HOME" in line
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1})())
    assert "but only 0 MiB are free" in refused("org/tiny:F16", tmp_path)


def test_a_pull_brings_what_is_new_and_a_start_uses_what_is_there(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    got("org/tiny:F16", tmp_path)
    repo = hub.repos["org/tiny"]
    repo.commits[OTHER_COMMIT] = {**ggufs, "Tiny-F16.gguf": ggufs["Tiny-F16.gguf"][:-4] + b"abcd"}
    repo.refs["main"] = OTHER_COMMIT
    found = local.find(HubSource("org/tiny", "main", quantization="F16"))
    assert found is not None and found.commit == COMMIT
    hub.cut_after = CUT
    got("org/tiny:F16", tmp_path)
    found = local.find(HubSource("org/tiny", "main", quantization="F16"))
    assert found is not None and found.commit == OTHER_COMMIT and found.ggufs[0].read_bytes().endswith(b"abcd")
    assert local.find(HubSource("org/tiny", COMMIT, quantization="F16")) is not None


def test_offline_nothing_is_asked(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    got("org/tiny:F16", tmp_path)
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "org/tiny:F16 is in " in got("org/tiny:F16", tmp_path)
    line = refused("org/tiny:Q8_0", tmp_path)
    assert "HF_HUB_OFFLINE or --offline is set, and org/tiny:Q8_0 is not in" in line and "only in part" in line
    assert hub.requests == []


def test_large_files_of_the_hub_are_left_to_its_own_client(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_HTTP_BYTES", 10)
    got("org/tiny:F16", tmp_path)
    assert list(blobs(tmp_path).values()) == [len(ggufs["Tiny-F16.gguf"])]


def test_the_command_ends_in_one_line(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(model="org/tiny:F16", cache_dir=str(tmp_path / "cache"))
    assert pull_command.run(settings) == 0
    out, err = capsys.readouterr()
    assert out.startswith("org/tiny:F16 at commit ") and "downloading org/tiny:F16 at" in err
    assert pull_command.run(Settings(model=str(tmp_path))) == 0
    assert "nothing to download" in capsys.readouterr().out
    hub.status = 500
    assert pull_command.run(settings) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("pipeline pull: error: http://127.0.0.1:")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[pull_command.PULL], "pull", interrupt)
    assert pull_command.run(settings) == 130
    assert "the next pull goes on" in capsys.readouterr().err


def test_the_file_of_a_quantization_is_found_by_its_name() -> None:
    names = ["Q/a-Q4_K_M-00001-of-00002.gguf", "Q/a-Q4_K_M-00002-of-00002.gguf", "a.q8_0.gguf", "a-UD-Q4_K_XL.gguf"]
    names += ["a-fp16.gguf", "BF16.gguf", "mmproj-F16.gguf", "a-imatrix.gguf", "a-MXFP4.gguf"]
    names += ["a.gguf", "b-IQ4_XS.gguf"]
    models = models_of(names)
    assert list(models.values()) == ["BF16", "Q4_K_M", "MXFP4", "UD-Q4_K_XL", "F16", "", "Q8_0", "IQ4_XS"]
    assert choose(HubSource("a/b", "main"), models) == "Q/a-Q4_K_M-00001-of-00002.gguf"
    assert choose(HubSource("a/b", "main", quantization="FP16"), models) == "a-fp16.gguf"
    near = {"a": "Q2_K", "b": "Q8_0", "c": "BF16", "d": "Q5_K_M", "e": "IQ3_XXS"}
    assert choose(HubSource("a/b", "main"), near) == "d"
    with pytest.raises(ModelError, match="a/b has 2 models of Q4_K_M: name the file, as a/b/x or a/b/y"):
        choose(HubSource("a/b", "main"), {"x": "Q4_K_M", "y": "Q4_K_M"})


def test_a_repository_with_weights_of_both_kinds_is_a_folder_unless_a_quantization_is_named(
    hub: FakeHub, ggufs: dict[str, bytes], tmp_path: Path
) -> None:
    model = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    hub.repos["org/tiny"] = Repo({COMMIT: {**ggufs, **{path.name: path.read_bytes() for path in model.iterdir()}}})
    got("org/tiny", tmp_path)
    assert "model.safetensors" in hub.fetched() and not any(name.endswith(".gguf") for name in hub.fetched())
    got("org/tiny:F16", tmp_path)
    assert "Tiny-F16.gguf" in hub.fetched()


def test_the_token_is_not_sent_where_the_hub_redirects_to(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repos["org/tiny"].gated = True
    monkeypatch.setenv("HF_TOKEN", hub.token)
    got("org/tiny:F16", tmp_path)
    assert hub.with_token and not any(path.startswith("/blobs/") for path in hub.with_token)
