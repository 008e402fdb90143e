"""The options of `pipeline profile` for one stage alone, and for the chain."""

import argparse
from pathlib import Path

from pipeline.cli.replay.options import seconds

STAGES = {
    "gateway": "streaming HTTP clients, and an instant chain",
    "ingest": "chats to turn into prompts",
    "schedule": "requests, and an instant executor",
    "detokenize": "ids to detokenize",
}
MAX_STREAMS = 1024


def add_alone_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=streams, default=32, metavar="N", help="concurrent requests; by default 32")
    parser.add_argument(
        "--seconds", type=seconds, default=5.0, metavar="N", help="duration of the measurement; by default 5"
    )
    parser.add_argument(
        "--warmup", type=seconds, default=1.0, metavar="N", help="duration of the warm-up; by default 1"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON to this file; - writes them to standard output, without the table",
    )


def add_look_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--flame",
        type=Path,
        metavar="FILE",
        help="sample the stage's stack each ms of CPU: a picture (.svg), for https://speedscope.app (.json), or "
        "collapsed stacks (any other name)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="trace its wakes and their work, for https://ui.perfetto.dev; has a small overhead",
    )


def streams(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= MAX_STREAMS:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 to {MAX_STREAMS}, got {text!r}")
    return int(text)
