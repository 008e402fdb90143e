"""Measure beam search: output tokens per second with n beams, relative to n samples, in turns at one running server.

    pipeline serve --set gateway.port=8123 &
    tools/serving_bench/beam_search.py --url http://127.0.0.1:8123 --width 4 --tokens 128

One request runs at a time. Both kinds have the same prompt, a new one in each round, and compute the same number of
tokens: end-of-sequence tokens are ignored. Prints the ratio of each round and the median.
"""

import argparse
import json
import statistics
import time
import urllib.request
from typing import Any

TEXT = "harbour letter morning engine garden window river captain market winter story signal mountain"
WORDS = TEXT.split()


def prompt_of(number: int, num_words: int) -> str:
    """A text of its own for each number."""
    return f"Chapter {number}. " + " ".join(WORDS[(number + 5 * i) % len(WORDS)] for i in range(num_words))


def rate_of(url: str, body: dict[str, Any]) -> float:
    """Output tokens per second of one request."""
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    began_s = time.monotonic()
    with urllib.request.urlopen(request, timeout=600) as reply:
        answer = json.load(reply)
    seconds = time.monotonic() - began_s
    num_tokens = int(answer["usage"]["completion_tokens"])
    assert num_tokens == body["n"] * body["max_tokens"], f"{num_tokens} tokens"
    return num_tokens / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each sequence")
    parser.add_argument("--words", type=int, default=100, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=6)
    args = parser.parse_args()
    ratios = []
    for number in range(-1, args.rounds):  # round -1 warms up
        body = {"n": args.width, "max_tokens": args.tokens, "ignore_eos": True, "temperature": 1.0}
        kinds = [{}, {"use_beam_search": True}]
        rates = {}
        for extra in kinds if number % 2 else reversed(kinds):
            # Neither finds the other's prompt in the prefix cache.
            salt = {"cache_salt": f"{number} {len(extra)} {time.monotonic()}"}
            rates[len(extra)] = rate_of(args.url, {"prompt": prompt_of(number, args.words), **body, **extra, **salt})
        ratio = rates[1] / rates[0]
        if number >= 0:
            ratios.append(ratio)
        print(f"round {number}: samples {rates[0]:.1f}, beams {rates[1]:.1f} tokens/s, ratio {ratio:.3f}", flush=True)
    print(f"{args.width} beams: median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
