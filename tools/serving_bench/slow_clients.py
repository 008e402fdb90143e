#!/usr/bin/env python3
"""Measures what slow clients cost the others: streams from a gateway process with nothing behind it.

    tools/serving_bench/slow_clients.py                      1,000 streams; 0, 50 and 500 of them read a byte per second
    tools/serving_bench/slow_clients.py --streams 200 --slow 0,10 --steps 400

Reported for the fast clients: when the median and the last one had the whole response, and their events per second.
"""

import argparse
import logging
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from pipeline.http_server.sockets import descriptors  # noqa: E402
from tests.stages.gateway.crowd import open_gate, serve_crowd  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--slow", type=lambda text: [int(one) for one in text.split(",")], default=[0, 50, 500])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--chars", type=int, default=1000, help="characters of each event")
    args = parser.parse_args()
    descriptors.raise_limit(2 * args.streams, logging.getLogger(__name__))
    print(f"{args.streams} streams of {args.steps} events with {args.chars} characters")
    print("slow   median s   last s   events/s   gateway MB   still unread by")
    with tempfile.TemporaryDirectory() as folder, open_gate(Path(folder), max_open_sequences=args.streams) as gate:
        serve_crowd(gate, args.streams, 0, 5, args.chars)  # warm
        for num_slow in args.slow:
            result = serve_crowd(gate, args.streams, num_slow, args.steps, args.chars)
            last_s = result.fast_s[-1]
            rate = len(result.fast_s) * args.steps / last_s
            print(
                f"{num_slow:4} {statistics.median(result.fast_s):10.2f} {last_s:8.2f} {rate:10.0f} "
                f"{result.rss_bytes / 1e6:12.0f} {result.num_behind:17}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
