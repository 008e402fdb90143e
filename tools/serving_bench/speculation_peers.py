"""Measure speculative decoding beside llama.cpp's own, with the same files: four servers, with and without it.

    python -m tools.serving_bench.speculation_peers --model FILE.gguf --task extract --method ngram
    python -m tools.serving_bench.speculation_peers --model FILE.gguf --task code --method draft_model --draft S.gguf

In each round every server computes the same prompt alone, one after the other, streamed and at temperature 0. Prints
decode tokens per second (from the first token to the last), and medians: of each server, and of ours relative to
llama.cpp. `tools/compare_peers --build-only --servers llama.cpp` builds llama.cpp; --llama-server names another build.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from pipeline.cli.bench.tasks import TASKS, prompt_of
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.stages.prepare.cache import Cache
from tools.compare_peers.children import serving
from tools.compare_peers.llama_cpp import VERSION, LlamaCpp

REQUEST_S = 600.0
START_S = 600.0
OURS, THEIRS = "pipeline", "llama.cpp"
LLAMA_TYPES = {"ngram": "ngram-simple", "draft_model": "draft-simple"}
"""llama.cpp's names for --spec-type."""


def commands(args: argparse.Namespace, llama_server: Path) -> dict[str, list[str]]:
    """How each server is started."""
    threads = str(len(os.sched_getaffinity(0)))
    ours = [sys.executable, "-m", "pipeline", "serve", "--port", "{port}", "--model", args.model]
    for setting in args.set:
        ours += ["--set", setting]
    theirs = [str(llama_server), "--model", args.model, "--host", "127.0.0.1", "--port", "{port}"]
    theirs += ["--threads", threads, "--threads-batch", threads, "--parallel", "1", "--ctx-size", "4096"]
    our_method, their_method = ["--set", f"speculative.method={args.method}"], ["--spec-type", LLAMA_TYPES[args.method]]
    if args.method == "draft_model":
        our_method += ["--set", f"speculative.draft={args.draft}"]
        their_method += ["--spec-draft-model", args.draft]
    return {
        OURS: ours,
        f"{OURS}, {args.method}": ours + our_method,
        THEIRS: theirs,
        f"{THEIRS}, {args.method}": theirs + their_method,
    }


def decode_rate(url: str, prompt: str, num_tokens: int) -> float:
    """Output tokens per second after the first one, of one streamed request."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    first_s = last_s = 0.0
    num = 0
    with urllib.request.urlopen(request, timeout=REQUEST_S) as reply:
        for line in reply:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            event = json.loads(line[len(b"data: ") :])
            if any(choice.get("delta", {}).get("content") for choice in event.get("choices", [])):
                last_s = time.monotonic()
                first_s = first_s or last_s
            if event.get("usage"):
                num = int(event["usage"]["completion_tokens"])
    if num < 2 or last_s <= first_s:
        raise UserError(f"{url}: an output of {num} tokens is too short to measure")
    return (num - 1) / (last_s - first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a .gguf file")
    parser.add_argument("--draft", default="", help="a smaller .gguf file with the same tokens")
    parser.add_argument("--method", choices=list(LLAMA_TYPES), default="ngram")
    parser.add_argument("--task", choices=list(TASKS), default="extract")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of our servers")
    built = LlamaCpp(Cache.of(Settings()).root / "peers", VERSION).server
    parser.add_argument("--llama-server", type=Path, default=built)
    args = parser.parse_args()
    if (args.method == "draft_model") != bool(args.draft):
        parser.error("--draft belongs to --method draft_model")
    if not args.llama_server.is_file():
        parser.error(f"{args.llama_server} is missing: see --help")
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        servers = {}
        for index, (name, command) in enumerate(commands(args, args.llama_server).items()):
            log = Path(logs) / f"{index}.log"
            servers[name] = stack.enter_context(serving(name, command, log, START_S, print))
        for number in range(-1, args.rounds):  # round -1 warms up
            prompt = prompt_of(args.task, number)
            found = {name: decode_rate(server.url, prompt, args.tokens) for name, server in servers.items()}
            print(f"round {number}:", ", ".join(f"{name} {rate:.1f}" for name, rate in found.items()), flush=True)
            for name, rate in found.items() if number >= 0 else ():
                rates.setdefault(name, []).append(rate)
    medians = {name: statistics.median(each) for name, each in rates.items()}
    for name, rate in medians.items():
        print(f"{name:>24}: median {rate:.1f} tokens/s")
    for suffix in ("", f", {args.method}"):
        ratios = [one / other for one, other in zip(rates[OURS + suffix], rates[THEIRS + suffix], strict=True)]
        print(f"ours relative to llama.cpp{suffix}: median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
