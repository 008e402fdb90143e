"""tests/plugins/processes.py, the plugin that runs tests in several processes."""

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "pytest", "-p", "tests.plugins.processes", "-p", "no:cacheprovider"]
SHARED = """
import os, pathlib, pytest, signal, time

@pytest.fixture(scope="session", autouse=True)
def shared():
    with open("set-up", "a") as file:
        file.write(f"{os.getpid()}\\n")
    yield
    with open("torn-down", "a") as file:
        file.write(f"{os.getpid()}\\n")
"""
WAIT_S = 60.0


def start(
    folder: Path, num_processes: int, files: dict[str, str], *options: str, fds: Sequence[int] = ()
) -> "subprocess.Popen[str]":
    (folder / "conftest.py").write_text(SHARED)
    for name, text in files.items():
        (folder / name).write_text("import os, pathlib, pytest, signal, time\n" + text)
    return subprocess.Popen(
        [*COMMAND, "--processes", str(num_processes), "-c", "/dev/null", "--rootdir", str(folder), *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=fds,
    )


def run(folder: Path, num_processes: int, files: dict[str, str], *options: str) -> tuple[int, str]:
    """The exit code and the output."""
    with start(folder, num_processes, files, *options) as process:
        output, _ = process.communicate(timeout=WAIT_S)
    return process.returncode, output


def pids(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def until(condition: Callable[[], object], what: str) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"timed out waiting until {what}"
        time.sleep(0.01)


def test_the_next_group_is_notified_when_only_the_last_few_files_run(tmp_path: Path) -> None:
    text = """
def test_it():
    name = __name__.rpartition(".")[2]
    pathlib.Path(name + "-runs").touch()
    end_s = time.monotonic() + 60
    while not os.path.exists(name + "-may-end"):
        assert time.monotonic() < end_s
        time.sleep(0.01)
    pathlib.Path(name + "-may-end").unlink()
"""
    names = ["test_a", "test_b", "test_c"]
    reads, writes = os.pipe()
    try:
        files = {f"{name}.py": text for name in names}
        with start(tmp_path, 3, files, "--tell-fd", str(writes), fds=[writes]) as process:
            until(lambda: all((tmp_path / f"{name}-runs").exists() for name in names), "all run")
            assert select.select([reads], [], [], 0)[0] == []
            (tmp_path / "test_c-may-end").touch()
            assert select.select([reads], [], [], WAIT_S)[0] == [reads]
            for name in names[:2]:
                (tmp_path / f"{name}-may-end").touch()
            output, _ = process.communicate(timeout=WAIT_S)
        assert process.returncode == 0, output
    finally:
        os.close(reads)
        os.close(writes)


def test_each_test_runs_once_and_each_process_has_its_own_shared_fixtures(tmp_path: Path) -> None:
    # No file ends before both have begun, so two processes run them.
    text = """
@pytest.mark.parametrize("n", range(5))
def test(n, tmp_path):
    with open("ran", "a") as file:
        file.write(f"{__name__}-{n}\\n")
    end_s = time.monotonic() + 60
    while len(open("set-up").readlines()) < 2:
        assert time.monotonic() < end_s
        time.sleep(0.01)
"""
    code, output = run(tmp_path, 2, {"test_a.py": text, "test_b.py": text})
    assert code == 0, output
    assert "10 passed" in output
    ran = pids(tmp_path / "ran")
    assert sorted(ran) == [f"test_{file}-{n}" for file in "ab" for n in range(5)]
    assert [one for one in ran if "a" in one] == [f"test_a-{n}" for n in range(5)], "not in their order"
    set_up = pids(tmp_path / "set-up")
    assert len({*set_up}) == len(set_up) == 2
    assert sorted(set_up) == sorted(pids(tmp_path / "torn-down"))


def test_a_failure_is_shown_with_what_its_test_has_printed(tmp_path: Path) -> None:
    text = """
def test_good():
    print("of the good one")
def test_bad():
    os.write(1, b"of the bad one")
    assert 1 + 1 == 3
"""
    code, output = run(tmp_path, 2, {"test_a.py": text, "test_b.py": text})
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 2 passed" in output
    assert output.count("E       assert (1 + 1) == 3") == 2
    assert output.count("of the bad one\n") == 2
    assert "of the good one" not in output


def test_a_process_that_dies_fails_its_test_and_another_runs_the_rest(tmp_path: Path) -> None:
    text = """
def test_first(): pass
def test_killed(): os.kill(os.getpid(), signal.SIGKILL)
def test_second(): pass
def test_exits(): os._exit(3)
def test_last(): pass
"""
    code, output = run(tmp_path, 2, {"test_a.py": text})
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 3 passed" in output
    assert re.search(r"test_killed _+\nprocess \d+ died in this test: killed by SIGKILL", output)
    assert re.search(r"test_exits _+\nprocess \d+ died in this test: exit code 3", output)
    assert len(pids(tmp_path / "set-up")) == 3


@pytest.mark.parametrize("how", ["raise ValueError('no teardown')", "os._exit(4)"])
def test_a_teardown_of_what_tests_share_that_fails_is_reported(tmp_path: Path, how: str) -> None:
    text = f"""
@pytest.fixture(scope="session")
def bad():
    yield
    {how}
def test(bad): pass
"""
    code, output = run(tmp_path, 2, {"test_a.py": text})
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "no teardown" in output or "died while it tore down what its tests share: exit code 4" in output


def test_the_first_failure_ends_all_with_x(tmp_path: Path) -> None:
    waits = """
def test_waits():
    pathlib.Path("waits").touch()
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s: time.sleep(0.01)
    pathlib.Path("waited").touch()
"""
    fails = """
def test_fails():
    end_s = time.monotonic() + 60
    while not pathlib.Path("waits").exists():
        assert time.monotonic() < end_s
        time.sleep(0.01)
    assert False
"""
    code, output = run(tmp_path, 2, {"test_a.py": waits, "test_b.py": fails}, "-x")
    assert code == pytest.ExitCode.TESTS_FAILED
    assert "1 failed" in output
    assert not (tmp_path / "waited").exists()
    assert sorted(pids(tmp_path / "set-up")) == sorted(pids(tmp_path / "torn-down"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_tear_down_and_end_when_the_first_is_interrupted_or_killed(tmp_path: Path, number: int) -> None:
    text = """
def test_runs():
    parent, end_s = os.getppid(), time.monotonic() + 60
    pathlib.Path("runs").touch()  # the parent may be killed from here on
    while os.getppid() == parent:
        assert time.monotonic() < end_s
        time.sleep(0.01)
def test_not_run():
    pathlib.Path("not-to-run").touch()
"""
    with start(tmp_path, 1, {"test_a.py": text}) as process:
        until(lambda: (tmp_path / "runs").exists(), "the test runs")
        process.send_signal(number)
        output, _ = process.communicate(timeout=WAIT_S)  # all processes have closed it
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if number == signal.SIGINT else -number), output
    assert pids(tmp_path / "torn-down") == pids(tmp_path / "set-up") != []
    assert not (tmp_path / "not-to-run").exists()


def test_a_process_that_hangs_is_killed_and_its_stacks_are_shown(tmp_path: Path) -> None:
    files = {
        "test_one.py": """
def test_first(): pass
def test_hangs():
    while True:
        try:
            time.sleep(1000)
        except BaseException:  # as a loop of asyncio does with what a signal's handler raises in a callback
            pass
def test_last(): pass
""",
        "test_other.py": """
@pytest.mark.timeout(1)
def test_long(): time.sleep(1.5)
""",
    }
    code, output = run(tmp_path, 2, files, "--hang-s", "1")
    assert code == 1
    assert "1 failed, 3 passed" in output
    assert "FAILED test_one.py::test_hangs" in output
    assert "it hung, and was killed by SIGUSR1; its threads were at" in output
    assert re.search(r'test_one\.py", line \d+ in test_hangs', output)


def test_what_tests_share_that_hangs_while_it_is_torn_down_is_reported(tmp_path: Path) -> None:
    shared = """
@pytest.fixture(scope="session")
def bad():
    yield
    time.sleep(1000)
def test(bad): pass
"""
    code, output = run(tmp_path, 1, {"test_one.py": shared}, "--hang-s", "1")
    assert code == 1
    assert "died while it tore down what its tests share: it hung" in output
    assert re.search(r'test_one\.py", line \d+ in bad', output)
