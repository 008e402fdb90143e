"""The options of `pipeline record` and `pipeline replay`."""

import argparse
import math
from pathlib import Path

from pipeline.cli.server_options import add_server_options

STAGES = ("gateway", "ingest", "schedule", "execute", "detokenize")
MAX_SECONDS = 1_000_000.0


def add_record_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "stage",
        metavar="STAGE",
        help="stage, such as ingest, or ingest.1 if there are several; or traffic: the times, lengths and common "
        "prefixes of requests, without text, for tools/simulator",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="an existing file is replaced")
    parser.add_argument("--seconds", type=seconds, metavar="N", help="duration in seconds; by default until Ctrl-C")
    parser.add_argument(
        "--max-bytes",
        type=_num_bytes,
        metavar="N",
        help="maximum size of the file; by default 4 GiB, and 256 MiB for traffic",
    )
    parser.add_argument("--no-sent", action="store_true", help="do not record what the stage sends")
    parser.add_argument(
        "--block-tokens",
        type=_num_block_tokens,
        metavar="N",
        help="traffic: tokens of a block, whose hash shows common prefixes; by default 64",
    )
    parser.add_argument(
        "--replica", type=Path, metavar="FILE", help="traffic: also write the speed and the size of the server"
    )
    add_server_options(parser)


def add_replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=STAGES, metavar="STAGE", help=", ".join(STAGES))
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording of a stage")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write what the stage sends to this file; two replays write the same bytes",
    )
    parser.add_argument(
        "--expect",
        type=Path,
        metavar="FILE",
        help="compare what the stage sends with this recording or capture; by default with FILE, if it began with the "
        "stage and has what the stage sent",
    )
    parser.add_argument(
        "--speed", choices=("max", "1x"), default="max", help="as fast as possible, or at the recorded times"
    )
    parser.add_argument(
        "--inline", action="store_true", help="run the stage in this process, for a debugger or a profiler"
    )


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"needs a number of seconds above 0, got {text!r}")
    return value


def _num_block_tokens(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not (16 <= int(text) <= 65536 and int(text) % 16 == 0):
        raise argparse.ArgumentTypeError(f"needs a multiple of 16 up to 65536, as KV blocks are, got {text!r}")
    return int(text)


def _num_bytes(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 4096 <= int(text) <= 2**50:
        raise argparse.ArgumentTypeError(f"needs a number of bytes from 4096, got {text!r}")
    return int(text)
