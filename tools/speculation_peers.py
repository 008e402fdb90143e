"""Measure llama.cpp's speculative decoding on the prompts of tools/speculation_benchmarks.py.

    tools/speculation_peers.py --server BUILD/bin/llama-server --model FILE.gguf --task extract
    tools/speculation_peers.py --server … --model FILE.gguf --task code --draft SMALL.gguf

Starts llama-server once for each kind of speculation, with as many threads as cores, and sends it each prompt alone at
temperature 0. Prints the decode tokens/s that it reports, for each round and as median.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pipeline.cli.bench.tasks import TASKS, prompt_of

START_S = 120.0
REQUEST_S = 300.0
POLL_S = 0.2

NGRAMS = {
    "none": [],
    "ngram-cache": ["--spec-type", "ngram-cache"],
    "ngram-mod": ["--spec-type", "ngram-mod"],
    "ngram-simple 12/48": ["--spec-type", "ngram-simple"],
    "ngram-simple 4/8": [
        *("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "4", "--spec-ngram-simple-size-m", "8")
    ],
    "ngram-map-k 4/8": [
        *("--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "4", "--spec-ngram-map-k-size-m", "8")
    ],
}
"""Options by name: the defaults, and the sizes that fit short outputs."""


def drafts(path: str) -> dict[str, list[str]]:
    """Options with a draft model, by name."""
    return {
        f"draft-simple {num}": ["--spec-type", "draft-simple", "-md", path, "--spec-draft-n-max", str(num)]
        for num in (3, 7)
    }


class PeerServer:
    """A llama-server that runs while the context is open."""

    def __init__(self, binary: str, model: str, port: int, options: list[str]) -> None:
        self._url = f"http://127.0.0.1:{port}"
        num_threads = str(len(os.sched_getaffinity(0)))
        command = [binary, "-m", model, "--port", str(port), "-t", num_threads, "-np", "1", "-c", "4096", *options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self) -> "PeerServer":
        end_s = time.monotonic() + START_S
        while True:
            if self._process.poll() is not None:
                raise SystemExit(f"llama-server ended with {self._process.returncode}")
            try:
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return self
            except (urllib.error.URLError, OSError):
                if time.monotonic() > end_s:
                    self._process.kill()
                    raise SystemExit(f"llama-server was not ready after {START_S:g} s") from None
                time.sleep(POLL_S)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def rate_of(self, prompt: str, num_tokens: int) -> tuple[float, int]:
        """Decode tokens/s of one completion, and its number of tokens."""
        body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "cache_prompt": False}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=REQUEST_S) as reply:
            timings: dict[str, Any] = json.load(reply)["timings"]
        return float(timings["predicted_per_second"]), int(timings["predicted_n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="path of llama-server")
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--draft", help="a .gguf file: measure this draft model instead of n-grams")
    parser.add_argument("--kinds", default="", help="only these kinds, with commas between them")
    parser.add_argument("--task", choices=list(TASKS), default="extract")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=18473)
    args = parser.parse_args()
    kinds = {"none": NGRAMS["none"], **drafts(args.draft)} if args.draft else NGRAMS
    chosen = args.kinds.split(",") if args.kinds else list(kinds)
    for kind in chosen:
        rates, lengths = [], []
        with PeerServer(args.server, args.model, args.port, kinds[kind]) as server:
            for number in range(-1, args.rounds):  # round -1 warms up
                text = prompt_of(args.task, number)
                chat = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
                rate, length = server.rate_of(chat, args.tokens)
                if number >= 0:
                    rates.append(rate)
                    lengths.append(length)
        each = ", ".join(f"{rate:.1f}" for rate in rates)
        print(
            f"{args.task}, {kind}: {each} tokens/s, median {statistics.median(rates):.1f}, tokens {lengths}", flush=True
        )


if __name__ == "__main__":
    main()
