"""The memory of a server of an encoder does not grow with the number of texts.

tools/serving_bench/embedding_memory.py measures 100,000 texts of a real model.
"""

from contextlib import closing
from pathlib import Path

from tests.compiled import link_kernels
from tests.e2e.models.test_encoders import save_tiny
from tests.slices import ALL_CASES, part_of
from tools.benchmarks.served import Served
from tools.serving_bench.embedding_costs import Client
from tools.serving_bench.embedding_memory import WARM, after_fifths

NUM_TEXTS = part_of(100_000, 8_000)
MAX_GROWTH = 1.02 if ALL_CASES else 1.04


def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    model = save_tiny(tmp_path / "tiny", "bert")
    cache = f"cache_dir={link_kernels(tmp_path / 'cache')}"
    with Served(cache, options=["--model", str(model)]) as server, closing(Client(server)) as client:
        found = list(after_fifths(client, server.pids, NUM_TEXTS, 2))
    assert len(found) == 5 and all(each["gateway.0"].recording > 0 for each in found)
    ratios = {name: found[-1][name].own / warm.own for name, warm in found[WARM].items()}
    assert max(ratios.values()) <= MAX_GROWTH, ratios
