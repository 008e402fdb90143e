"""tools/compare_peers with stand-ins for the other servers."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import pytest

from pipeline.errors import UserError
from tests.stages.prepare import checkpoints
from tests.tools import fake_peer
from tools.compare_peers import children, parent
from tools.compare_peers.options import parse
from tools.compare_peers.peers import DEFAULT

ROOT = Path(__file__).resolve().parents[3]
PATIENCE_S = 60.0
FAST = ("--duration", "200ms", "--concurrency", "1,3", "--seed", "5")


class PeerFolder:
    """A folder with two stand-ins, a tiny model, and the output."""

    def __init__(self, folder: Path, gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys
        self.out = folder / "out"
        self.model = gguf
        self.llama = folder / "llama.json"
        self.vllm = folder / "vllm.json"
        self.programs("serves", "serves")

    def programs(self, llama: str, vllm: str) -> None:
        """Write the stand-ins with these modes."""
        fake_peer.write_program(self.folder / "llama-server", self.llama, llama, "fake llama 1")
        fake_peer.write_program(self.folder / "vllm-python", self.vllm, vllm, "vllm 9.9+cpu")

    def arguments(self, *options: str) -> list[str]:
        return [
            *("--llama-server", str(self.folder / "llama-server"), "--vllm-python", str(self.folder / "vllm-python")),
            *("--model", str(self.model), "--out", str(self.out), "--servers", "llama.cpp,vllm", *FAST, *options),
        ]

    def command(self, *options: str) -> list[str]:
        return [sys.executable, str(ROOT / "tools" / "compare_peers"), *self.arguments(*options)]

    def run(self, *options: str) -> "subprocess.CompletedProcess[str]":
        """Run it in this process, which has imported torch already."""
        self._capsys.readouterr()
        code = parent.main(self.arguments(*options))
        return subprocess.CompletedProcess(options, code, *self._capsys.readouterr())

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "results.json").read_bytes())
        return found


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_gguf(tmp_path_factory.mktemp("gguf") / "Tiny-F32.gguf", checkpoints.tiny_llama())


@pytest.fixture
def bed(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> PeerFolder:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIPELINE_API_KEY", "secret")
    return PeerFolder(tmp_path, gguf, capsys)


def read(record: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(record.read_bytes())
    return found


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.02)


def assert_ended(record: Path) -> None:
    """The stand-in and its child are gone, and its port is free."""
    seen = read(record)
    assert not any(psutil.pid_exists(pid) for pid in seen["pids"])
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", seen["port"]))


# --------------------------------------------------------------------------------------------------- complete runs


def test_all_servers_are_measured_one_after_the_other_with_the_same_loads(bed: PeerFolder) -> None:
    engine = bed.folder / "llama-bench"
    engine.write_text(
        "#!/bin/sh\necho loading\n"
        'echo \'[\n{"n_prompt": 128, "n_gen": 0, "avg_ts": 432.1},{"n_prompt": 0, "n_gen": 128, "avg_ts": 98.7}\n]\'\n'
    )
    engine.chmod(0o755)
    done = subprocess.run(bed.command(), capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    found = bed.results()
    assert [one["avg_ts"] for one in found["runs"][0]["engine"]] == [432.1, 98.7]
    assert "llama-bench, prompt of 128: 432.1 tok/s" in done.stderr
    assert "llama-bench, 128 tokens out: 98.7 tok/s" in done.stderr
    assert found["runs"][0]["commands"][-1][:3] == [str(engine), "-m", str(bed.out / "model" / "model.gguf")]
    assert [run["server"] for run in found["runs"]] == ["llama.cpp", "vllm"]
    for run in found["runs"]:
        reports = run["reports"]
        levels = [(one["concurrency"], one["temperature"]) for one in reports["decode"]["levels"]]
        assert levels == [(1, 0.0), (1, 1.0), (3, 0.0), (3, 1.0)]
        assert [one["concurrency"] for one in reports["prefill"]["levels"]] == [1, 1]
        assert [one["concurrency"] for one in reports["shared"]["levels"]] == [16, 16]
        assert {one["workload"]["seed"] for one in reports.values()} == {5}
        assert reports["prefill"]["levels"][0]["prompt_tokens"] == 820
        # On a busy machine no request may end within one level's 200 ms.
        assert all(any(one["num_requests"] for one in report["levels"]) for report in reports.values())
        assert run["start_s"] > 0
        served, *benches = run["commands"][:4]
        assert served[served.index("--port") + 1] in benches[0][benches[0].index("--url") + 1]
        assert [command[4] for command in benches] == ["--decode", "--prefill", "--shared"]
    assert found["provenance"]["versions"] == {"llama.cpp": "fake llama 1", "vllm": "vllm 9.9+cpu"}
    assert found["provenance"]["machine"]["num_cores"] == len(os.sched_getaffinity(0))
    assert found["provenance"]["machine"]["flags"] and found["provenance"]["gguf"] == "Tiny-F32.gguf"
    assert found["failures"] == []

    llama, vllm = read(bed.llama), read(bed.vllm)
    assert Path(llama["argv"][llama["argv"].index("--model") + 1]).resolve() == bed.model
    folder = Path(vllm["argv"][vllm["argv"].index("serve") + 1])
    assert json.loads((folder / "config.json").read_bytes())["architectures"] == ["LlamaForCausalLM"]
    cores = sorted(os.sched_getaffinity(0))
    assert llama["argv"][llama["argv"].index("--threads") + 1] == str(len(cores))
    assert vllm["env"]["VLLM_CPU_OMP_THREADS_BIND"] == ",".join(map(str, cores))
    assert "PIPELINE_API_KEY" not in llama["env"]
    assert_ended(bed.llama)
    assert_ended(bed.vllm)

    root = ElementTree.fromstring((bed.out / "chart.svg").read_text(encoding="utf-8"))
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"llama.cpp F32", "vLLM bf16", "temperature 0", "temperature 1", "Output throughput"} < words
    assert "Prompts of 800 words, one token out (prompt tok/s)" in words
    assert "llama.cpp F32" in done.stdout and "prompt tok/s, 1, 0" in done.stdout
    assert (bed.out / "tables.md").read_text(encoding="utf-8").count("| output tok/s, 3, 1 |") == 1


def test_a_server_that_does_not_start_is_reported_and_the_others_are_measured(bed: PeerFolder) -> None:
    bed.programs("exits", "serves")
    done = bed.run("--loads", "prefill", "--temperature", "0")
    assert done.returncode == 1
    assert "llama.cpp F32: ended with code 7 before it was ready" in done.stderr
    assert "fake: out of luck" in done.stderr
    found = bed.results()
    assert [run["server"] for run in found["runs"]] == ["vllm"]
    assert [one["server"] for one in found["failures"]] == ["llama.cpp"]
    assert_ended(bed.vllm)


def test_failed_requests_are_an_error_exit(bed: PeerFolder) -> None:
    bed.programs("fails", "serves")
    done = bed.run("--servers", "llama.cpp", "--loads", "prefill", "--temperature", "0")
    assert done.returncode == 1
    assert "requests failed: {'503: busy': " in done.stderr
    assert_ended(bed.llama)


def test_an_interrupted_run_continues_with_resume(bed: PeerFolder) -> None:
    options = ("--loads", "prefill", "--temperature", "0.5")
    bed.programs("serves", "exits")
    assert bed.run(*options).returncode == 1
    first = bed.results()["runs"][0]
    bed.llama.unlink()
    bed.programs("serves", "serves")
    assert bed.run(*options, "--seed", "6", "--servers", "vllm", "--resume").returncode == 0
    found = bed.results()
    assert found["runs"][0] == first and [run["server"] for run in found["runs"]] == ["llama.cpp", "vllm"]
    assert {run["reports"]["prefill"]["workload"]["seed"] for run in found["runs"]} == {5}
    assert not bed.llama.exists(), "llama.cpp was measured again"
    assert [peer["name"] for peer in found["plan"]["peers"]] == ["llama.cpp", "vllm"]
    other = bed.run("--loads", "prefill", "--temperature", "0", "--resume")
    assert other.returncode == 2 and "measured with another temperatures" in other.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_an_interruption_ends_all_processes(bed: PeerFolder, number: signal.Signals, code: int) -> None:
    # Levels of ten minutes: the run can only end by the signal. A model for vLLM would take longest to write.
    command = bed.command("--duration", "10m", "--servers", "llama.cpp")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(bed.llama.exists, "the stand-in to serve")
        clients = lambda: [  # noqa: E731
            one for one in psutil.Process(process.pid).children(recursive=True) if "bench" in one.cmdline()
        ]
        wait_for(lambda: bool(clients()), "the client to start")
        client = clients()[0]
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == code, err
    assert_ended(bed.llama)
    assert not client.is_running() or client.status() == psutil.STATUS_ZOMBIE, "init has yet to collect it"


# ------------------------------------------------------------------------------------------------------- processes


def serve(bed: PeerFolder, mode: str, deadline_s: float) -> Any:
    program = fake_peer.write_program(bed.folder / "one", bed.llama, mode)
    return children.serving("one", [str(program), "--port", "{port}"], bed.folder / "log", deadline_s, print)


def test_a_server_that_ignores_sigterm_is_killed(bed: PeerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "STOP_S", 0.2)
    with serve(bed, "stays", PATIENCE_S) as server:
        assert read(bed.llama)["group"] == server.pid, "Ctrl-C would reach the server directly"
    assert_ended(bed.llama)


def test_a_server_is_ended_after_an_error(bed: PeerFolder) -> None:
    with pytest.raises(ZeroDivisionError), serve(bed, "serves", PATIENCE_S):
        raise ZeroDivisionError
    assert_ended(bed.llama)


def test_waits_have_deadlines_with_names(bed: PeerFolder) -> None:
    sleeping = [sys.executable, "-c", "import time; print('dozing', flush=True); time.sleep(1000)"]
    with pytest.raises(UserError, match=r"a nap: did not end within 0\.5 s.*\n.*dozing"):
        children.run("a nap", sleeping, bed.folder / "log", 0.5, print)
    with (
        pytest.raises(UserError, match=r"a server: was not ready within 0\.5 s"),
        children.serving("a server", sleeping, bed.folder / "log", 0.5, print),
    ):
        pass
    assert not [one for one in psutil.Process().children() if "time.sleep(1000)" in " ".join(one.cmdline())]


def test_a_failed_command_shows_the_end_of_its_output(bed: PeerFolder) -> None:
    failing = [sys.executable, "-c", "print('first'); print('\\n' * 40); print('the reason'); raise SystemExit(3)"]
    with pytest.raises(UserError, match="work: ended with code 3") as caught:
        children.run("work", failing, bed.folder / "log", PATIENCE_S, print)
    assert "the reason" in str(caught.value) and "first" not in str(caught.value)
    with pytest.raises(UserError, match="work: /no/such/program can't be run: No such file"):
        children.run("work", ["/no/such/program"], bed.folder / "log", PATIENCE_S, print)


def test_progress_is_printed_during_a_long_command(bed: PeerFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "TELL_EVERY_S", 0.0)
    lines: list[str] = []
    go = bed.folder / "go"

    def tell(line: str) -> None:
        lines.append(line)
        if "half" in line:
            go.touch()

    code = f"import os, time\nprint('half', flush=True)\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)"
    command = [sys.executable, "-c", code]
    children.run("work", command, bed.folder / "log", PATIENCE_S, tell, lambda line: f"at {line}")
    assert any(re.match(r"  work: at half, \d+ s of at most 60 s", line) for line in lines)


# --------------------------------------------------------------------------------------------------------- options


def test_a_dry_run_prints_the_commands_and_runs_none(bed: PeerFolder, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--servers", ",".join(DEFAULT), "--temperature", "0.7", "--duration", "3s", "--concurrency", "4"]
    options += ["--model", str(bed.model), "--out", str(bed.out), "--cache", str(bed.folder / "kept"), "--seed", "5"]
    assert parent.main([*options, "--vllm-python", str(bed.folder / "vllm-python"), "--dry-run"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert not bed.out.exists() and not bed.llama.exists()
    assert any(f"cmake --build {bed.folder}/kept/llama.cpp-0.3.36/build --parallel" in line for line in printed)
    assert not any(" -m pip " in line and "vllm" in line for line in printed), "an existing vLLM is used"
    benches = [line for line in printed if " bench --decode " in line]
    assert len(benches) == 5
    assert all("--concurrency 4 --temperature 0.7 --duration 3s" in line and "--seed 5" in line for line in benches)
    serves = [line for line in printed if " pipeline serve " in line]
    assert sum("execute.activations=int8" in line for line in serves) == 1
    assert sum("quantization=none" in line for line in serves) == 1
    assert all(f"--model {bed.model}" in line for line in serves) and len(serves) == 3


def test_prompts_arrive_beside_streams(bed: PeerFolder) -> None:
    options = ("--preset", "streams", "--servers", "llama.cpp", "--arrivals", "16@20,40@10", "--concurrency", "2")
    assert bed.run(*options).returncode == 0
    found = bed.results()
    (run,) = found["runs"]
    assert list(run["reports"]) == ["arrivals-16", "arrivals-40"]
    for report, (length, rate) in zip(run["reports"].values(), ((16, 20.0), (40, 10.0)), strict=True):
        (level,) = report["levels"]
        assert report["workload"]["prompt"] == {"count": length, "unit": "tokens"}
        assert report["workload"]["arrivals"]["request_rate"] == rate
        assert level["concurrency"] == 2 and level["stream_itl_ms"]["count"] > 0
    labels = [row["figure"] for row in found["figures"]]
    assert "prompts of 16: stream ITL p99" in labels and "prompts of 40: TTFT p50" in labels
    assert not (bed.out / "chart.svg").exists(), "only closed loops are drawn"


def test_llama_cpp_has_room_for_the_longest_prompt_that_arrives(
    bed: PeerFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for arrivals, num_tokens in (("128@2", 32 * 2048), ("2000@0.5", 32 * 2304)):
        arguments = bed.arguments("--preset", "streams", "--servers", "llama.cpp", "--arrivals", arrivals, "--dry-run")
        assert parent.main(arguments) == 0
        assert f"--ctx-size {num_tokens}" in capsys.readouterr().out


def test_options_count_before_those_of_a_preset() -> None:
    chosen = parse(["--rounds", "1", "--preset", "1.5b"])
    assert (chosen.rounds, chosen.concurrency, chosen.temperature) == (1, (1, 8), (0.0,))
    assert chosen.model.endswith("Qwen2.5-Coder-1.5B-Instruct-Q4_K_M.gguf") and "vllm" not in chosen.servers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--servers", "pipeline,nginx"], "--servers: unknown server 'nginx'; choose from pipeline, pipeline-int8"),
        (["--arrivals", "128"], "--arrivals: needs a length and a rate above 0 such as 128@2, got '128'"),
        (["--arrivals", "128@0"], "--arrivals: needs a length and a rate above 0 such as 128@2, got '128@0'"),
        (["--loads", "decode,rest"], "--loads: unknown load 'rest'; choose from decode, prefill, shared"),
        (["--duration", "soon"], "--duration: needs a time such as 20s or 2m, got 'soon'"),
        (["--temperature", "0,3"], "--temperature: needs a number from 0 to 2, got '3'"),
        (["--concurrency", "0"], "--concurrency: needs a whole number of at least 1, got '0'"),
        (["--rounds", "0"], "--rounds: needs a whole number of at least 1, got '0'"),
        (["--llama-server", "/no/such"], "--llama-server /no/such: is not a program that can be run"),
        (["--vllm-python", "/etc/passwd"], "--vllm-python /etc/passwd: is not a program that can be run"),
        (["--out", "/dev/null/x"], "--out /dev/null/x: can't be written: Not a directory"),
        (["--model", "/no/such.gguf"], "model '/no/such.gguf': no such folder or file"),
    ],
)
def test_invalid_options_are_errors(
    bed: PeerFolder, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: Any = parent.main(bed.arguments(*options))
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert words in capsys.readouterr().err
    assert not bed.llama.exists()


def test_a_model_without_a_gguf_file_is_an_error(bed: PeerFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert parent.main(bed.arguments("--model", str(bed.folder))) == 2
    assert "is neither a .gguf file nor a wheel that contains one" in capsys.readouterr().err


def test_missing_build_tools_are_an_error_before_anything_is_run(
    bed: PeerFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(bed.folder))
    (bed.folder / "make").touch(0o755)
    arguments = ["--servers", "llama.cpp", "--out", str(bed.out), "--cache", str(bed.folder / "kept")]
    assert parent.main(arguments) == 2
    assert "can't be built without cmake, g++: install them (apt install cmake make g++)" in capsys.readouterr().err
    assert not (bed.folder / "kept").exists()
