"""Compares a server whose executor Ray has started with one whose executor is a local process, in alternating rounds.

    python -m tools.serving_bench.launchers                               a Ray of its own
    python -m tools.serving_bench.launchers --set ray.address=auto --concurrency 1,8,32 --rounds 7
    python -m tools.serving_bench.launchers --without-ray                 only what encrypted tcp costs

Both servers run at the same time, and only one of them is loaded. The ratio is the median of the rounds': below 1, the
launcher costs throughput.
"""

import argparse
import json
import subprocess
import sys
from statistics import median

from tools.benchmarks.served import ROOT, Served, exit_code


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
    with Served(*args.set) as local, Served("execute.launcher=ray", *args.set, module=module) as remote:
        for concurrency in args.concurrency:
            ratios = []
            for number in range(args.rounds + 1):
                rates = [tokens_per_s(url, concurrency, args.seconds) for url in (local.url, remote.url)]
                if number:  # the first round warms up
                    ratios.append(rates[1] / rates[0])
                    print(f"c={concurrency}: process {rates[0]:,.0f}, ray {rates[1]:,.0f} tok/s", flush=True)
            print(f"c={concurrency}: {median(ratios):.3f} of process ({min(ratios):.3f} to {max(ratios):.3f})")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code("launchers", main))
