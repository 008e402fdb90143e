"""A running server, observed from outside: timings, traces and recorded traffic."""

import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.replay.traffic import read_trace
from pipeline.runtime import messages as m
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.observed import Metrics, gained, pipeline, post, until_traced
from tests.e2e.server import STAGES, Server
from tests.runtime.test_tracing import check
from tests.stages.gateway.peers import until

# ---------------------------------------------------------------------------------------------------------- timings


def test_timings_add_up_to_the_client_s_time(server: Server) -> None:
    server.until_idle()
    before = Metrics(server)
    started = time.monotonic()
    reply = post(server, max_tokens=20, timings=True)
    took_ms = 1000 * (time.monotonic() - started)
    timings = reply["timings"]
    [choice] = timings["choices"]
    ms = {name: hop["ms"] for name, hop in choice["hops"].items()}
    assert sum(ms.values()) == pytest.approx(timings["total_ms"], abs=0.1)
    assert timings["total_ms"] < took_ms
    server.until_idle()
    computing_ms = 1000 * gained(server, before, "pipeline_execute_step_seconds_total")
    assert 0 < computing_ms < timings["total_ms"], "its steps were computed in that time"
    assert all(value >= 0 for value in ms.values())
    assert ms["decode"] == max(ms.values()), "20 decode steps take the longest"
    before_first = sum(ms[hop] for hop in ("gateway", "tokenize", "admit", "queue", "prefill"))
    assert before_first <= timings["time_to_first_token_ms"] <= before_first + 500
    assert abs(timings["received"] - time.time()) < 60


# ----------------------------------------------------------------------------------------------------------- traces


def test_two_concurrent_requests_have_two_traces_through_all_stages(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    command = [sys.executable, "-m", "pipeline", "trace", "--seconds", "60", "--out", str(out)]
    command += ["--pid", str(server.process.pid)]
    tracing = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with ThreadPoolExecutor(2) as clients:
        until_traced(tracing)
        replies = list(clients.map(lambda word: post(server, prompt=word, max_tokens=12, timings=True), ("A", "B")))
    tracing.send_signal(signal.SIGINT)
    _, stderr = tracing.communicate(timeout=60)
    assert tracing.returncode == 0, stderr
    events = check(out.read_bytes())
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {f"{name}.0" for name in STAGES}
    assert {pid for pid, name in names.items()} == {server.stage(name).pid for name in STAGES}
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X" and e["name"] != "wake"}
    paths = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            paths[event["id"]].append((names[event["pid"]], slices[event["pid"], event["tid"], event["ts"]]))
    for reply in replies:
        path = paths[reply["timings"]["choices"][0]["request_id"]]
        assert path[:8] == [
            ("gateway.0", "submit"),
            ("ingest.0", "tokenize"),
            ("schedule.0", "admit"),
            ("schedule.0", "plan"),
            ("execute.0", "step"),
            ("schedule.0", "settle"),
            ("detokenize.0", "text"),
            ("gateway.0", "deltas"),
        ]
        assert path[-4:] == [
            ("schedule.0", "settle"),
            ("detokenize.0", "text"),
            ("gateway.0", "deltas"),
            ("gateway.0", "write"),
        ]
    steps = [e["args"] for e in events if e["name"] == "step"]
    assert len(steps) >= 12
    assert sum(step["sampled"] for step in steps) == 24
    running = [e["args"]["running"] for e in events if e["ph"] == "C" and e["name"] == "sequences"]
    assert max(running) >= 1
    assert json.loads(out.read_bytes())["otherData"]["lost"] == {f"{name}.0": 0 for name in STAGES}


def test_a_finished_request_can_be_traced(server: Server, tmp_path: Path) -> None:
    reply = post(server, max_tokens=4, n=2)
    server.until_idle()
    out = tmp_path / "one.json"
    words = ("--request", reply["id"], "--out", str(out), "--pid", str(server.process.pid))
    assert pipeline("trace", *words).returncode == 0
    events = check(out.read_bytes())
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == set(STAGES)
    assert len([e for e in events if e["name"] == "decode"]) == 2
    unknown = pipeline("trace", "--request", "cmpl-0", "--out", str(out), "--pid", str(server.process.pid))
    assert unknown.returncode == 1
    assert "no gateway knows 'cmpl-0'" in unknown.stderr


def test_an_unwritable_trace_file_is_reported_before_the_trace(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "no" / "trace.json"
    words = ("trace", "--seconds", "120", "--out", str(out), "--pid", str(server.process.pid))
    result = pipeline(*words, timeout_s=60)
    assert result.returncode == 2
    assert f"--out {out}: " in result.stderr and "can't be written" in result.stderr


# ---------------------------------------------------------------------------------------------------------- traffic


def test_traffic_is_recorded_without_text(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "traffic.jsonl"
    command = [sys.executable, "-m", "pipeline", "record", "traffic", "--out", str(out)]
    command += ["--block-tokens", "16", "--pid", str(server.process.pid)]
    recording = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(out.exists, "the recording begins")  # the file is opened when schedule has begun
    prompt = "The quick brown zebra. " * 20
    usages = [post(server, prompt=prompt, max_tokens=length)["usage"] for length in (5, 9)]
    server.until_idle()
    recording.send_signal(signal.SIGINT)
    stdout, stderr = recording.communicate(timeout=60)
    assert recording.returncode == 0, stderr
    assert "2 requests" in stdout
    assert out.stat().st_mode & 0o777 == 0o600
    assert "zebra" not in out.read_text()
    first, second = read_trace(out)
    assert (first.input_length, first.output_length) == (usages[0]["prompt_tokens"], 5)
    assert second.output_length == 9 and second.timestamp > first.timestamp
    assert len(first.hash_ids) == first.input_length // 16 > 0 and second.hash_ids == first.hash_ids


def test_only_schedule_records_traffic(server: Server) -> None:
    (name,) = (one for one in find_servers() if one.startswith(f"{server.process.pid}-"))
    with Admin(name) as admin:
        answers = admin.send_command(m.RecordTraffic(0, bytes(32), 16, 5.0), ["gateway"])
        assert "schedule does" in answers["gateway.0"].error
        answers = admin.send_command(m.RecordTraffic(0, b"short", 16, 5.0), ["schedule"])
        assert "a salt of 16 to 64 bytes" in answers["schedule.0"].error
