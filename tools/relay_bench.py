"""Compares streams through the ingress with streams directly from the server, in alternating rounds.

    python -m tools.relay_bench                              an instant executor, 16 streams
    python -m tools.relay_bench --concurrency 1,16,64 --rounds 7 --set model=…

It starts one server (`pipeline serve --instant`) and one ingress (`pipeline deploy --servers`), and loads both with
`pipeline bench`. The ratio is the median of the rounds': below 1, the ingress costs throughput.
"""

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = [sys.executable, "-m", "pipeline"]
START_S, STOP_S = 180.0, 60.0


@contextlib.contextmanager
def running(command: list[str], ready: str) -> Iterator[str]:
    """A process that prints its URL behind `ready`. Yields the URL."""
    process = subprocess.Popen([*PIPELINE, *command], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if ready in line:
                yield line.split(ready, 1)[1].split()[0].strip('"')
                return
        raise SystemExit("the process ended:\n" + "".join(seen))
    finally:
        process.terminate()
        process.communicate(timeout=STOP_S)


def tokens_per_s(url: str, concurrency: int, seconds: float) -> float:
    """Output tokens per second of one round."""
    command = ["bench", "--url", url, "--concurrency", str(concurrency), "--temperature", "0", "--json", "-"]
    command += ["--duration", f"{seconds:g}s"]
    done = subprocess.run([*PIPELINE, *command], capture_output=True, text=True, cwd=ROOT, check=True)
    return rate_of(json.loads(done.stdout))


def rate_of(result: Any) -> float:
    (level,) = result["levels"]
    return float(level["output_tokens_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: [int(one) for one in text.split(",")], default=[16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of the server")
    args = parser.parse_args()
    sets = [word for one in ["gateway.port=0", *args.set] for word in ("--set", one)]
    with running(["serve", "--instant", *sets], "ready on ") as direct:
        relay = ["deploy", "--port", "0", "--servers", direct]
        with running(relay, "relaying on ") as relayed:
            for concurrency in args.concurrency:
                ratios = []
                for number in range(args.rounds + 1):
                    rates = [tokens_per_s(url, concurrency, args.seconds) for url in (direct, relayed)]
                    if number:  # the first round warms up
                        ratios.append(rates[1] / rates[0])
                        print(f"c={concurrency}: direct {rates[0]:,.0f}, relayed {rates[1]:,.0f} tok/s", flush=True)
                print(f"c={concurrency}: {median(ratios):.2f} of direct ({min(ratios):.2f} to {max(ratios):.2f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
