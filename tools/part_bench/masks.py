"""Measures what the grammar masks of a step take in the process that computes them: `python -m tools.part_bench.masks`.

All rows have a JSON schema, and each gets a random id of those that it may have next.
"""

import argparse
import json
import socket
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from pipeline.grammars.engine import Engine
from pipeline.runtime.process import heap
from pipeline.stages.execute.grammar_masks.memory import Begin, Fill, MaskMemory, Order
from pipeline.stages.execute.grammar_masks.worker import MaskWorker
from tools.benchmarks.structured import SCHEMAS

NUM_STEPS, WARM_STEPS = 150, 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the grammar masks of a step.")
    parser.add_argument("folder", type=Path, help="a prepared model, such as one in the server's cache_dir")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    engine = Engine(args.folder)
    memory = MaskMemory(args.rows, engine.vocab_size)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for name, schema in SCHEMAS.items():
            worker = MaskWorker(theirs, engine, memory, args.threads)
            heap.freeze()
            items = {"type": "array", "items": schema, "minItems": 40}
            ms = _times_ms(worker, memory, LLMatcher.grammar_from_json_schema(json.dumps(items)), args.rows)
            print(f"{name}, {args.rows} rows, {args.threads} threads: median {np.median(ms):.2f} ms", flush=True)
    memory.close()


def _times_ms(worker: MaskWorker, memory: MaskMemory, grammar: str, num_rows: int) -> list[float]:
    """The time of each step's order, without the first ones."""
    chance = np.random.default_rng(0)
    worker._do(Order([], [], 1, [Fill(row, row, b"", Begin(grammar, [], True)) for row in range(num_rows)]))
    times_ms = []
    for step in range(NUM_STEPS):
        bits = np.unpackbits(memory.words.view(np.uint8), axis=1, bitorder="little")
        ids = [chance.choice(np.flatnonzero(of_row)).astype(np.int32).tobytes() for of_row in bits[:num_rows]]
        began_s = time.perf_counter()
        worker._do(Order([], [], step + 2, [Fill(row, row, each, None) for row, each in enumerate(ids)]))
        times_ms.append(1000 * (time.perf_counter() - began_s))
    return times_ms[WARM_STEPS:]


if __name__ == "__main__":
    main()
