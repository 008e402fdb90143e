"""A running server, observed from outside: metrics, ps, top and logs."""

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
from typing import Any

import pytest
import zmq

from pipeline.supervisor.admin import admin_server
from pipeline.supervisor.admin.admin_client import Admin, find_servers
from tests.e2e.observed import MODEL, Metrics, gained, pipeline, post
from tests.e2e.server import STAGES, Server

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
