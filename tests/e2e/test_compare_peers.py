"""tools/compare_peers with real servers of ours, and a stand-in for llama.cpp."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.tools import fake_peer

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 200.0

pytestmark = pytest.mark.usefixtures("smollm2_dir")


def test_our_own_servers_are_compared_with_a_peer(tmp_path: Path) -> None:
    program = fake_peer.write_program(tmp_path / "llama-server", tmp_path / "record.json")
    command = [sys.executable, "tools/compare_peers", "--servers", "pipeline,pipeline-int8,llama.cpp"]
    command += ["--llama-server", str(program), "--loads", "decode", "--concurrency", "2", "--temperature", "1"]
    command += ["--duration", "5s", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

    found = json.loads((tmp_path / "out" / "results.json").read_bytes())
    assert [run["server"] for run in found["runs"]] == ["pipeline", "pipeline-int8", "llama.cpp"]
    first = found["figures"][0]
    assert (first["unit"], first["concurrency"], first["temperature"]) == ("output tok/s", 2, 1.0)
    assert set(first["ratios"]) == {"pipeline", "pipeline-int8"} and min(first["ratios"].values()) > 0
    for run in found["runs"][:2]:
        report = run["reports"]["decode"]
        assert report["model"] == "model"
        assert 120 <= report["levels"][0]["prompt_tokens"] <= 136
    labels = [peer["label"] for peer in found["plan"]["peers"]]
    assert labels == ["Pipeline Q4_1", "Pipeline Q4_1, int8", "llama.cpp Q4_1"]
    chart = (tmp_path / "out" / "chart.svg").read_text(encoding="utf-8")
    assert all(label in chart for label in labels)
    log = (tmp_path / "out" / "logs" / "pipeline-int8-0.log").read_text(encoding="utf-8")
    assert "ready on http" in log
    url = log[log.index("ready on http") :].split()[2].strip('",')
    port = int(url.rpartition(":")[2])
    listening = {one.laddr.port for one in psutil.net_connections("tcp4") if one.status == psutil.CONN_LISTEN}
    assert port not in listening
