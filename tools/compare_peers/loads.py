"""The loads, as commands of `pipeline bench`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

REQUEST_S = 300.0
"""Deadline of one request."""
PREPARE_S = 60.0
"""Time for the client to start, and to count the tokens of its prompts."""


class Load(msgspec.Struct, frozen=True):
    """A workload of `pipeline bench`."""

    name: str
    """Its option, and its name in --loads."""
    title: str
    figure: str
    """The field of a level's summary that the load is about."""
    unit: str
    concurrencies: tuple[int, ...]
    endpoint: str = "chat"
    """Of the API: "chat" or "completions"."""
    arrival: "Arrival | None" = None
    """Prompts that arrive beside `concurrencies` running streams, in place of the preset `name` of `pipeline bench`."""


class Arrival(msgspec.Struct, frozen=True):
    """Prompts of a length that arrive at a rate."""

    prompt_tokens: int
    request_rate: float
    """Prompts a second."""


DECODE, PREFILL, SHARED, ARRIVALS = "decode", "prefill", "shared", "arrivals"
ARRIVAL_OUTPUT_TOKENS = 16


def loads_of(
    names: Sequence[str], concurrencies: tuple[int, ...], endpoint: str = "chat", arrivals: Sequence[Arrival] = ()
) -> list[Load]:
    """The chosen loads. `concurrencies` are those of decode and of the streams beside `arrivals`; the others have one
    each."""
    known = [
        Load(DECODE, "128 tokens in, 128 out", "output_tokens_per_s", "output tok/s", concurrencies),
        Load(PREFILL, "Prompts of 800 words, one token out", "prefill_tokens_per_s", "prompt tok/s", (1,)),
        Load(SHARED, "16 streams, 600 of 650 words shared, 64 tokens out", "total_tokens_per_s", "total tok/s", (16,)),
    ]
    if ARRIVALS in names:
        for one in arrivals:
            title = f"Prompts of {one.prompt_tokens:,} tokens, {one.request_rate:g} a second, beside streams"
            name = f"{ARRIVALS}-{one.prompt_tokens}"
            known.append(Load(name, title, "output_tokens_per_s", "output tok/s", concurrencies, arrival=one))
    chosen = [load for load in known if load.name in names or load.arrival is not None]
    return [msgspec.structs.replace(load, endpoint=endpoint) for load in chosen]


def longest_tokens(loads: Sequence[Load]) -> int:
    """Tokens of the longest request of arrivals, with room for a chat template; 0 without arrivals."""
    return max((_whole_tokens(load.arrival) for load in loads if load.arrival is not None), default=0)


def _whole_tokens(arrival: Arrival) -> int:
    return arrival.prompt_tokens + arrival.prompt_tokens // 16 + ARRIVAL_OUTPUT_TOKENS + 64


def _workload(load: Load) -> list[str]:
    """The options of `pipeline bench` that choose a load."""
    if load.arrival is None:
        return [f"--{load.name}"]
    return [
        *("--request-rate", f"{load.arrival.request_rate:g}", "--prompt-tokens", str(load.arrival.prompt_tokens)),
        *("--output-tokens", str(ARRIVAL_OUTPUT_TOKENS)),
    ]


def bench_command(
    load: Load, url: str, temperatures: Sequence[float], duration_s: float, seed: int, json: Path
) -> list[str]:
    """The command that measures a load. All servers get the same prompts, because they get the same seed."""
    return [
        *(sys.executable, "-m", "pipeline", "bench", *_workload(load), "--url", url),
        *("--endpoint", load.endpoint),
        *("--concurrency", ",".join(map(str, load.concurrencies))),
        *("--temperature", ",".join(f"{one:g}" for one in temperatures)),
        *("--duration", f"{duration_s:g}s", "--timeout", f"{REQUEST_S:g}s"),
        *("--seed", str(seed), "--json", str(json)),
    ]


def deadline_s(load: Load, temperatures: Sequence[float], duration_s: float) -> float:
    """A bound of the time that a load takes: each level's warm-up and its last requests may take a request's time."""
    return PREPARE_S + len(load.concurrencies) * len(temperatures) * (duration_s + 2 * REQUEST_S)
