"""Fixtures that many tests share, and which tests need the machine for themselves.

The model is prepared once, and one server serves all tests that don't end it.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Library threads are named before any of them is imported: two cores, and tests of timing beside them. Where several
# processes share the tests, each has a core.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_variable, "1" if "PYTEST_XDIST_WORKER" in os.environ else "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait starve each other where a server runs beside a test; execute does the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Without a GPU, Triton's kernels run in its interpreter; it is asked for before the first of them is imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell has jobs in the background ignore Ctrl-C, and children inherit that: tests that interrupt one would wait for
# ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from tests import pythons
from tests.e2e.server import Server

# An example may take long where another process has the core.
hypothesis.settings.register_profile("without deadline", deadline=None)
hypothesis.settings.load_profile("without deadline")

ALONE = (
    # Real servers, of five processes each: they take all cores and the memory's whole bandwidth, and much is asked of
    # their time and processor time.
    "tests/e2e/",
    "tests/test_pythons.py::test_a_wheel_serves_from_a_folder_full_of_traps",
    "tests/tools/test_soaking.py::test_a_short_soak",
    # A thousand connections, and how long their texts take.
    "tests/stages/gateway/test_slow_clients.py::test_slow_clients_cost",
    # What is in a folder of the machine's, before and after.
    "tests/shm/test_segment.py::test_nothing_appears",
    # How long something takes on the clock, and that it is soon.
    "tests/stages/gateway/test_admission.py::TestTheGateway::test_answers_at_once",
    "tests/stages/schedule/test_liveness.py::test_putting_back_many_costs_little",
)
"""The beginnings of the ids of tests that need the machine for themselves; all others may run beside each other."""

LONGEST = "tests/stages/execute/test_smollm2.py"
"""It comes first: as the last, it would have one of several processes at work and the others wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which Pythons could not be tried, lest their absence pass for a success."""
    reports = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ()))
    if not any("test_pythons.py" in report.nodeid for report in reports):
        return
    if missing := [version for version in pythons.supported() if version not in pythons.here()]:
        terminalreporter.write_line(f"not on this machine, so not tried: Python {', '.join(missing)}", yellow=True)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The prepared folder of the default model, from the user's cache or fetched into it."""
    return prepare(Settings())


@pytest.fixture(scope="session")
def server(smollm2_dir: Path) -> Iterator[Server]:
    """A server with the default model for tests that leave it as they found it."""
    with Server() as server:
        yield server
