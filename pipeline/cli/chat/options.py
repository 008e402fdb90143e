"""The options of `pipeline chat`."""

import argparse

from pipeline.cli import option_types as types


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline chat`, except those of settings."""
    types.add_server(parser, f"by default the one at {types.DEFAULT_URL}, or else one of its own")
    parser.add_argument(
        "--timeout",
        type=types.duration,
        default=600.0,
        metavar="TIME",
        help="maximum time without an answer; by default 10m",
    )
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    parser.add_argument(
        "--temperature", type=types.temperature, help="of sampling; 0 is greedy; by default the model's, or else 0.7"
    )
    parser.add_argument("--top-p", type=types.share, help="of sampling; by default the model's, or else 0.95")
    parser.add_argument("--max-tokens", type=types.positive, metavar="N", help="maximum length of an answer, in tokens")
    parser.add_argument("--seed", type=types.natural, help="of sampling")
