"""A pytest plugin that prints which tests, and files of them, cost the most CPU time: pytest -p tests.plugins.costs

CPU time hardly depends on what else the machine does, unlike the seconds of --durations. It includes the processes that
a test has started, and what the test lets those of earlier tests do, such as a server that many tests share. Of a file,
it is also shown for each phase: to import it and find its tests, and to set tests up, call them, and tear them down.
The first test that uses a shared fixture pays for it, and the first file that imports a library pays for that.
"""

import contextlib
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

NUM_SHOWN = 40
PHASES = ("collect", "setup", "call", "teardown")

_last_s = 0.0
_test_cpu_s: dict[str, float] = defaultdict(float)
_cpu_s: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(PHASES, 0.0))
"""By file and phase."""
_wall_s: dict[str, float] = defaultdict(float)
_num_tests: dict[str, int] = defaultdict(int)


def _used_s(pid: int | None = None) -> float:
    """CPU seconds of a process, by default this one, and of its descendants, but those whose parent did not wait."""
    total_s = 0.0
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        process = psutil.Process(pid)
        total_s = sum(process.cpu_times()[:4])  # user, system, and the same of children that have ended
        for task in Path(f"/proc/{process.pid}/task").iterdir():  # much faster than to look at all processes
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                total_s += sum(_used_s(int(child)) for child in (task / "children").read_text().split())
    return total_s


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, object]:
    begin_s = _used_s()
    try:
        return (yield)
    finally:
        _cpu_s[collector.nodeid.partition("::")[0]]["collect"] += _used_s() - begin_s


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    global _last_s
    _last_s = _used_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a phase of a test has used to its report, which processes.py sends to the process that prints."""
    global _last_s
    report = yield
    now_s = _used_s()
    report.user_properties = [*report.user_properties, ("cpu_s", now_s - _last_s)]
    _last_s = now_s
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    used_s = dict(report.user_properties).get("cpu_s", 0.0)  # without, if the process has died
    assert isinstance(used_s, float)
    _test_cpu_s[report.nodeid] += used_s
    _cpu_s[file][report.when] += used_s
    _wall_s[file] += report.duration
    _num_tests[file] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU time by test")
    for test in sorted(_test_cpu_s, key=lambda test: -_test_cpu_s[test])[:NUM_SHOWN]:
        terminalreporter.write_line(f"{_test_cpu_s[test]:8.1f}  {test}")
    terminalreporter.section("CPU time by file")
    terminalreporter.write_line(" ".join(f"{name:>8}" for name in ("CPU s", *PHASES, "s", "tests")))

    def line(files: list[str], name: str) -> str:
        phases_s = [sum(_cpu_s[file][phase] for file in files) for phase in PHASES]
        seconds = [sum(phases_s), *phases_s, sum(_wall_s.get(file, 0.0) for file in files)]
        return (
            " ".join(f"{one:8.1f}" for one in seconds) + f" {sum(_num_tests.get(file, 0) for file in files):8}  {name}"
        )

    for file in sorted(_cpu_s, key=lambda file: -sum(_cpu_s[file].values()))[:NUM_SHOWN]:
        terminalreporter.write_line(line([file], file or "."))
    terminalreporter.write_line(line([*_cpu_s], f"all {len(_wall_s)} files"))
