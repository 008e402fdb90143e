"""llama.cpp, built for this CPU from the source package of llama-cpp-python, which contains its source."""

import os
import platform
import re
import shutil
import sys
import tarfile
from pathlib import Path

import msgspec

from pipeline.errors import UserError
from pipeline.kernels.cpu import isa
from tools.compare_peers import children
from tools.compare_peers.children import Tell

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
STAMP = "complete.json"
TARGETS = ("llama-server", "llama-bench")
DOWNLOAD_S = 600.0
CONFIGURE_S = 300.0
BUILD_S = 5400.0
"""Two cores take about ten minutes."""
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)
PATCHED = Path("ggml", "src", "ggml-cpu", "amx", "mmq.cpp")
UNPATCHED = "    _tile_loadconfig(&tc);\n"
PATCH = '    __asm__ volatile("" : : "r"(&tc) : "memory");\n' + UNPATCHED
"""GCC 12 takes _tile_loadconfig for a read of 8 of the 64 bytes, and removes the stores to the others. On a CPU with
AMX llama.cpp then crashes at its first product. With this line the stores remain; nothing else changes."""


class Stamp(msgspec.Struct, frozen=True):
    """What a complete build was built from. A build for another CPU may contain instructions that this one lacks."""

    cpu: str
    options: tuple[str, ...]
    patch: str


class LlamaCpp:
    """One version in the cache: `source/`, `build/`, and a stamp when the build is complete."""

    def __init__(self, cache: Path, version: str) -> None:
        self._version = version
        self._folder = cache / f"llama.cpp-{version}"
        self.server = self._folder / "build" / "bin" / "llama-server"

    def is_complete(self) -> bool:
        return self._stamp() == _stamp_of_this_cpu() and self.server.is_file()

    def _stamp(self) -> Stamp | None:
        """The stamp of the last complete build."""
        try:
            return msgspec.json.decode((self._folder / STAMP).read_bytes(), type=Stamp)
        except (OSError, ValueError):  # not built, or interrupted
            return None

    def commands(self) -> list[list[str]]:
        """Download, configure, build."""
        source, build = str(self._folder / "source"), str(self._folder / "build")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        cores = str(len(os.sched_getaffinity(0)))
        return [
            [*pip, "--no-binary", PACKAGE, "-d", str(self._folder / "download"), f"{PACKAGE}=={self._version}"],
            ["cmake", "-S", source, "-B", build, *OPTIONS],
            ["cmake", "--build", build, "--parallel", cores, "--target", *TARGETS],
        ]

    def make(self, logs: Path, tell: Tell) -> None:
        """Build, unless the build is complete. An interrupted build continues. Raises UserError."""
        if self.is_complete():
            return
        require_tools()
        download, configure, build = self.commands()
        if not (self._folder / "source" / "CMakeLists.txt").is_file():
            tell(f"downloading {PACKAGE} {self._version}")
            children.run("download of llama.cpp", download, logs / "llama.cpp-download.log", DOWNLOAD_S, tell)
            self._unpack()
        self._patch()
        if (stamp := self._stamp()) is not None and stamp.cpu != _stamp_of_this_cpu().cpu:
            shutil.rmtree(self._folder / "build", ignore_errors=True)
        tell(f"building llama.cpp of {PACKAGE} {self._version}; two cores take about ten minutes")
        children.run("configuration of llama.cpp", configure, logs / "llama.cpp-configure.log", CONFIGURE_S, tell)
        children.run("build of llama.cpp", build, logs / "llama.cpp-build.log", BUILD_S, tell, _percent)
        (self._folder / STAMP).write_bytes(msgspec.json.encode(_stamp_of_this_cpu()))

    def _patch(self) -> None:
        """Insert PATCH, once; a version that has no such line is left as it is."""
        path = self._folder / "source" / PATCHED
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if UNPATCHED in text and PATCH not in text:
            path.write_text(text.replace(UNPATCHED, PATCH), encoding="utf-8")

    def _unpack(self) -> None:
        """Unpack llama.cpp's folder to `source/`, which exists only when it is complete."""
        archives = list((self._folder / "download").glob("*.tar.gz"))
        if len(archives) != 1:
            raise UserError(f"{self._folder / 'download'}: needs one .tar.gz, has {len(archives)}; remove the folder")
        partial = self._folder / "unpacked"
        shutil.rmtree(partial, ignore_errors=True)
        with tarfile.open(archives[0]) as archive:
            members = [member for member in archive if "/vendor/llama.cpp/" in member.name]
            archive.extractall(partial, members, filter="data")
        found = list(partial.glob("*/vendor/llama.cpp"))
        if len(found) != 1:
            raise UserError(f"{archives[0]}: has no vendor/llama.cpp")
        found[0].rename(self._folder / "source")
        shutil.rmtree(partial)


def require_tools() -> None:
    """Raise UserError if something that the build needs is missing."""
    missing = [tool for tool in ("cmake", "make", "g++") if shutil.which(tool) is None]
    if missing:
        raise UserError(
            f"llama.cpp can't be built without {', '.join(missing)}: install them (apt install cmake make g++), name "
            "an existing build with --llama-server PATH, or leave llama.cpp out of --servers"
        )


def _stamp_of_this_cpu() -> Stamp:
    return Stamp(isa.identity(platform.machine(), isa.cpuinfo()), OPTIONS, PATCH)


def _percent(line: str) -> str | None:
    """The progress in a line of make or ninja."""
    match = re.match(r"\[\s*(\d+%|\d+/\d+)\]", line)
    return match[1] if match else None
