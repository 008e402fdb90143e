"""What each process has imported when the server is ready: each import costs every start."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import STAGES, Server

HOOK = """
import os, sys
def _hook(event, args):
    if event == "import":
        file = os.open(os.path.join({folder!r}, str(os.getpid())), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, args[0].encode() + b"\\n")
        os.close(file)
sys.addaudithook(_hook)
"""
"""A sitecustomize that writes the names of modules as they are imported, to a file for each process."""

UNUSED = {"torch", "transformers", "huggingface_hub", "safetensors", "gguf", "llguidance", "prometheus_client", "rich"}
"""Modules that no process needs before its first request, metrics included."""

NOT_NEEDED = {
    "supervisor": {"numpy", "asyncio", "aiohttp", "tokenizers", "jinja2", "uvloop"},
    # asyncio and uvloop, which only the gateway and ingest need, are the fork server's, whose memory all share.
    "execute": {"aiohttp", "tokenizers", "jinja2"},
    "schedule": {"aiohttp", "tokenizers", "jinja2"},
    "detokenize": {"aiohttp", "jinja2"},
    "ingest": {"aiohttp"},
    "gateway": {"tokenizers", "jinja2"},
}

Imported = dict[str, set[str]]
"""Top-level modules by stage."""


def imported(folder: Path, server: Server) -> Imported:
    """By each process. Stages also have what the fork server had imported when it forked them."""

    def by(pid: int) -> set[str]:
        return {line.partition(".")[0] for line in (folder / str(pid)).read_text().split()}

    (fork_server,) = (pid for pid, one in server.seen.items() if one.cmdline()[:1] == ["pipeline: fork server"])
    shared = by(fork_server)
    return {"supervisor": by(server.process.pid)} | {name: by(server.stage(name).pid) | shared for name in STAGES}


@pytest.fixture(scope="module")
def at_ready(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    """What a server with the default settings has imported at `ready on`."""
    folder = tmp_path_factory.mktemp("imports")
    with Server(environ=hooked(folder)) as server:
        yield imported(folder, server)


def hooked(folder: Path) -> dict[str, str]:
    """An environment in which processes write their imports to `folder`."""
    (folder / "sitecustomize.py").write_text(HOOK.format(folder=str(folder)))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


def test_the_imports_are_seen(at_ready: Imported) -> None:
    assert at_ready.keys() == NOT_NEEDED.keys()
    assert all("msgspec" in names for names in at_ready.values())
    assert "aiohttp" in at_ready["gateway"] and "tokenizers" in at_ready["ingest"] and "numpy" in at_ready["execute"]


@pytest.mark.parametrize("stage", NOT_NEEDED)
def test_no_process_imports_what_it_does_not_need(at_ready: Imported, stage: str) -> None:
    assert not at_ready[stage] & (UNUSED | NOT_NEEDED[stage])


def test_only_execute_imports_torch_and_only_to_compute_with_it(smollm2_dir: Path, tmp_path: Path) -> None:
    with Server("execute.kernels=torch", environ=hooked(tmp_path)) as server:
        names = imported(tmp_path, server)
        assert any(re.search(r"loaded .*kernels='?torch", line) for line in server.lines)
    assert [name for name in names if "torch" in names[name]] == ["execute"]
