"""The options of `pipeline check-model`. Imported for every command line, so it imports nothing heavy."""

import argparse

NUM_TOKENS = 160
MIN_TOKENS = 64
"""Shortest allowed length of the longest prompt: above the shared prefix."""
MAX_TOKENS = 2**17


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline check-model`, except those of settings."""
    parser.add_argument(
        "checkpoint",
        metavar="MODEL",
        help="a folder in Hugging Face layout, a hub id as ORG/NAME or ORG/NAME@REVISION, or a config.json alone, for "
        "which a tiny checkpoint with random weights is generated",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=NUM_TOKENS,
        metavar="N",
        help=f"ids of the longest prompt, at least {MIN_TOKENS}; by default %(default)s. A sliding window is only "
        "checked if prompts are longer",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of the weights generated for a config.json"
    )
