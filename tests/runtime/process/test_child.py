"""The end of a child process."""

import subprocess
import sys

PATIENCE_S = 60.0

INTERRUPTED = """
import os, sys, types
import msgspec
from pipeline.config.settings import Settings
from pipeline.runtime import child
from pipeline.runtime import messages as m

class Descriptor:
    def __set_name__(self, owner, name):
        os.kill(os.getpid(), child.INTERRUPT)

def run(launch):
    class Imported:  # as a dataclass that is imported
        field = Descriptor()

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


def test_an_interrupt_while_a_class_is_made_is_no_failure() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")
