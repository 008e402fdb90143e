"""The server: three models, with room for one that is awake and two that sleep."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from pipeline.config.settings import Settings
from pipeline.runtime.model.vocabulary_size import VocabularySize
from pipeline.supervisor.models.memory import PROCESSES_BYTES, SLEEPING_BYTES, VocabularyBytes
from tools.benchmarks.served import Served

KV_BYTES = 512 << 20
WEIGHTS_BYTES = 160 << 20
"""More than the weights and the logits of each of the models; less than `KV_BYTES`, so that two never fit."""
VOCABULARY = VocabularySize("BPE", 50_000, 50_000)
"""The largest that there may be."""
ASK_S = 30.0
STAGES = ("ingest", "schedule", "execute", "detokenize")
"""Those that each model has for itself."""


def models_of(given: list[str], folder: Path) -> dict[str, str]:
    """The models by name: those of `NAME=MODEL`, or two tiny Llamas, which are written to the folder, and the default
    model."""
    if given:
        return dict(one.partition("=")[::2] for one in given)
    from tests.stages.prepare.checkpoints import save_folder, tiny_llama

    for index, name in enumerate(("one", "two")):
        save_folder(folder / name, tiny_llama(num_hidden_layers=2 + index, max_position_embeddings=4096))
    return {"one": str(folder / "one"), "two": str(folder / "two"), "real": Settings().model}


def memory_bytes(num_models: int) -> int:
    """Room for one model that is awake, and others that sleep."""
    vocabulary = VocabularyBytes.of(VOCABULARY)
    sleeping = SLEEPING_BYTES + vocabulary.text + vocabulary.grammar
    awake = PROCESSES_BYTES + vocabulary.text + 2 * vocabulary.grammar + KV_BYTES + WEIGHTS_BYTES
    return awake + (num_models - 1) * sleeping


def write_config(folder: Path, models: dict[str, str], quantum_s: float, num_threads: int) -> Path:
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    lines = [
        f"memory_bytes = {memory_bytes(len(models))}",
        f"swap_quantum_s = {quantum_s}",
        "[supervisor]",
        "max_restarts = 1000",
        "crash_reports = false",
        "[execute]",
        f"num_threads = {num_threads}",
        f"kv_cache_bytes = {KV_BYTES}",
        f'swap_dir = "{swap}"',
    ]
    for name, model in models.items():
        lines += [f"[models.{name}]", f"model = {json.dumps(model)}", "load_at_start = false"]
    path = folder / "models.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


class Asked:
    """What a server of several models says of itself."""

    def __init__(self, server: Served) -> None:
        self._server = server

    def statuses(self) -> dict[str, dict[str, Any]]:
        """The status of each model, as in /v1/models. Raises OSError."""
        with urllib.request.urlopen(f"{self._server.url}/v1/models", timeout=ASK_S) as response:
            return {one["id"]: one["status"] for one in json.loads(response.read())["data"]}

    def metric(self, name: str) -> dict[str, float]:
        """A metric's value by model. Raises OSError."""
        with urllib.request.urlopen(f"{self._server.url}/metrics", timeout=ASK_S) as response:
            return metric_of(response.read().decode(), name)

    def processes(self) -> list[psutil.Process]:
        """The supervisor, and all that it has started."""
        top = psutil.Process(self._server.pid)
        return [top, *top.children(recursive=True)]

    def stage(self, stage: str, model: str) -> psutil.Process | None:
        """The process of a model's stage, or None: an executor that sleeps has none."""
        title = f"pipeline: {stage}.0 {model}"
        return _first(self.processes(), lambda one: one.cmdline()[:1] == [title])


def metric_of(text: str, name: str) -> dict[str, float]:
    """The values of a metric by model, in the text of /metrics."""
    found = {}
    for line in text.splitlines():
        if line.startswith(f'{name}{{model_name="'):
            labels, _, value = line.rpartition(" ")
            found[labels.split('"')[1]] = float(value)
    return found


def _first(processes: list[psutil.Process], condition: Callable[[psutil.Process], bool]) -> psutil.Process | None:
    for one in processes:
        try:
            if condition(one):
                return one
        except psutil.NoSuchProcess:
            continue
    return None
