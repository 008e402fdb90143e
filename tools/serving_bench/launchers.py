"""Compares a server whose executor Ray has started with one whose executor is a local process, in alternating rounds.

    python -m tools.serving_bench.launchers                               a Ray of its own
    python -m tools.serving_bench.launchers --set ray.address=auto --concurrency 1,8,32 --rounds 7
    python -m tools.serving_bench.launchers --without-ray                 only what encrypted tcp costs

Both servers run at the same time, and only one of them is loaded. The ratio is the median of the rounds': below 1, the
launcher costs throughput.
"""

import argparse
import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
READY = "ready on "
STOP_S = 60.0


@contextlib.contextmanager
def server(module: str, sets: list[str]) -> Iterator[str]:
    """A server. Yields its URL."""
    words = [word for one in ["gateway.port=0", *sets] for word in ("--set", one)]
    process = subprocess.Popen(
        [sys.executable, "-m", module, "serve", *words], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if READY in line:
                threading.Thread(target=process.stderr.read, daemon=True).start()
                yield line.split(READY, 1)[1].split()[0]
                return
        raise SystemExit("the server ended:\n" + "".join(seen))
    finally:
        process.terminate()
        process.wait(STOP_S)


def tokens_per_s(url: str, concurrency: int, seconds: float) -> float:
    """Output tokens per second of one round."""
    command = ["-m", "pipeline", "bench", "--url", url, "--concurrency", str(concurrency), "--temperature", "0"]
    command += ["--duration", f"{seconds:g}s", "--json", "-"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, check=True)
    (level,) = json.loads(done.stdout)["levels"]
    return float(level["output_tokens_per_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=lambda text: [int(one) for one in text.split(",")], default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--without-ray", action="store_true", help="start the agent on this machine without Ray")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="settings of both servers")
    args = parser.parse_args()
    module = "tests.hosts.local_server" if args.without_ray else "pipeline"
    with server("pipeline", args.set) as local, server(module, ["execute.launcher=ray", *args.set]) as remote:
        for concurrency in args.concurrency:
            ratios = []
            for number in range(args.rounds + 1):
                rates = [tokens_per_s(url, concurrency, args.seconds) for url in (local, remote)]
                if number:  # the first round warms up
                    ratios.append(rates[1] / rates[0])
                    print(f"c={concurrency}: process {rates[0]:,.0f}, ray {rates[1]:,.0f} tok/s", flush=True)
            print(f"c={concurrency}: {median(ratios):.3f} of process ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
