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


DECODE, PREFILL, SHARED = "decode", "prefill", "shared"


def loads_of(names: Sequence[str], concurrencies: tuple[int, ...], endpoint: str = "chat") -> list[Load]:
    """The chosen loads. `concurrencies` are decode's; the others have one each."""
    known = [
        Load(DECODE, "128 tokens in, 128 out", "output_tokens_per_s", "output tok/s", concurrencies),
        Load(PREFILL, "Prompts of 800 words, one token out", "prefill_tokens_per_s", "prompt tok/s", (1,)),
        Load(SHARED, "16 streams, 600 of 650 words shared, 64 tokens out", "total_tokens_per_s", "total tok/s", (16,)),
    ]
    return [msgspec.structs.replace(load, endpoint=endpoint) for load in known if load.name in names]


def bench_command(
    load: Load, url: str, temperatures: Sequence[float], duration_s: float, seed: int, json: Path
) -> list[str]:
    """The command that measures a load. All servers get the same prompts, because they get the same seed."""
    return [
        *(sys.executable, "-m", "pipeline", "bench", f"--{load.name}", "--url", url),
        *("--endpoint", load.endpoint),
        *("--concurrency", ",".join(map(str, load.concurrencies))),
        *("--temperature", ",".join(f"{one:g}" for one in temperatures)),
        *("--duration", f"{duration_s:g}s", "--timeout", f"{REQUEST_S:g}s"),
        *("--seed", str(seed), "--json", str(json)),
    ]


def deadline_s(load: Load, temperatures: Sequence[float], duration_s: float) -> float:
    """A bound of the time that a load takes: each level's warm-up and its last requests may take a request's time."""
    return PREPARE_S + len(load.concurrencies) * len(temperatures) * (duration_s + 2 * REQUEST_S)
