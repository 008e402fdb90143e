#!/usr/bin/env python3
"""Measures whether a server of an embedding model grows: the memory of each process after each fifth of the texts.

    tools/serving_bench/embedding_memory.py --model FOLDER
    tools/serving_bench/embedding_memory.py --model FOLDER --texts 100000 --check

Texts have 1 word to twice `--words`, requests 1 to 128 texts. Memory is what is resident, without the recording of the
last messages for the case of a crash: that one grows to `supervisor.crash_recording_bytes`, 16 MiB for each process,
then loses its older half. What all recordings have is printed in a column of its own.

--check: exit with 1 if a process has over 2 % more after all texts than after three fifths: until then, rings between
processes and what is kept of the last requests fill up.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools.benchmarks.served import Served, exit_code  # noqa: E402
from tools.serving_bench.embedding_costs import TEXT, Client  # noqa: E402

MAX_GROWTH = 1.02
INPUTS = (1, 2, 8, 64, 128)
FIFTHS = 5
WARM = 2
"""Growth counts from behind the third fifth."""
KIB = 1024
_SHARED = re.compile(r"/memfd:pipeline-\S+")
_RECORDING = re.compile(r"/memfd:pipeline-\S+-recording\b")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


class Memory(NamedTuple):
    """Bytes of a process that are resident."""

    own: int
    shared: int
    """Segments that stages share, of fixed sizes: rings of messages (1 MiB each), arrays"""
    recording: int

    @property
    def bounded(self) -> int:
        """All but the recording."""
        return self.own + self.shared


def memory_of(pid: int) -> Memory:
    """Raises FileNotFoundError if there is no such process."""
    found, kind = [0, 0, 0], 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            kind = 2 if _RECORDING.search(line) else 1 if _SHARED.search(line) else 0
        elif line.startswith("Rss:"):
            found[kind] += int(line.split()[1]) * KIB
    return Memory(*found)


def bodies(num_texts: int, num_words: int, seed: int = 0) -> Iterator[tuple[int, bytes]]:
    """Requests with their numbers of texts, about `num_texts` together."""
    chosen, words, sent = random.Random(seed), TEXT.split(), 0
    while sent < num_texts:
        num = chosen.choice(INPUTS)
        texts = [" ".join(chosen.choices(words, k=chosen.randint(1, 2 * num_words))) for _ in range(num)]
        body = {"input": texts, "encoding_format": chosen.choice(("float", "base64"))}
        yield num, json.dumps(body).encode()
        sent += num


def after_fifths(
    client: Client, pids: Mapping[str, int], num_texts: int, num_words: int
) -> Iterator[dict[str, Memory]]:
    """Send the texts; what each process has after each fifth of them."""
    sent, following = 0, 1
    for num, body in bodies(num_texts, num_words):
        client.send([body])
        sent += num
        if sent * FIFTHS >= following * num_texts:
            yield {name: memory_of(pid) for name, pid in pids.items()}
            following += 1


def growth(found: list[dict[str, Memory]]) -> dict[str, float]:
    """What each process has at the end, divided by what it had after three fifths."""
    return {name: found[-1][name].bounded / warm.bounded for name, warm in found[WARM].items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="an embedding model, as for serve")
    parser.add_argument("--texts", type=int, default=20_000, help="texts to embed (default: 20000)")
    parser.add_argument("--words", type=int, default=4, help="mean number of words (default: 4)")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("serve", nargs="*", help="further options of serve, behind --")
    args = parser.parse_args()
    found: list[dict[str, Memory]] = []
    with Served(options=["--model", args.model, *args.serve]) as server, closing(Client(server)) as client:
        pids = server.pids
        print(" ".join(f"{name:>12}" for name in ("texts", *pids, "recordings")))
        for memory in after_fifths(client, pids, args.texts, args.words):
            found.append(memory)
            mib = [one.bounded / KIB**2 for one in memory.values()]
            mib.append(sum(one.recording for one in memory.values()) / KIB**2)
            num = args.texts * len(found) // FIFTHS
            print(f"{num:12,} " + " ".join(f"{one:12.1f}" for one in mib), flush=True)
    ratios = growth(found)
    print(f"{'growth':>12} " + " ".join(f"{100 * one - 100:11.1f}%" for one in ratios.values()))
    return 0 if max(ratios.values()) <= MAX_GROWTH or not args.check else 1


if __name__ == "__main__":
    sys.exit(exit_code("embedding_memory", main))
