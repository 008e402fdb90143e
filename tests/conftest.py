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

# Triton's kernels run in its interpreter, which is asked for before the first of them is imported: tests give them
# tensors of the CPU, on a machine with a GPU too. What only a GPU can show, tools/gpu_check looks at.
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
    # Limits of wall-clock or CPU time.
    "tests/e2e/http/test_admission.py::test_a_full_server_rejects_requests_at_once",
    "tests/e2e/http/test_hostile.py",
    "tests/e2e/test_life_and_death.py::test_it_starts_fast_and_is_quiet_when_idle",
    "tests/e2e/test_life_and_death.py::test_when_the_supervisor_is_killed",
    "tests/e2e/test_start.py",
    "tests/e2e/test_observability.py::test_scraping_ten_times_a_second_costs_little",
    "tests/e2e/test_observability.py::test_a_stage_that_hangs_is_late",
    "tests/stages/gateway/test_admission.py::TestGateway::test_rejections_are_sent_at_once",
    "tests/stages/schedule/test_liveness.py::test_preempting_many_rows_is_cheap",
    # A thousand connections and their latency.
    "tests/stages/gateway/http/test_slow_clients.py::test_slow_clients_do_not_delay_others",
    # Maximum load, under which the probes must be answered in time.
    "tests/tools/test_soak.py::test_a_short_soak",
    # The contents of a system folder, before and after.
    "tests/shm/test_segment.py::test_nothing_appears",
)
"""The beginnings of the ids of tests that need the machine for themselves."""

SERVERS = (
    # Real servers of five processes each, which mostly wait for each other.
    "tests/e2e/",
    "tests/test_pythons.py::test_a_wheel_serves_from_a_folder_full_of_traps",
)
"""Likewise of those that take so much that no more than two of them run beside each other, and nothing else; but for
those above. All others may run beside each other."""

LONGEST = ("tests/stages/execute/test_smollm2.py", "tests/e2e/http/test_fuzz.py")
"""They come first: as the last, each would have one of several processes at work and the others wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
        elif item.nodeid.startswith(SERVERS):
            item.add_marker(pytest.mark.servers)
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
