"""A pytest plugin that prints which tests, and files of them, cost the most CPU time: pytest -p tests.costs

CPU time hardly depends on what else the machine does, unlike the seconds of --durations. It includes processes that a
test has started and waited for. The first test that uses a shared fixture pays for it.
"""

import os
from collections import defaultdict
from collections.abc import Generator

import pytest

NUM_SHOWN = 40

_last_s = 0.0
_test_cpu_s: dict[str, float] = defaultdict(float)
_cpu_s: dict[str, float] = defaultdict(float)
_wall_s: dict[str, float] = defaultdict(float)
_num_tests: dict[str, int] = defaultdict(int)


def _used_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    global _last_s
    _last_s = _used_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add what a phase of a test has used to its report, which xdist sends to the process that prints."""
    global _last_s
    report = yield
    now_s = _used_s()
    report.user_properties = [*report.user_properties, ("cpu_s", now_s - _last_s)]
    _last_s = now_s
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    used_s = dict(report.user_properties)["cpu_s"]
    assert isinstance(used_s, float)
    _test_cpu_s[report.nodeid] += used_s
    _cpu_s[file] += used_s
    _wall_s[file] += report.duration
    _num_tests[file] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("CPU time by test")
    for test in sorted(_test_cpu_s, key=lambda test: -_test_cpu_s[test])[:NUM_SHOWN]:
        terminalreporter.write_line(f"{_test_cpu_s[test]:8.1f}  {test}")
    terminalreporter.section("CPU time by file")
    terminalreporter.write_line(f"{'CPU s':>8} {'s':>8} {'tests':>6}")
    for file in sorted(_cpu_s, key=lambda file: -_cpu_s[file])[:NUM_SHOWN]:
        terminalreporter.write_line(f"{_cpu_s[file]:8.1f} {_wall_s[file]:8.1f} {_num_tests[file]:6}  {file}")
    total = f"{sum(_cpu_s.values()):8.1f} {sum(_wall_s.values()):8.1f} {sum(_num_tests.values()):6}"
    terminalreporter.write_line(f"{total}  all {len(_cpu_s)} files")
