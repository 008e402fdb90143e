"""Valid and invalid requests that schemathesis makes from the OpenAPI description. The server never fails, every reply
matches the description, no process ends, and nothing is left behind.

    PIPELINE_ALL_CASES=1 pytest tests/e2e/http/attacks/test_fuzz.py      at least 1,000 requests instead of 50
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import Server

SEED = 20
NUM_EXAMPLES, MIN_CASES = (45, 1000) if os.environ.get("PIPELINE_ALL_CASES") else (2, 50)
"""Examples per round for each route with parameters; the number of resulting cases varies. The first round has three,
and is enough for 50."""
MAX_ROUNDS = 5
FUZZ_S = 600.0
"""The deadline of a round, which takes about 30 s on a machine with nothing else to do."""
pytestmark = pytest.mark.timeout(MAX_ROUNDS * FUZZ_S)
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "response_headers_conformance",
    "unsupported_method",
)
CONFIG = """
[checks]
# 504 is what a request is answered that gives itself no time.
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
MORE_BYTES = 96 * 1024**2
"""The limit of a process's growth, for its allocator and caches."""
MORE_FILES = 8

PROGRAM = "import sys, schemathesis.cli; sys.exit(schemathesis.cli.schemathesis())"


@pytest.fixture(scope="module")
def tiny_server(tiny_model: Path) -> Iterator[Server]:
    sets = ("execute.num_threads=1", "execute.kv_cache_bytes=16MiB", "max_model_len=64")
    with Server(f"model={tiny_model}", f"cache_dir={tiny_model.parent / 'cache'}", *sets) as server:
        yield server


def fuzz(server: Server, folder: Path, seed: int, num_examples: int) -> int:
    """Returns the number of cases. Fails with the findings."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [sys.executable, "-c", PROGRAM, "--config-file", str(config), "run", f"{server.url}/openapi.json"]
    command += ["--seed", str(seed), "--max-examples", str(num_examples), "--mode", "all", "--phases", "fuzzing"]
    # One thread: in Python 3.11, two concurrent parses of a source may fail, and the client parses its own source.
    command += ["--workers", "1", "--request-timeout", "30", "--checks", ",".join(CHECKS), "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FUZZ_S, cwd=folder)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    found = re.search(r"(\d[\d,]*) generated, (\d[\d,]*) passed", done.stdout)
    assert found and found[1] == found[2], done.stdout
    return int(found[1].replace(",", ""))


def test_generated_requests_get_the_described_replies(tiny_server: Server, tmp_path: Path) -> None:
    before = tiny_server.until_idle()
    num_cases = fuzz(tiny_server, tmp_path, seed=1, num_examples=3)  # which also warms up: nothing may grow after it
    tiny_server.until_idle()
    tiny_server.look()
    stages = {process.pid: process for process in tiny_server.seen.values() if process.is_running()}
    files = {pid: process.num_fds() for pid, process in stages.items()}
    memory = {pid: process.memory_info().rss for pid, process in stages.items()}

    seeds = iter(range(SEED, SEED + MAX_ROUNDS))
    while num_cases < MIN_CASES:
        num_cases += fuzz(tiny_server, tmp_path, next(seeds), NUM_EXAMPLES)

    after = tiny_server.until_idle()
    assert [(one["name"], one["pid"]) for one in after["stages"]] == [
        (one["name"], one["pid"]) for one in before["stages"]
    ]
    assert after["status"] == "ok"
    blocks = after["kv_blocks"]
    assert (blocks["held"], blocks["free"] + blocks["cached"]) == (0, blocks["total"])
    assert {pid: process.num_fds() - files[pid] for pid, process in stages.items() if process.is_running()} == {
        pid: pytest.approx(0, abs=MORE_FILES) for pid in files
    }
    grown = {process.name(): process.memory_info().rss - memory[pid] for pid, process in stages.items()}
    assert max(grown.values()) < MORE_BYTES, grown
    assert "Traceback" not in tiny_server.log()
