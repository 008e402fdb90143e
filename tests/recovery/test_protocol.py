"""Recovery as a whole: processes die at random moments, the numbers of gateways, ingests and detokenizers change, and
every client gets exactly what it must. In some runs, one, two or seven requests make schedule die again and
again: they alone fail, within the default limit of restarts. In some, schedule is replaced on purpose.

The supervisor's `Recovery` and `Scaling`, schedule, detokenize and the gateways' requests are the real ones. The
executor stores ids instead of keys and values, so a wrong block or row shows in the ids. Each run is determined by its
seed. More of them:

    PIPELINE_PROTOCOL_RUNS=5000 pytest tests/recovery/test_protocol.py
    PIPELINE_PROTOCOL_SEED=1234 PIPELINE_PROTOCOL_RUNS=1 pytest tests/recovery/test_protocol.py     # one of them again
"""

import os
from collections import Counter
from pathlib import Path

import pytest

from pipeline.text.vocabulary import Vocabulary
from tests.recovery.protocol import Server
from tests.stages.detokenize.vocabularies import byte_level

NUM_RUNS = int(os.environ.get("PIPELINE_PROTOCOL_RUNS", "60"))
FIRST_SEED = int(os.environ.get("PIPELINE_PROTOCOL_SEED", "0"))


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send all arrays through arenas, however small, and never give the core to other programs."""
    for module in ("pipeline.runtime.transport.arrays", "pipeline.shm.arena"):
        monkeypatch.setattr(f"{module}.INLINE_BYTES", 0)
    monkeypatch.setattr("os.sched_yield", lambda: None)


@pytest.mark.timeout(300 + NUM_RUNS)
def test_every_client_gets_exactly_what_it_must(tmp_path: Path) -> None:
    vocabulary = Vocabulary(byte_level())
    num_deaths: Counter[str] = Counter()
    num_scaled: Counter[str] = Counter()
    num_poison_deaths: Counter[str] = Counter()
    num_handed_over = 0
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_RUNS):
        server = Server(seed, vocabulary, tmp_path)
        try:
            server.run()
        except Exception as error:
            error.add_note(f"again: PIPELINE_PROTOCOL_SEED={seed} PIPELINE_PROTOCOL_RUNS=1 pytest {__file__}")
            raise
        num_deaths.update(server.num_deaths)
        num_scaled += server.num_scaled
        num_poison_deaths += server.num_poison_deaths
        num_handed_over += server.num_handed_over
    if NUM_RUNS >= 60:
        assert num_scaled["done"] > 0 and num_scaled["failed"] > 0
        assert min(num_poison_deaths[stage] for stage in ("schedule", "execute", "ingest", "detokenize")) > 0
        assert num_handed_over > 0
        assert min(num_deaths[stage] for stage in ("schedule", "execute", "detokenize", "ingest", "gateway")) > 0
