"""Fixtures that many tests share, and the lists of tests that need the machine to themselves.

The model is prepared once, and one server serves all tests that don't end it.
"""

import functools
import gc
import hashlib
import os
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Set the thread counts of libraries before any of them is imported: there are two cores, and some tests measure time.
# With several test processes, each has one core.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
    os.environ.setdefault(_variable, "1" if "PIPELINE_TEST_PROCESSES" in os.environ else "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that spin while they wait starve each other if a server runs beside a test; execute sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Triton's kernels run in its interpreter, which must be enabled before the first of them is imported: tests pass
# CPU tensors, on a machine with a GPU too. tools/gpu_check tests what needs a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell makes background jobs ignore Ctrl-C, and children inherit that: tests that interrupt one would wait
# forever.
signal.signal(signal.SIGINT, signal.default_int_handler)

import httpx._transports.default
import hypothesis

from pipeline.config.settings import Settings
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.tokenizers import tokenizer_probe
from tests import long_tests, pairwise
from tests.e2e.server import Server
from tests.house import pythons
from tests.slices import part_of

# An example may take long if another process has the core.
hypothesis.settings.register_profile("without deadline", deadline=None, max_examples=part_of(100, 30))
hypothesis.settings.load_profile("without deadline")

# Each of httpx's clients would read the system's certificates, 25 ms of CPU time.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]


def remembered(run: Callable[[Path, bytes], Any]) -> Callable[[Path, bytes], Any]:
    """A tokenizer that was tried is not tried again: most tests have the same few, and each process imports the
    library."""
    tried: dict[tuple[bytes, bytes], Any] = {}

    def once(path: Path, given: bytes) -> Any:
        key = hashlib.sha256(path.read_bytes()).digest(), given
        if key not in tried:
            tried[key] = run(path, given)
        return tried[key]

    return once


tokenizer_probe.run = remembered(tokenizer_probe.run)  # type: ignore[assignment]

ALONE = (
    # Limits of wall-clock or CPU time.
    "tests/e2e/http/access/test_admission.py::test_a_full_server_rejects_requests_at_once",
    "tests/e2e/http/attacks/test_hostile.py",
    # A thousand uploads, which take six minutes of the whole machine.
    "tests/e2e/http/attacks/test_open_bytes.py",
    "tests/e2e/http/attacks/test_open_bytes_pooled.py",
    "tests/e2e/recovery/test_life_and_death.py::test_it_starts_fast_and_is_quiet_when_idle",
    "tests/e2e/recovery/test_life_and_death.py::test_when_the_supervisor_is_killed",
    # It measures servers, and needs that requests end in each measurement.
    "tests/e2e/test_compare_peers.py",
    "tests/e2e/start/test_start.py::test_a_warm_start_takes_seconds",
    "tests/e2e/test_observability.py::test_scraping_ten_times_a_second_costs_little",
    "tests/e2e/test_observability.py::test_a_stage_that_hangs_is_late",
    "tests/stages/gateway/admission/test_admission.py::TestGateway::test_rejections_are_sent_at_once",
    "tests/stages/schedule/recovery/test_liveness.py::test_preempting_many_rows_is_cheap",
    # A thousand connections and their latency.
    "tests/stages/gateway/http/uploads/test_slow_clients.py::test_slow_clients_do_not_delay_others",
    # Maximum load, under which the probes must be answered in time.
    "tests/tools/test_soak.py::test_a_short_soak",
    # The contents of a system folder, before and after.
    "tests/shm/test_segment.py::test_nothing_appears",
)
"""The id prefixes of tests that need the machine to themselves."""

SERVERS = (
    # Real servers of five processes each, which mostly wait for each other.
    "tests/e2e/",
    "tests/house/test_pythons.py::test_a_wheel_serves_from_a_folder_of_shadowing_modules",
)
"""The same for tests that need so much that at most five of them run at once, and nothing beside them. Tests in ALONE
are excluded. All other tests run beside each other."""

LONGEST = (
    "tests/cli/check/test_check_model.py",
    "tests/e2e/hosts/test_ranks.py",
    "tests/e2e/hosts/test_replicas.py",
    "tests/e2e/models/test_image_combinations.py",
    "tests/e2e/models/test_images.py",
    "tests/e2e/recovery/test_life_and_death.py",
    "tests/e2e/recovery/test_recovery.py",
    "tests/e2e/recovery/test_scaling.py",
    "tests/e2e/recovery/test_sleep.py",
    "tests/e2e/replaced/test_new_server.py",
    "tests/e2e/several/test_loading.py",
    "tests/e2e/several/test_turns.py",
    "tests/e2e/start/test_how_to.py",
    "tests/e2e/start/test_start.py",
    "tests/e2e/test_alone.py",
    "tests/stages/execute/cuda/graphs/test_captures.py",
    "tests/stages/execute/models/test_smollm2.py",
    "tests/tools/test_scaling_meter.py",
)
"""These run first: at the end, one process would run each of them while the others are idle."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause the garbage collector, which would search all imported modules and all tests again and again. They live
    until the end, so it need not search them later either, nor begin as often as by default."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.unfreeze = lambda: None  # of code that measures its own steps, and would unfreeze all
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.markexpr:  # as in tools/check; `pytest PATH` runs all cases
        kept, left_out = pairwise.selected(items)
        items[:], long = long_tests.selected(kept)
        config.hook.pytest_deselected(items=left_out + long)
    for item in items:
        if item.nodeid.startswith(ALONE):
            item.add_marker(pytest.mark.alone)
        elif item.nodeid.startswith(SERVERS):
            item.add_marker(pytest.mark.servers)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the Pythons that were not tested, so that their absence does not look like a success."""
    reports = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ()))
    if not any("test_pythons.py" in report.nodeid for report in reports):
        return
    if missing := [version for version in pythons.supported() if version not in pythons.here()]:
        terminalreporter.write_line(f"not on this machine, so not tried: Python {', '.join(missing)}", yellow=True)


@pytest.fixture(scope="session", autouse=True)
def kernels_are_compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails if a test has compiled the CPU kernels into a cache of its own: that takes longer than any test."""
    yield
    own = [
        str(Path(folder, name))
        for folder, _, names in os.walk(tmp_path_factory.getbasetemp())  # which does not follow links
        for name in names
        if name.startswith("program-")
        and name.endswith(".so")
        and Path(folder, name).stat().st_size > 100_000  # tests of the cache write small ones
    ]
    assert not own, f"use tests.compiled.link_kernels for the cache_dir: {own}"


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The prepared folder of the default model, cached in the user's cache folder."""
    return prepare(Settings())


@pytest.fixture(scope="session")
def server(smollm2_dir: Path) -> Iterator[Server]:
    """A server with the default model, for tests that leave it unchanged."""
    with Server() as server:
        yield server
