"""The end of a child process."""

import subprocess
import sys

import pytest

PATIENCE_S = 60.0

INTERRUPTED = """
import os, sys, time, types
import msgspec
from pipeline.config.settings import Settings
from pipeline.runtime import child
from pipeline.runtime import messages as m

RUN

module = types.ModuleType("interrupted")
module.run = run
sys.modules["interrupted"] = module
ours, theirs = os.pipe()
death, _ = os.pipe()
launch = m.Launch(
    stage="prepare", replica=0, rank=0, incarnation=1, entry="interrupted", settings=Settings(), model_dir="",
    address="", peers=[], segments=[], death_fd=death,
)
data = msgspec.msgpack.encode(launch)
os.write(theirs, child.LENGTH.pack(len(data)) + data)
os.close(theirs)
child.main(ours)
"""


IN_A_CLASS = """
class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), child.INTERRUPT)

def run(launch):
    class Imported:  # as a dataclass that is imported
        field = Descriptor()
"""
IN_A_CALLBACK = """
import _imp

class Locks:
    def __getattr__(self, name):
        return getattr(_imp, name)

    def release_lock(self):
        _imp.release_lock()
        if sys._getframe(1).f_code.co_name == "cb":  # of the weak reference to the lock of a module
            os.kill(os.getpid(), child.INTERRUPT)

def run(launch):
    sys.modules["_frozen_importlib"]._imp = Locks()
    import colorsys
    while True:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("run", [IN_A_CLASS, IN_A_CALLBACK])
def test_an_interrupt_during_an_import_is_no_failure_and_not_lost(run: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED.replace("RUN", run)]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")
