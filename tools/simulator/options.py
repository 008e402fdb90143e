"""The simulator's options."""

import argparse
from pathlib import Path

import msgspec

from pipeline.cli import option_types as types
from pipeline.errors import UserError
from pipeline.replay.traffic import ReplicaProfile, read_profile, read_trace
from pipeline.routing.policies import POLICIES, WEIGHT
from tools.simulator.requests import Trace, trace_of
from tools.simulator.synthetic import KINDS, Shape, synthetic

MAX_REPLICAS = 16_384


def add_trace_options(parser: argparse.ArgumentParser) -> None:
    """The requests."""
    group = parser.add_argument_group("requests")
    which = group.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--trace", type=Path, metavar="FILE", help="of `pipeline record traffic`, or another in Mooncake's JSONL format"
    )
    which.add_argument("--synthetic", choices=list(KINDS), help="requests that are made up: see tools/simulator")
    group.add_argument("--limit", type=types.positive, metavar="N", help="the first N lines of the trace")
    group.add_argument(
        "--speed", type=_above_zero, default=1.0, metavar="X", help="X times as many requests in a second as the trace"
    )
    group.add_argument(
        "--max-request-tokens", type=types.positive, metavar="N", help="leave requests out with more tokens, in and out"
    )
    shape = Shape()
    for name, words in (
        ("num_requests", "requests"),
        ("rate", "requests per second"),
        ("prompt_tokens", "mean prompt"),
        ("output_tokens", "mean output"),
        ("num_groups", "applications with a prefix of their own, of shared and bursts"),
        ("num_turns", "mean turns of a conversation, of chat"),
        ("zipf", "exponent of the applications' popularity; near 0, all are equally popular"),
        ("block_tokens", "tokens of a block"),
    ):
        value = getattr(shape, name)
        kind = types.positive if isinstance(value, int) else _above_zero
        option = f"--{name.removeprefix('num_').replace('_', '-')}"
        group.add_argument(option, dest=name, type=kind, metavar="N", help=f"synthetic: {words}; by default {value:g}")
    group.add_argument("--seed", type=types.natural, default=0, metavar="N", help="of all random choices; by default 0")


def add_replica_options(parser: argparse.ArgumentParser) -> None:
    """A replica's speed and size."""
    group = parser.add_argument_group("replica")
    group.add_argument(
        "--replica",
        type=Path,
        metavar="FILE",
        help="its speed and size, as `pipeline record traffic --replica` writes them; the next options change them",
    )
    group.add_argument("--prefill-tokens-per-s", type=_above_zero, metavar="N", help="speed of prefill, in full steps")
    group.add_argument(
        "--decode-ms",
        type=_decode_ms,
        metavar="ROWS=MS,ROWS=MS",
        help="times of two decode steps, as 1=12,64=20; context counts as in the file",
    )
    for name in ("kv_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_open_sequences"):
        group.add_argument(f"--{name.replace('_', '-')}", type=types.positive, metavar="N")
    group.add_argument("--overhead-ms", type=_natural_float, default=0.0, metavar="MS", help="added to each TTFT")


def add_routing_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("routing")
    group.add_argument(
        "--policy",
        action="append",
        choices=[*POLICIES, "all"],
        help="by default predicted-ttft; may be repeated; all compares them",
    )
    group.add_argument(
        "--routers", type=types.positive, default=1, metavar="N", help="routers that know nothing of each other"
    )
    group.add_argument(
        "--cells",
        type=types.positive,
        default=1,
        metavar="N",
        help="parts of the replicas with routers of their own, behind a first tier that hashes prefixes to cells",
    )
    group.add_argument(
        "--weight",
        type=_above_zero,
        default=WEIGHT,
        metavar="X",
        help="predicted-ttft: what a token to compute counts, relative to one that waits; by default %(default)g",
    )
    group.add_argument("--learn", action="store_true", help="routers learn the speed of each replica")


def add_size_options(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--replicas", type=replicas, metavar="N,N", help=f"numbers of replicas to simulate, up to {MAX_REPLICAS}"
    )
    which.add_argument(
        "--p99-ttft",
        type=types.duration,
        metavar="TIME",
        help="find the least number of replicas with this 99th percentile of the time to first token, as 2s or 500ms, "
        "and no refused request",
    )


def trace_from(args: argparse.Namespace) -> Trace:
    """The trace that the options name. Raises UserError."""
    given = {name: value for name in Shape.__struct_fields__ if (value := getattr(args, name, None)) is not None}
    if args.synthetic:
        trace = synthetic(args.synthetic, msgspec.structs.replace(Shape(), **given))
        if args.limit or args.speed != 1:
            raise UserError("--limit and --speed are for --trace: use --requests and --rate")
    else:
        if names := sorted(given.keys() - {"seed"}):
            raise UserError(f"--{names[0].removeprefix('num_').replace('_', '-')} is for --synthetic")
        trace = trace_of(read_trace(args.trace, args.limit), args.trace.name, args.speed)
    if (most := args.max_request_tokens) is not None:
        kept = [one for one in trace.requests if one.num_prompt + max(one.outputs) <= most]
        if not kept:
            raise UserError(f"--max-request-tokens {most}: {trace.name} has no such requests")
        for index, one in enumerate(kept):
            one.index = index
        trace.requests = kept
    return trace


def profile_from(args: argparse.Namespace) -> ReplicaProfile:
    """The replica that the options describe. Raises UserError."""
    profile = read_profile(args.replica) if args.replica else ReplicaProfile()
    sizes = ("kv_tokens", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_open_sequences")
    changed = {name: value for name in sizes if (value := getattr(args, name)) is not None}
    if args.decode_ms is not None:
        (few, few_s), (many, many_s) = args.decode_ms
        row_s = (many_s - few_s) / (many - few)
        changed |= {"row_s": row_s, "base_s": few_s - row_s * few}
        if min(row_s, changed["base_s"]) < 0:
            raise UserError("--decode-ms: a step with more rows needs more time, and less than in proportion")
    profile = msgspec.structs.replace(profile, **changed)
    if (speed := args.prefill_tokens_per_s) is not None:
        # A step of n tokens takes n / speed, of which the first part and the pairs are as before.
        num = profile.max_num_batched_tokens
        token_s = 1 / speed - profile.base_s / num - profile.pair_s * num / 2
        if token_s <= 0:
            raise UserError(
                f"--prefill-tokens-per-s {speed:g}: a step of {num} tokens takes more than that without its tokens: "
                f"lower it, or change --decode-ms"
            )
        profile = msgspec.structs.replace(profile, token_s=token_s)
    return profile


def policies_from(args: argparse.Namespace) -> list[str]:
    """The policies to simulate."""
    given = args.policy or ["predicted-ttft"]
    return list(POLICIES) if "all" in given else list(dict.fromkeys(given))


def _above_zero(text: str) -> float:
    return _number(text, 1e-12)


def _natural_float(text: str) -> float:
    return _number(text, 0.0)


def _number(text: str, least: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value < 1e15:
        raise argparse.ArgumentTypeError(f"needs a number {'above 0' if least else 'of at least 0'}, got {text!r}")
    return value


def replicas(text: str) -> list[int]:
    numbers = [types.positive(part) for part in text.split(",")]
    if max(numbers) > MAX_REPLICAS:
        raise argparse.ArgumentTypeError(f"needs at most {MAX_REPLICAS} replicas, got {text!r}")
    return numbers


def _decode_ms(text: str) -> tuple[tuple[int, float], tuple[int, float]]:
    points = []
    for part in text.split(","):
        rows, equals, time_ms = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"needs two steps, as 1=12,64=20, got {text!r}")
        points.append((types.positive(rows), _above_zero(time_ms) / 1000))
    points.sort()
    if len(points) != 2 or points[0][0] == points[1][0]:
        raise argparse.ArgumentTypeError(f"needs two steps of different rows, as 1=12,64=20, got {text!r}")
    return points[0], points[1]
