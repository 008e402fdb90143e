"""Downloads files of a repository into the hub's cache, and goes on where an earlier download ended.

    absent ──lock──► blobs/ETAG.incomplete ──size, digest──► blobs/ETAG ──► snapshots/COMMIT/FILE, a link to it

huggingface_hub downloads a file from its beginning again when a process ended, and compares no digests. Addresses,
tokens, proxies and the layout of the cache are its own, and so is the lock: it waits for us, and we wait for it.
"""

import errno
import fcntl
import hashlib
import os
import queue
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
from huggingface_hub import constants, get_session, hf_hub_download
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]  # no __all__

from pipeline.own_files import open_lock, open_own
from pipeline.stages.prepare.progress import Progress
from pipeline.stages.prepare.sources.hub.retries import TRANSPORT, Retries
from pipeline.stages.prepare.sources.source import ModelError

MAX_THREADS = 4
"""Files that are downloaded at once."""
MAX_HTTP_BYTES = constants.MAX_HTTP_DOWNLOAD_SIZE
"""Larger files are not available over plain HTTP: huggingface_hub downloads these."""
CHUNK_BYTES = 1024**2
REPORT_S = 0.1
END_S = 2.0
"""The longest wait for a thread that ends, as all do after their next bytes."""
LOCK_POLL_S = 0.1
RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""ETags that can be names of files."""
SHA256, GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository's commit."""

    repo: str
    commit: str
    name: str
    url: str
    etag: str
    """The sha256 of a large file, git's id of a small one; mirrors may have others, which are not compared."""
    num_bytes: int

    @property
    def has_digest(self) -> bool:
        return bool(SHA256.fullmatch(self.etag) or GIT.fullmatch(self.etag))


class _Interrupted(Exception):
    """Another file failed, or the process ends."""


def download(files: Sequence[RemoteFile], storage: Path, what: str, progress: Progress, timeout_s: float) -> None:
    """Download the files that the repository's folder `storage` lacks, and link them in their commit's folder.

    Raises ModelError if one is not what the hub announced, if another process holds one for `timeout_s`, OSError, and
    huggingface_hub's errors. What was received stays, also if the process is killed.
    """
    if bad := [file for file in files if not SAFE.fullmatch(file.etag)]:
        raise ModelError(f"{bad[0].repo}: the hub's ETag of {bad[0].name} is {bad[0].etag[:200]!r}, which is none")
    missing = {file.etag: file for file in files if not _blob(storage, file).exists()}
    if missing:
        for folder in (storage / "blobs", storage.parent / ".locks" / storage.name):
            folder.mkdir(parents=True, exist_ok=True)
        with progress.measure(what) as report:
            _Downloads(list(missing.values()), storage, progress, report, timeout_s).run()
    for file in files:
        _link(storage, file)


def remember(storage: Path, revision: str, commit: str) -> None:
    """Note the commit of a branch or tag, when all its files are there. Raises OSError."""
    if revision == commit:
        return
    path = storage / "refs" / revision
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # of a process that was killed, or of another user
    with temporary.open("x", encoding="utf-8") as file:
        file.write(commit)
    temporary.replace(path)


def left_bytes(files: Sequence[RemoteFile], storage: Path) -> int:
    """How many bytes are left to receive."""
    missing = {file.etag: file for file in files if not _blob(storage, file).exists()}
    return sum(max(0, file.num_bytes - _size(_incomplete(storage, file))) for file in missing.values())


def is_linked(storage: Path, commit: str, name: str) -> bool:
    """Whether a file of a commit is in the cache."""
    return (storage / "snapshots" / commit / name).is_file()


class _Downloads:
    """Downloads of several files at a time. Its threads end with the process: what they wrote stays."""

    def __init__(
        self, files: list[RemoteFile], storage: Path, progress: Progress, report: Any, timeout_s: float
    ) -> None:
        self._files, self._storage, self._progress, self._report = files, storage, progress, report
        self._timeout_s = timeout_s
        self._done = {file.etag: min(_size(_incomplete(storage, file)), file.num_bytes) for file in files}
        """Bytes of each file that are there."""
        self._waiting: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._stop = threading.Event()

    def run(self) -> None:
        total = sum(file.num_bytes for file in self._files)
        for file in sorted(self._files, key=lambda file: -file.num_bytes):
            self._waiting.put(file)
        num_left = len(self._files)
        numbers = range(min(MAX_THREADS, num_left))
        threads = [threading.Thread(target=self._work, name=f"download-{i}", daemon=True) for i in numbers]
        for thread in threads:
            thread.start()
        try:
            while num_left:
                with suppress(queue.Empty):
                    if (error := self._ended.get(timeout=REPORT_S)) is not None:
                        raise error
                    num_left -= 1
                self._report(min(sum(self._done.values()), total), total)
        except Exception:
            self._stop.set()
            end = time.monotonic() + END_S
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
            raise
        finally:
            self._stop.set()  # after Ctrl-C the threads end with the process

    def _work(self) -> None:
        with suppress(queue.Empty):
            while not self._stop.is_set():
                file = self._waiting.get_nowait()
                try:
                    self._download(file)
                except _Interrupted:
                    return
                except BaseException as error:  # noqa: BLE001  # the main thread raises it
                    self._ended.put(error)
                    return
                self._ended.put(None)

    def _download(self, file: RemoteFile) -> None:
        if file.num_bytes > MAX_HTTP_BYTES:  # it takes the lock itself
            hf_hub_download(file.repo, file.name, revision=file.commit, cache_dir=self._storage.parent)
            self._done[file.etag] = file.num_bytes
            return
        with self._lock(file):
            if _blob(self._storage, file).exists():  # another process has downloaded it
                self._done[file.etag] = file.num_bytes
                return
            path = _incomplete(self._storage, file)
            is_new = not file.has_digest or _size(path) == 0
            found = self._receive(file, path, is_new)
            if file.has_digest and found != file.etag and not is_new:
                self._progress.say(f"{file.name}: what an earlier download left is not of this file: once more")
                found = self._receive(file, path, True)
            if file.has_digest and found != file.etag:
                path.unlink()
                raise ModelError(
                    f"{file.repo}: {file.name} arrived with the digest {found}, and the hub says {file.etag}: it was "
                    "changed or damaged on its way. Try again, or another mirror (HF_ENDPOINT)"
                )
            path.rename(_blob(self._storage, file))

    @contextmanager
    def _lock(self, file: RemoteFile) -> Iterator[None]:
        """huggingface_hub's lock of the file. Raises ModelError after the timeout."""
        path = self._storage.parent / ".locks" / self._storage.name / f"{file.etag}.lock"
        end, is_said = time.monotonic() + self._timeout_s, False
        with os.fdopen(open_lock(path), "rb") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                if not is_said:
                    self._progress.say(f"waiting for another process that downloads {file.name}")
                is_said = True
                if time.monotonic() > end:
                    raise ModelError(
                        f"another process has held {path} for {self._timeout_s:.0f} s: end that process, or raise "
                        "supervisor.prepare_timeout_s"
                    )
                self._done[file.etag] = _size(_incomplete(self._storage, file))
                if self._stop.wait(LOCK_POLL_S):
                    raise _Interrupted
            yield

    def _receive(self, file: RemoteFile, path: Path, is_new: bool) -> str:
        """Fill the file at `path`, from its end unless `is_new`. Returns its digest, of the kind that the ETag is.
        Raises ModelError, OSError, and huggingface_hub's errors."""
        try:
            fd = open_own(path)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EPERM):
                raise ModelError(f"{path} is not a regular file of this user: remove it") from error
            raise
        with os.fdopen(fd, "r+b", buffering=0) as out:
            if is_new:
                out.truncate()
            digest = _digest_of(file)
            if os.fstat(out.fileno()).st_size > file.num_bytes:
                out.truncate()
            for chunk in iter(lambda: out.read(CHUNK_BYTES), b""):
                digest.update(chunk)
            self._done[file.etag] = out.tell()
            retries = Retries(f"downloading {file.name}", self._progress.say, self._stop)
            while out.tell() < file.num_bytes or (file.num_bytes == 0 and retries.num_tries == 0):
                begin = out.tell()
                try:
                    digest = self._receive_once(file, out, digest)
                except TRANSPORT as error:
                    retries.wait_after(error, has_progress=out.tell() > begin)
                else:
                    if out.tell() == begin and file.num_bytes:
                        retries.wait_after(ConnectionError("the server sent nothing"), has_progress=False)
                    retries.num_tries += 1
                if self._stop.is_set():
                    raise _Interrupted
            os.fsync(out.fileno())
        found: str = digest.hexdigest()
        return found

    def _receive_once(self, file: RemoteFile, out: IO[bytes], digest: Any) -> Any:
        """One request for what is missing. Returns the digest of all that is there."""
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        begin = out.tell()
        if begin:
            headers["Range"] = f"bytes={begin}-"
        timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        with get_session().stream("GET", file.url, headers=headers, follow_redirects=True, timeout=timeout_s) as reply:
            hf_raise_for_status(reply)
            match = RANGE.fullmatch(reply.headers.get("Content-Range", ""))
            if begin and (reply.status_code != 206 or match is None or int(match[1]) != begin):
                out.seek(0)  # the server sends the whole file
                out.truncate()
                digest = _digest_of(file)
            for chunk in reply.iter_bytes():
                if self._stop.is_set():
                    raise _Interrupted
                if out.tell() + len(chunk) > file.num_bytes:
                    raise ModelError(
                        f"{file.repo}: the server sends more than the {file.num_bytes} bytes of {file.name}"
                    )
                _write(out, chunk)
                digest.update(chunk)
                self._done[file.etag] = out.tell()
        return digest


def _write(out: IO[bytes], chunk: bytes) -> None:
    left = memoryview(chunk)
    while left:
        left = left[out.write(left) :]


def _digest_of(file: RemoteFile) -> Any:
    """A new digest of the kind that the file's ETag is."""
    if GIT.fullmatch(file.etag):
        return hashlib.sha1(b"blob %d\0" % file.num_bytes, usedforsecurity=False)
    return hashlib.sha256()


def _blob(storage: Path, file: RemoteFile) -> Path:
    return storage / "blobs" / file.etag


def _incomplete(storage: Path, file: RemoteFile) -> Path:
    return storage / "blobs" / f"{file.etag}.incomplete"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _link(storage: Path, file: RemoteFile) -> None:
    """Let the commit's folder have the file. Raises ModelError if its name leads elsewhere, and OSError."""
    snapshot = storage / "snapshots" / file.commit
    path, blob = snapshot / file.name, _blob(storage, file)
    if path.is_file() and path.samefile(blob):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.parent.resolve().is_relative_to(snapshot.resolve()):
        raise ModelError(f"{file.repo}: {path.parent} leads out of the cache: remove it")
    temporary = path.with_name(f"{path.name[:200]}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(os.path.relpath(blob, path.parent))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP):
            raise
        os.link(blob, temporary)  # no symbolic links on this file system
    temporary.replace(path)
