"""A running server's metrics and traces, and commands about it."""

import json
import subprocess
import sys
import urllib.request
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.server import Server

MODEL = "SmolLM2-135M-Instruct"


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


# ----------------------------------------------------------------------------------------------------------- traces


def until_traced(tracing: "subprocess.Popen[str]") -> None:
    """Wait until `pipeline trace` says that every stage records."""
    assert tracing.stderr is not None
    line = tracing.stderr.readline()
    assert "recording for" in line, line
