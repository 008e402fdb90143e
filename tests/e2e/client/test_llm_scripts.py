"""Scripts with an `LLM`: none leaves a process, however it ends, and an interrupt aborts its requests."""

import signal
from pathlib import Path

import psutil

from tests.e2e.client.scripts import Script, alive
from tests.e2e.conftest import tiny
from tests.e2e.embedded import family_of

START = """
from pipeline import LLM, SamplingParams
llm = LLM(**{settings!r})
print("pid", llm.server.pid)
"""


def script(tmp_path: Path, tiny_model: Path, rest: str) -> Script:
    return Script(tmp_path, START.format(settings=tiny(tiny_model) | {"model": str(tiny_model)}) + rest)


def test_a_script_needs_no_main_guard_and_no_close(tmp_path: Path, tiny_model: Path) -> None:
    with script(tmp_path, tiny_model, 'print("text", len(llm.generate(["a", "b"])))\ninput("x") if 0 else None') as one:
        family = one.family() if one.wait_for("pid") else []
        assert one.wait_for("text") == "2"
        assert one.end() == 0
        assert one.errors == "", "no progress bar without a terminal, and no warnings"
        assert not alive(family)


def test_kill_9_leaves_no_process_even_if_a_fork_survives(tmp_path: Path, tiny_model: Path) -> None:
    rest = """
import os, signal
fork = os.fork()
if fork == 0:
    try:
        llm.generate("Hello")
    except Exception as error:
        print("fork", error)
    llm.close()
    signal.pause()
print("text", len(llm.generate(["a"])))
print("forked", fork)
llm.generate(["Once upon a time"] * 100, SamplingParams(max_tokens=200, ignore_eos=True))
signal.pause()
"""
    with script(tmp_path, tiny_model, rest) as one:
        fork = psutil.Process(int(one.wait_for("forked")))
        try:
            assert "after a fork" in one.wait_for("fork ")
            _, *descendants = family_of(one.process.pid, 8)
            family = [process for process in descendants if process != fork]
            assert one.wait_for("text") == "1", "the fork's close does not close the parent's LLM"
            one.process.kill()
            assert not alive(family)
            assert fork.is_running()
        finally:
            fork.kill()


def test_an_interrupt_aborts_open_requests_and_the_llm_stays_usable(tmp_path: Path, tiny_model: Path) -> None:
    rest = """
import json, re, threading, time, urllib.request
while not (match := re.search(r"ready on (http://\\S+)", llm.server.log())):
    time.sleep(0.01)
url = match[1]
def load():
    return json.load(urllib.request.urlopen(url + "/health", timeout=10))
def watch():
    while not load()["running"]:
        time.sleep(0.01)
    print("running")
threading.Thread(target=watch).start()
try:
    llm.generate(["Once upon a time"] * 5000, SamplingParams(max_tokens=200, ignore_eos=True))
except KeyboardInterrupt:
    print("interrupted")
end = time.monotonic() + 20
while load()["open_requests"] and time.monotonic() < end:
    time.sleep(0.02)
print("open", load()["open_requests"])
print("text", len(llm.generate(["a", "b"])))
"""
    with script(tmp_path, tiny_model, rest) as one:
        one.wait_for("running")
        one.process.send_signal(signal.SIGINT)
        one.wait_for("interrupted", 10)
        assert one.wait_for("open") == "0"
        assert one.wait_for("text") == "2"
        assert one.end() == 0
        assert one.errors == ""


def test_an_interrupt_during_startup_leaves_no_process(tmp_path: Path, tiny_model: Path) -> None:
    rest = f"""
import subprocess
real = subprocess.Popen
def reporting_popen(*args, **kwargs):
    process = real(*args, **kwargs)
    print("started", process.pid)
    return process
subprocess.Popen = reporting_popen
from pipeline import LLM
LLM({str(tiny_model)!r})
print("served")
"""
    with Script(tmp_path, rest) as one:
        first = psutil.Process(int(one.wait_for("started")))
        one.process.send_signal(signal.SIGINT)
        assert one.end(20) != 0
        assert "KeyboardInterrupt" in one.errors
        assert "served" not in one.lines
        assert not alive([first])
