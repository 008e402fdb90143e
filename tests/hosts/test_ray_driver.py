"""The process that speaks to Ray leaves nothing behind when a signal ends it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGINT)
CODE = """
import os, signal, sys
from types import SimpleNamespace
from pipeline.config.settings import Settings
from pipeline.hosts import ray_driver

number, where = int(sys.argv[1]), sys.argv[2]
for ignored in (signal.SIGTERM, signal.SIGINT):
    signal.signal(ignored, signal.SIG_IGN)  # as the entry point of stages

def end(*_, **__):
    print(os.environ["RAY_AUTH_TOKEN_PATH"], signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL))
    os.kill(os.getpid(), number)
    raise AssertionError("the signal is ignored")

def stop():
    os.kill(os.getpid(), number)  # a second signal
    print("stopped")

ray = SimpleNamespace(init=end if where == "init" else lambda **_: None, shutdown=stop)
ray_driver._import_ray = lambda: ray
ray_driver._create_actors = end
ray_driver.run(SimpleNamespace(settings=Settings()))
print("ended")
"""


@pytest.mark.parametrize("where", ["init", "actors"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_start_leaves_no_token(tmp_path: Path, number: int, where: str) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(int(number)), where],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
        timeout=PATIENCE_S,
        check=False,
    )
    assert list(tmp_path.iterdir()) == [] and done.returncode == 0, done.stderr
    assert str(tmp_path) in done.stdout and "True" in done.stdout, "Ray's daemons must not inherit that it is ignored"
    assert done.stdout.split()[-2:] == ["stopped", "ended"]
