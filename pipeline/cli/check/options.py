"""What can be asked of a check. Imported for every command line, so it imports nothing itself."""

import argparse

NUM_TOKENS = 160
MIN_TOKENS = 64
"""The shortest that the longest prompt may be: longer than the prefix that prompts share."""
MAX_TOKENS = 2**17


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline check-model`, besides those that stand for settings."""
    parser.add_argument(
        "checkpoint",
        metavar="MODEL",
        help="a folder in Hugging Face layout, a hub id as ORG/NAME or ORG/NAME@REVISION, or a config.json alone: then "
        "a tiny checkpoint of its kind is made, with random weights",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=NUM_TOKENS,
        metavar="N",
        help=f"ids of the longest prompt, at least {MIN_TOKENS}; by default %(default)s. A sliding window shows only "
        "in prompts that are longer",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the weights that are made of a config.json"
    )
