"""`python -m pipeline.cli.cache.ahead`, which prepares the default model while packages are installed."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guardian import guard

PATIENCE_S = 60.0


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def of_home(home: Path) -> list[int]:
    """The processes with this home."""
    found = []
    for one in Path("/proc").glob("[0-9]*"):
        try:
            if f"XDG_CACHE_HOME={home}\0".encode() in (one / "environ").read_bytes():
                found.append(int(one.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP], ids=["the-parent-ends", "the-terminal-is-closed"])
def test_it_ends_with_its_parent_and_removes_what_is_incomplete(tmp_path: Path, number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as index:  # accepts, and never answers
        environment = os.environ | {
            "XDG_CACHE_HOME": str(tmp_path),
            "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_CACHE_DIR": "1",
        }
        shell = subprocess.Popen(
            ["sh", "-c", f"{sys.executable} -m pipeline.cli.cache.ahead & wait"],
            env=environment,
            stdout=subprocess.DEVNULL,
            process_group=0,
        )
        guard(shell)
        index.settimeout(PATIENCE_S)
        index.accept()[0].close()
        cache = tmp_path / "pipeline"
        assert any(path.name.startswith(".partial-wheel-") for path in cache.iterdir())
        if number == signal.SIGHUP:
            os.killpg(shell.pid, number)  # the kernel does it, to the terminal's foreground processes
        else:
            shell.kill()
        shell.wait(PATIENCE_S)
        until(lambda: not of_home(tmp_path))
        assert list(cache.iterdir()) == []


def test_what_fails_is_left_to_the_server(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli.cache.ahead"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "file")},
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
