"""sentence-transformers or fastembed on one thread: embeds the texts again and again, and prints its CPU time as JSON.

Runs in the environment of engines.py: `python offline.py ENGINE MODEL TEXTS.json SECONDS BATCH`. With BATCH 1 the
engine gets one text at a time, else all.
"""

import importlib
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Embed = Callable[[Sequence[str]], Any]


def sentence_transformers(model: str, dtype: str, batch: int) -> Embed:
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(1)
    loaded = SentenceTransformer(model, device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    return lambda texts: loaded.encode(list(texts), batch_size=batch, show_progress_bar=False).tolist()


def fastembed(model: str, batch: int) -> Embed:
    loaded = importlib.import_module("fastembed_server").load(Path(model), 1)
    return lambda texts: [vector.tolist() for vector in loaded.embed(texts, batch_size=batch)]


def main() -> None:
    engine, model, file, seconds, size = sys.argv[1:]
    batch = int(size)
    texts = json.loads(Path(file).read_text("utf-8"))
    embed = fastembed(model, batch) if engine == "fastembed" else sentence_transformers(model, engine, batch)
    calls = [[text] for text in texts] if batch == 1 else [texts]
    vectors = embed(texts)
    rounds, begun_s, cpu_s = 0, time.monotonic(), cpu_time_s()
    while time.monotonic() - begun_s < float(seconds):
        for call in calls:
            embed(call)
        rounds += 1
    print(json.dumps({"cpu_s": (cpu_time_s() - cpu_s) / rounds, "vectors": vectors[:8]}))


def cpu_time_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
