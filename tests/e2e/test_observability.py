"""A running server, observed from outside: metrics, timings, traces, ps, top and logs."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from pipeline.replay.traffic import read_trace
from pipeline.runtime import messages as m
from pipeline.supervisor.admin import admin_server
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.server import STAGES, Server
from tests.runtime.test_tracing import check
from tests.stages.gateway.peers import until

MODEL = "SmolLM2-135M-Instruct"
SEQUENCE_HISTOGRAMS = (
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:time_to_first_token_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
)


def post(server: Server, **body: Any) -> Any:
    """A whole completion of this many tokens."""
    body = {"model": MODEL, "prompt": "Once upon a time", "ignore_eos": True, "temperature": 0} | body
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


class Metrics:
    """One scrape. `self[name, label=value]` is a sample; labels may be omitted if the rest identify one sample."""

    def __init__(self, server: Server) -> None:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            text = response.read().decode()
        self._samples = [s for family in text_string_to_metric_families(text) for s in family.samples]

    def get(self, name: str, **labels: str) -> float:
        [found] = [s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items()]
        return float(found)


def gained(server: Server, before: Metrics, name: str, **labels: str) -> float:
    return Metrics(server).get(name, **labels) - before.get(name, **labels)


def pipeline(*words: str, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "pipeline", *words], capture_output=True, text=True, timeout=timeout_s)


# ---------------------------------------------------------------------------------------------------------- metrics


def test_counters_are_exact_for_requests_of_known_sizes(server: Server) -> None:
    server.until_idle()
    before = Metrics(server)
    replies = [post(server, prompt=f"{word} is a word of", max_tokens=7, n=2) for word in ("One", "Two", "Three")]
    assert "error" not in str(replies)
    num_prompt = 2 * sum(reply["usage"]["prompt_tokens"] for reply in replies)
    assert sum(reply["usage"]["completion_tokens"] for reply in replies) == 42
    server.until_idle()
    after = Metrics(server)

    def more(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    assert more("vllm:prompt_tokens_total") == num_prompt
    assert more("vllm:generation_tokens_total") == 42
    assert more("vllm:request_prompt_tokens_sum") == num_prompt
    assert more("vllm:request_generation_tokens_sum") == 42
    assert more("vllm:request_success_total", finished_reason="length") == 6
    assert more("vllm:request_success_total", finished_reason="abort") == 0
    for name in SEQUENCE_HISTOGRAMS:
        assert more(f"{name}_count") == 6, name
    assert more("vllm:inter_token_latency_seconds_count") == 36
    assert more("vllm:request_params_n_sum") == 6
    assert more("vllm:iteration_tokens_total_count") == more("pipeline_schedule_steps_total") >= 7
    assert more("vllm:iteration_tokens_total_sum") == num_prompt - more("vllm:prompt_tokens_cached_total") + 36
    assert more("pipeline_execute_tokens_total") == more("vllm:iteration_tokens_total_sum")
    assert more("pipeline_detokenize_tokens_total") == 42
    assert more("pipeline_ingest_accepted_total") == 3
    assert more("vllm:prefix_cache_queries_total") == num_prompt
    assert after.get("vllm:num_requests_running") == after.get("vllm:num_requests_waiting") == 0
    assert after.get("vllm:kv_cache_usage_perc") == 0
    # A sequence's time is the sum of its phases: queue, prefill and decode take no longer than the client's request.
    engine_s = sum(more(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < engine_s < more("vllm:e2e_request_latency_seconds_sum")
    assert more("vllm:request_inference_time_seconds_sum") == pytest.approx(
        more("vllm:request_prefill_time_seconds_sum") + more("vllm:request_decode_time_seconds_sum")
    )


def test_a_repeated_prompt_is_a_prefix_hit(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 8
    post(server, prompt=prompt, max_tokens=1)
    server.until_idle()
    before = Metrics(server)
    reply = post(server, prompt=prompt, max_tokens=1, timings=True)
    cached = reply["timings"]["choices"][0]["cached_tokens"]
    assert cached >= 64
    assert gained(server, before, "vllm:prefix_cache_hits_total") == cached
    assert gained(server, before, "vllm:prompt_tokens_by_source_total", source="local_compute") == (
        reply["usage"]["prompt_tokens"] - cached
    )


def test_metrics_add_up_after_aborts_and_rejections(server: Server) -> None:
    server.until_idle()
    before = Metrics(server)
    for _ in range(3):
        _leave_in_the_middle(server)
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(server, prompt="word " * 9000, max_tokens=5)
    with refused.value as response:
        assert response.code == 400
    post(server, max_tokens=3)
    server.until_idle()
    after = Metrics(server)

    def more(name: str, **labels: str) -> float:
        return after.get(name, **labels) - before.get(name, **labels)

    reasons = {r: more("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 0, "length": 1, "abort": 3, "error": 0}
    assert more("pipeline_sequences_rejected_total") == 1
    assert more("pipeline_sequences_opened_total") == 5
    assert more("vllm:e2e_request_latency_seconds_count") == 1
    assert more("vllm:request_decode_time_seconds_count") == 1
    assert after.get("pipeline_open_requests") == 0
    for stage in ("ingest.0", "schedule.0", "execute.0"):
        assert after.get("pipeline_stage_arena_used_bytes", stage=stage) == 0


def _leave_in_the_middle(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps({"model": MODEL, "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall((head + body).encode())
        data = b""
        while b'"text":' not in data:
            data += connection.recv(65536)


def test_metrics_show_every_stage_s_process(server: Server) -> None:
    metrics = Metrics(server)
    for name in STAGES:
        memory = metrics.get("pipeline_stage_resident_memory_bytes", stage=f"{name}.0")
        assert memory == pytest.approx(server.stage(name).memory_info().rss, rel=0.2)
        assert metrics.get("pipeline_stage_state", stage=f"{name}.0", state="ready") == 1
        assert metrics.get("pipeline_stage_restarts_total", stage=f"{name}.0") == 0
    assert metrics.get("pipeline_stage_cpu_seconds_total", stage="execute.0") > 0.5, "it has loaded a model"


def test_scraping_ten_times_a_second_costs_little(server: Server) -> None:
    gateway = server.stage("gateway")
    processes = [server.stage(name) for name in STAGES]
    Metrics(server)

    def cpu_s() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = cpu_s()
    for _ in range(30):
        Metrics(server)
    assert gateway.is_running()
    assert cpu_s() - before < 30 * 0.03, "a scrape takes more than 30 ms of CPU time, in all stages together"


def test_a_stage_that_hangs_is_late_and_keeps_its_last_counts(server: Server) -> None:
    post(server, max_tokens=2)
    server.until_idle()
    before = Metrics(server)
    process = server.stage("detokenize")
    process.send_signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        metrics = Metrics(server)
        assert time.monotonic() - started > 1.5, "the scrape did not wait for the stage"
        assert metrics.get("pipeline_stage_state", stage="detokenize.0", state="late") == 1
        assert metrics.get("pipeline_stage_state", stage="schedule.0", state="ready") == 1
        assert metrics.get("pipeline_stage_counts_age_seconds", stage="detokenize.0") > 1.5
        assert metrics.get("pipeline_detokenize_tokens_total") == before.get("pipeline_detokenize_tokens_total")
        assert metrics.get("pipeline_stage_resident_memory_bytes", stage="detokenize.0") > 0
        result = pipeline("ps")
        assert "late" in result.stdout
        server.wait_for_line(r"W supervisor\.0 detokenize\.0 is late silent_s=\d", 10)
    finally:
        process.send_signal(signal.SIGCONT)
    server.until(lambda health: health["status"] == "ok")
    server.wait_for_line(r"I supervisor\.0 detokenize\.0 is back silent_s=\d", 10)
    assert Metrics(server).get("pipeline_stage_state", stage="detokenize.0", state="ready") == 1


def test_top_shows_a_hanging_stage_as_late_despite_a_long_health_timeout() -> None:
    with Server("supervisor.health_timeout_s=60") as server:
        process = server.stage("detokenize")
        process.send_signal(signal.SIGSTOP)
        try:
            result = pipeline("top", "--once", "--interval", "0.1", "--pid", str(server.process.pid))
        finally:
            process.send_signal(signal.SIGCONT)
        assert (result.returncode, result.stderr) == (0, "")
        assert re.search(r"detokenize\.0 .*late", result.stdout)


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


def until_traced(tracing: "subprocess.Popen[str]") -> None:
    """Wait until `pipeline trace` says that every stage records."""
    assert tracing.stderr is not None
    line = tracing.stderr.readline()
    assert "recording for" in line, line


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


# -------------------------------------------------------------------------------------------------------- ps and top


def test_ps_lists_the_server_and_its_stages(server: Server) -> None:
    shown = json.loads(pipeline("ps", "--json").stdout)
    [ours] = [one for one in shown if one["pid"] == server.process.pid]
    assert (ours["model"], ours["address"], ours["state"]) == (MODEL, server.url, "serving")
    pids = {stage["name"]: stage["pid"] for stage in ours["stages"]}
    assert pids == {"supervisor.0": server.process.pid} | {f"{name}.0": server.stage(name).pid for name in STAGES}
    text = pipeline("ps").stdout
    for words in (MODEL, server.url, "execute.0", str(server.stage("execute").pid)):
        assert words in text


def test_top_prints_once_without_a_terminal(server: Server) -> None:
    result = pipeline("top", "--pid", str(server.process.pid), "--interval", "0.2")
    assert result.returncode == 0, result.stderr
    assert "tokens out/s" in result.stdout
    assert "\x1b" not in result.stdout
    view = json.loads(pipeline("top", "--pid", str(server.process.pid), "--json", "--interval", "0.2").stdout)
    assert view["kv_blocks_total"] > 0
    assert view["output_tokens_per_s"] == 0


def test_top_ends_with_q_and_restores_the_terminal(server: Server) -> None:
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    words = [sys.executable, "-m", "pipeline", "top", "--pid", str(server.process.pid), "--interval", "0.2"]
    top = subprocess.Popen(words, stdin=follower, stdout=follower, stderr=follower, env=os.environ | {"TERM": "xterm"})
    shown, end = b"", time.monotonic() + 30
    while b"detokenize.0" not in shown:
        assert select.select([leader], [], [], max(0.0, end - time.monotonic()))[0], f"top shows only {shown!r}"
        shown += os.read(leader, 65536)
    os.write(leader, b"h")
    while b"plan wait    share" not in shown:
        assert select.select([leader], [], [], max(0.0, end - time.monotonic()))[0], f"top shows only {shown!r}"
        shown += os.read(leader, 65536)
    assert b"q quits, h explains" in shown
    os.write(leader, b"xq")
    drain = threading.Thread(target=_drain, args=(leader,), daemon=True)
    drain.start()
    assert top.wait(10) == 0
    assert termios.tcgetattr(follower) == before
    os.close(follower)
    drain.join(5)
    os.close(leader)


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 65536):
            pass
    except OSError:
        return  # the other end is closed


def test_a_pid_of_no_server_is_an_error() -> None:
    for command in ("top", "trace"):
        result = pipeline(command, "--pid", "1")
        assert result.returncode == 1
        assert "no server has pid 1" in result.stderr


def test_garbage_on_the_admin_socket_harms_no_other_client(server: Server) -> None:
    name = next(name for name in find_servers() if name.startswith(f"{server.process.pid}-"))
    context: Any = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(admin_server.address_of(name))
    try:
        for data in (b"", b"\xc1" * 1000, b"\x91" * 60_000, os.urandom(5000)):
            peer.send(data)
            assert peer.poll(10_000), "garbage is answered"
            peer.recv()
        peer.send(b"x" * (admin_server.MAX_QUESTION_BYTES + 1))
    finally:
        peer.close(linger=0)
        context.term()
    assert server.health()["status"] == "ok"
    with Admin(name) as client:
        assert client.stats().pid == server.process.pid


# ------------------------------------------------------------------------------------------------------------- logs


def test_json_logs_parse_and_have_the_request_id() -> None:
    with Server("log_format=json", "log_level=debug") as server:
        reply = post(server, max_tokens=3, timings=True)
        server.until_idle()
        assert server.stop() == 0
        lines = [json.loads(line) for line in server.lines if line != "<end of log>"]
    assert {"ts", "level", "stage", "pid", "message"} <= set.intersection(*(set(line) for line in lines))
    request_id = reply["timings"]["choices"][0]["request_id"]
    logged = [(line["stage"], line["message"]) for line in lines if line.get("request") == request_id]
    assert set(logged) == {
        ("gateway.0", "opened"),
        ("ingest.0", "tokenized"),
        ("schedule.0", "queued"),
        ("detokenize.0", "ended"),
        ("gateway.0", "finished"),
    }
    assert [line["response_id"] for line in lines if line["message"] == "opened"] == [reply["id"]]
