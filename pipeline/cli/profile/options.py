"""The options of `pipeline profile execute`."""

import argparse

from pipeline.cli.profile.results import ProfilePlan
from pipeline.cli.profile.shapes import SHAPES
from pipeline.config.sections.speculative import MAX_SPECULATIVE_TOKENS

MAX_SEQS = 4096
MAX_TOKENS = 2**20
MAX_ROUNDS = 1000
MAX_LAYERS = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `pipeline profile execute`, except those of settings."""
    parser.add_argument(
        "--shape",
        choices=SHAPES,
        help="random weights of this shape instead of a model, in the format that --quantization says: "
        f"{', '.join(SHAPES)}",
        metavar="NAME",
    )
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="N",
        help="only the first N layers of the --shape, which need less memory and time; the shares of the layers' ops "
        "are those of all layers",
    )
    steps = parser.add_argument_group("steps")
    steps.add_argument(
        "--batch",
        type=_batches,
        default=(1, 8, 32),
        metavar="N,N…",
        help="sequences of each decode step, or none; by default 1,8,32",
    )
    steps.add_argument(
        "--verify",
        type=_verifies,
        default=(),
        metavar="N,N…",
        help="also measure decode steps that verify so many proposed tokens of each sequence, as speculative decoding "
        "does; on a CPU. Measure a draft model's passes with its own --model",
    )
    steps.add_argument(
        "--context",
        type=_context,
        default=256,
        metavar="N",
        help="context length of each sequence; by default %(default)s",
    )
    steps.add_argument(
        "--prefill",
        type=_prefills,
        default=(128, 512),
        metavar="N,N…",
        help="tokens of each prefill step, or none; by default 128,512. "
        "A server computes at most schedule.max_num_batched_tokens in one step",
    )
    steps.add_argument(
        "--rounds",
        type=_rounds,
        default=7,
        metavar="N",
        help="rounds of each step; the medians are shown. By default %(default)s",
    )
    steps.add_argument(
        "--against", choices=("torch",), help="also measure the same steps with these kernels, alternating; on a CPU"
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the results as JSON to this file; - writes them to standard output, without the table",
    )


def plan_of(args: argparse.Namespace) -> ProfilePlan:
    """The plan that the options describe."""
    return ProfilePlan(
        *(args.batch, args.context, args.prefill, args.rounds, args.against, args.shape, args.layers, args.verify)
    )


# argparse shows the message of an ArgumentTypeError after the name of the option.


def _whole(text: str, most: int) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 to {most}, got {text!r}")
    return int(text)


def _several(text: str, most: int) -> tuple[int, ...]:
    """Distinct numbers, in the order given."""
    return () if text == "none" else tuple(dict.fromkeys(_whole(part.strip(), most) for part in text.split(",")))


def _batches(text: str) -> tuple[int, ...]:
    return _several(text, MAX_SEQS)


def _prefills(text: str) -> tuple[int, ...]:
    return _several(text, MAX_TOKENS)


def _verifies(text: str) -> tuple[int, ...]:
    return _several(text, MAX_SPECULATIVE_TOKENS)


def _context(text: str) -> int:
    return _whole(text, MAX_TOKENS)


def _layers(text: str) -> int:
    return _whole(text, MAX_LAYERS)


def _rounds(text: str) -> int:
    return _whole(text, MAX_ROUNDS)
