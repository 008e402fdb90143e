"""Compiles the C++ kernels on first use and keeps them in the user's cache.

    absent ──lock──► .partial-… ──compile──► sealed ──rename──► <key>.so ──bits lost, or it can't be loaded──► absent
        one process     it alone                 at once             found by its seal, or by loading it

The key covers everything that the machine code depends on, so the age of a library does not matter. The file ends with
a seal, the SHA-256 of everything before it; the loader ignores it. A killed process leaves a `.partial-` folder, which
the next process that compiles removes. Each library has a lock (flock) of its own, which the kernel releases when its
process ends.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pipeline.kernels.cpu import compiler as cxx
from pipeline.kernels.cpu import isa as cpu_isa
from pipeline.kernels.cpu.compiler import (
    EMULATED,
    ISA_FLAGS,
    BuildError,
    CompileError,
    Compiler,
    describe_end,
    find_compiler,
    first_error,
    run,
)
from pipeline.kernels.cpu.isa import Isa
from pipeline.kernels.cpu.library_file import load, seal
from pipeline.own_files import WRITE_OF_OTHERS, NotOwn, OpenFolder, open_lock, own_folder

PROGRAM = Path(__file__).parent / "program.cpp"

QUICK_END = "-quick.so"
"""How the names of quick libraries end."""
COMPILE_TIMEOUT_S = 1800.0
"""For slow and busy machines: the user sees that it goes on, and can end it. No other deadline passes meanwhile."""
LOCK_TIMEOUT_S = COMPILE_TIMEOUT_S + 60.0
"""How long to wait for a process that compiles: its compiler's deadline, and what it does before and after."""
POLL_S = 0.05
GUARD = Path(__file__).with_name("compiler_guard.py")
MAX_KEPT = 16
PARTIAL, LOCK = ".partial-", ".lock-"
"""How names of folders to compile in begin, and those of locks. The name of the library follows."""


def build(
    isa: Isa,
    say: Callable[[str], None],
    source: Path = PROGRAM,
    *,
    cache_root: Path | None = None,
    emulate: bool = False,
    what: str = "the CPU kernels",
    about_s: int = 20,
    timeout_s: float = COMPILE_TIMEOUT_S,
    quick: bool = False,
    niceness: int = 0,
) -> Path:
    """A shared library of `source` for an ISA, compiled if it is not in the cache. It can be loaded with
    library_file.load.

    `source` may include the .h files beside it. `cache_root` is the folder that holds all that the user's cache has, by
    default $XDG_CACHE_HOME/pipeline or ~/.cache/pipeline. With `emulate`, amx and avx512_bf16 do without those of their
    instructions that this CPU lacks, and run here. `what` and `about_s` tell the user what is compiled and how long it
    may take, and the compiler, which is by `niceness` nicer than this process, is ended after `timeout_s`. Of several
    processes one compiles and the others wait for it. With `quick`, it is the optimized library if that is in the
    cache, else one that takes two thirds of the time to compile and computes the same bits, up to 1.5 times as long.

    Raises NoCompiler or CompileError, or another BuildError where the cache can't be written or its lock is not to be
    had, and ValueError for `emulate` with an ISA that has nothing to emulate.
    """
    if emulate and isa not in EMULATED:
        raise ValueError(f"ISA {isa} has nothing to emulate")
    compiler = find_compiler()
    options = compiler.options(isa, emulate)
    root = default_cache_root() if cache_root is None else cache_root.absolute()
    folder = root / "kernels"
    try:
        folder = own_folder(root, "kernels", default_cache_root, "compiled kernels", say)
        library = folder / f"{_key(source, isa, compiler, options)}.so"
        if _is_usable(library):
            return library
        if quick:
            options = compiler.options(isa, emulate, quick)
            library = folder / f"{_key(source, isa, compiler, options)}{QUICK_END}"
            if _is_usable(library):
                return library
        with _opened(folder) as opened, _lock(opened / library.name, what, say):
            path = opened / library.name
            if _is_usable(path):
                return library
            path.unlink(missing_ok=True)
            _remove_partials(path)
            once = "quickly, and better for the next start" if quick else "once"
            say(f"compiling {what} ({isa}{', emulated' if emulate else ''}), {once}: about {about_s} s")
            start = time.monotonic()
            _compile(compiler, options, source, isa, path, timeout_s, niceness, _Progress(what, say))
            say(f"compiled {what} in {time.monotonic() - start:.1f} s")
            _remove_oldest(opened)
    except NotOwn as error:
        raise BuildError(str(error)) from error
    except OSError as error:
        raise BuildError(
            f"cannot keep compiled kernels in {folder} ({error.strerror}): set cache_dir to a folder you can write to, "
            "with some MiB free"
        ) from error
    return library


@contextmanager
def _opened(folder: Path) -> Iterator[Path]:
    """A name of a folder of libraries that is this folder's whatever is renamed above it. Raises OSError and, with the
    folder's own name in it, what BuildError is raised inside."""
    with OpenFolder(folder) as opened:
        opened.close_to_others()
        try:
            yield opened.path
        except BuildError as error:
            raise type(error)(str(error).replace(str(opened.path), str(folder))) from error


def default_cache_root() -> Path:
    """Where the user's cache is when nothing is set. Raises BuildError for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser().absolute() / "pipeline"
    except RuntimeError as error:
        raise BuildError(f"no folder for compiled kernels: {error}; set cache_dir") from error


def _key(source: Path, isa: Isa, compiler: Compiler, options: tuple[str, ...]) -> str:
    """A name for the machine code: a readable part and a digest of everything that it depends on."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = [
        [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files],
        [*compiler.command, compiler.version, *options],
        cpu_isa.identity(platform.machine(), cpu_isa.cpuinfo()),
    ]
    return f"{source.stem}-{isa}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]}"


def code_of(isa: Isa, source: Path = PROGRAM) -> str:
    """A digest of what decides the numbers of a library: its sources and options. Compilers round alike (`FLAGS`), so
    they don't count, and neither do CPUs."""
    files = [source, *sorted(source.parent.glob("*.h"))]
    parts = [[[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files], cxx.FLAGS, ISA_FLAGS[isa]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]


def _is_usable(library: Path) -> bool:
    """Whether a library exists, is complete and can be loaded, and no other user could change it. If so, updates its
    time of use; it stays loaded."""
    try:
        load(library)
    except OSError:
        return False
    with contextlib.suppress(OSError):  # of a cache that may only be read, the age does not matter
        os.utime(library, follow_symlinks=False)
    return True


class _Progress:
    """Says every PROGRESS_S that the compiler still runs."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began = time.monotonic()

    def __call__(self) -> None:
        self._say(f"still compiling {self._what}: {time.monotonic() - self._began:.0f} s so far")


def _compile(
    compiler: Compiler,
    options: tuple[str, ...],
    source: Path,
    isa: Isa,
    library: Path,
    timeout_s: float,
    niceness: int,
    progress: Callable[[], None],
) -> None:
    """Compile `library` atomically. The compiler's output, if any, goes to a .log file beside it."""
    log = library.with_suffix(".log")
    partial = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{library.stem}-", dir=library.parent))
    try:
        made = partial / "library.so"
        command = (compiler.command[0], *options, str(source.absolute()), "-o", made.name)
        guarded = (sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), str(niceness), *command)
        code, said = run(guarded if sys.executable else command, timeout_s, partial, progress)
        _write_log(log, said)
        failed = f"{compiler.command[0]} could not compile {source.name} for {isa}: "
        all_of_it = f"; all it said is in {log}" if said else ""
        if code is None:
            raise CompileError(f"{failed}it was ended after {timeout_s:.0f} s{all_of_it}")
        if code != 0 or not made.is_file():
            raise CompileError(f"{failed}{first_error(said) or describe_end(code)}{all_of_it}")
        made.chmod(stat.S_IMODE(made.stat().st_mode) & ~WRITE_OF_OTHERS)
        seal(made)
        try:
            load(made)
        except OSError as error:
            raise CompileError(f"{source.name} was compiled for {isa}, but can't be loaded: {error}") from error
        made.replace(library)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_log(log: Path, said: str) -> None:
    log.unlink(missing_ok=True)  # not written to: others may see, or have chosen, where that leads
    if said:
        with log.open("x", encoding="utf-8") as file:
            file.write(said + "\n")


@contextmanager
def _lock(library: Path, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Lock a library for compiling. Raises BuildError if another process holds the lock for too long."""
    path = _lock_of(library.parent, library.stem)
    end = time.monotonic() + LOCK_TIMEOUT_S
    waiting = False
    while (file := _try_lock(path)) is None:
        if not waiting:
            say(f"another process is compiling {what}: waiting for it")
        waiting = True
        if time.monotonic() > end:
            raise BuildError(f"another process has held {path} for {LOCK_TIMEOUT_S:.0f} s: end it")
        time.sleep(POLL_S)
    with file:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _lock_of(folder: Path, stem: str) -> Path:
    return folder / f"{LOCK}{stem}"


def _try_lock(path: Path) -> IO[str] | None:
    """The locked file, or None if another process holds the lock."""
    file = os.fdopen(open_lock(path), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Who held it may have removed it since it was opened; then it locks nothing.
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        file.close()
        raise
    file.close()
    return None


def _remove_partials(library: Path) -> None:
    """Remove the folders of killed processes. The caller holds the lock of `library`."""
    for partial in library.parent.glob(f"{PARTIAL}*"):
        stem = partial.name.removeprefix(PARTIAL).rpartition("-")[0]
        if stem == library.stem:
            shutil.rmtree(partial, ignore_errors=True)
            continue
        path = _lock_of(library.parent, stem)
        if (file := _try_lock(path)) is not None:
            with file:
                shutil.rmtree(partial, ignore_errors=True)
                path.unlink(missing_ok=True)


def _remove_oldest(folder: Path) -> None:
    """Remove all but the MAX_KEPT most recently used libraries and logs."""
    for pattern in ("*.so", "*.log"):
        by_age = sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in by_age[MAX_KEPT:]:
            path.unlink(missing_ok=True)
