"""A model of the hub: pulled, with an interruption, then served without the hub, and talked with."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compiled import link_kernels
from tests.stages.prepare import checkpoints
from tests.stages.prepare.fake_hub import COMMIT, FakeHub, Repo

PATIENCE_S = 60.0
CUT = 40_000
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
MODEL = "hf.co/org/tiny:q8_0"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    path = checkpoints.save_gguf(tmp_path / "Tiny-Q8_0.gguf", checkpoints.tiny_llama(), chat_template=TEMPLATE)
    hub = FakeHub()
    hub.repos["org/tiny"] = Repo({COMMIT: {path.name: path.read_bytes()}})
    yield hub
    hub.close()


def start(tmp_path: Path, hub: FakeHub, *words: str) -> subprocess.Popen[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    environ |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*", "COLUMNS": "40"}
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline", *words, "--set", f"cache_dir={tmp_path / 'cache'}"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_interrupted_pull_is_resumed_and_the_model_is_served_offline(tmp_path: Path, hub: FakeHub) -> None:
    hub.stall_after = CUT
    pull = start(tmp_path, hub, "pull", MODEL)
    assert hub.has_stalled.wait(PATIENCE_S)
    (incomplete,) = tmp_path.glob("hf/hub/models--org--tiny/blobs/*.incomplete")
    while incomplete.stat().st_size < CUT and pull.poll() is None:
        pass  # what was sent is on its way
    pull.send_signal(signal.SIGINT)
    _, err = pull.communicate(timeout=PATIENCE_S)
    assert (pull.returncode, err.splitlines()[-1]) == (
        130,
        "pipeline pull: interrupted; the next pull goes on where this one ended",
    )
    pull = start(tmp_path, hub, "pull", MODEL)
    out, err = pull.communicate(timeout=PATIENCE_S)
    assert pull.returncode == 0, err
    assert out.startswith(f"org/tiny:Q8_0 at commit {COMMIT[:12]} is in ") and hub.ranges == ["", f"bytes={CUT}-"]
    hub.requests.clear()
    link_kernels(tmp_path / "cache")
    small = ("--set", "execute.kv_cache_bytes=16MiB", "--set", "execute.num_threads=1")
    chat = start(tmp_path, hub, "chat", MODEL, "--offline", "--max-tokens", "4", *small)
    out, err = chat.communicate("Hello\n", timeout=PATIENCE_S)
    assert chat.returncode == 0, err
    assert out.strip() and hub.requests == []
