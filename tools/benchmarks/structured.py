"""`structured`: the cost of structured output for all requests, against unstructured output.

The arms alternate on one server. Both have prompts and outputs of about 128 tokens, greedy. The schema is an array that
goes on for longer, so outputs are cut at the same length. A second schema has a pattern and bounded numbers, whose
masks take longer. The figure is output tokens/s for each of --streams.

Bound: at every number of streams, the median of structured / unstructured is at least 0.85.
"""

import argparse
import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

from pipeline.cli import option_types as types
from tools.benchmarks import report
from tools.benchmarks.loads import BenchmarkLoad, Span, closed_loop
from tools.benchmarks.pairs import Reading, compare
from tools.benchmarks.report import BenchmarkReport, Verdict
from tools.benchmarks.served import Served

ARMS = ("unstructured", "structured")
TOKENS = Span(128, 128)
LEAST_RATIO = 0.85

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4,8}$"},
        "total": {"type": "number", "minimum": 0, "maximum": 9999},
        "state": {"enum": ["open", "paid", "sent", "returned"]},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    },
    "required": ["id", "total", "state", "note"],
    "additionalProperties": False,
}
SCHEMAS = {"plain": PERSON, "bounded": ORDER}


def add(parser: argparse.ArgumentParser) -> None:
    report.add_common(parser, rounds=6, seconds=15.0)
    parser.add_argument(
        "--streams", type=types.positive, nargs="+", default=[8, 32], metavar="N", help="by default %(default)s"
    )


def run(args: argparse.Namespace) -> int:
    found = BenchmarkReport("structured", args)
    with Served(*args.set) as server:
        for num_streams in args.streams:
            for name, item in SCHEMAS.items():
                title = f"{num_streams} streams, {name} schema"
                measure = measuring(server.url, num_streams, args.seconds, args.seed, item, found.errors)
                compared = compare(ARMS, args.rounds, measure, found.tell)
                found.comparison(title, compared)
                ratio = compared.ratio("output tok/s")
                value = ratio.median if ratio else 0.0
                found.verdicts.append(Verdict(f"{title}: structured / unstructured", value, ">=", LEAST_RATIO))
    return found.finish()


def measuring(
    url: str, num_streams: int, seconds: float, seed: int, item: dict[str, Any], errors: "Counter[str]"
) -> Callable[[int, int], Reading]:
    """What measures an arm in a round, for `compare`. Arrays of `item` are the structured output; requests that fail
    are counted in `errors`."""
    schema = {"type": "array", "items": item, "minItems": 1000}
    structured = {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": schema}}}

    def measure(arm: int, number: int) -> Reading:
        options = structured if arm == 1 else {}
        load = BenchmarkLoad(num_streams, TOKENS, TOKENS, seconds, f"{seed}/{num_streams}/{number}/{arm}", options)
        summary = asyncio.run(closed_loop(url, load))
        errors.update(summary.errors)
        return {
            "output tok/s": summary.output_tokens_per_s,
            "requests/s": summary.requests_per_s,
            "TTFT p50 ms": summary.ttft_ms.p50,
            "ITL p50 ms": summary.itl_ms.p50,
            "ITL p99 ms": summary.itl_ms.p99,
        }

    return measure
