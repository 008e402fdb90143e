"""How near each family comes to what the machine can do: `python -m tools.family_shares [SHAPE…]`.

Runs `pipeline profile execute --shape SHAPE` with a few layers, and prints a row of a Markdown table for each: the
share of the floor of the layers' ops together, then that of the LM head in the same step, then ms of the step. The
embedding, the LM head and sampling are no part of the first, because a few layers are not the share of the model that
all are. The LM head is the same op in all families: where its share falls too, the machine was slower than its rates,
which are measured before and after. Run it on a quiet machine.
"""

import argparse
import subprocess
import sys

import msgspec

from pipeline.cli.profile.results import Profile, StepTime
from pipeline.cli.profile.shapes import SHAPES

OUTSIDE = ("embed", "head", "sample", "last_norm", "logits")
"""Ops that are not a layer's."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"by default all: {', '.join(SHAPES)}")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--quantization", default="q4_1", choices=["none", "q8_0", "q4_1"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    for name in args.shapes or SHAPES:
        if name not in SHAPES:
            parser.error(f"no shape {name}: there are {', '.join(SHAPES)}")
    for name in args.shapes or SHAPES:
        profile = measure(name, args)
        assert profile.before is not None and profile.after is not None
        cells = [f"{share_of(step):.0%} · {head_of(step):.0%} · {step.ms:.1f}" for step in profile.steps]
        reads = f"{profile.before.read_bytes / 1e9:.0f}, {profile.after.read_bytes / 1e9:.0f}"
        print(f"| {' | '.join((name, *cells, reads))} |", flush=True)
        slow = sorted(profile.steps[0].ops, key=lambda op: -op.ms)
        ops = (f"{op.name} {op.ms:.2f} ms {op.floor.share:.0%}" for op in slow if op.floor is not None)
        print(f"{name}, decode 1: {', '.join(ops)}", file=sys.stderr, flush=True)
    return 0


def measure(name: str, args: argparse.Namespace) -> Profile:
    """The profile of a shape, measured by the command."""
    command = [sys.executable, "-m", "pipeline", "profile", "execute", "--shape", name, "--layers", str(args.layers)]
    command += ["--quantization", args.quantization, "--rounds", str(args.rounds), "--prefill", "128", "--json", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.decode()}")
    return msgspec.json.decode(done.stdout, type=Profile)


def share_of(step: StepTime) -> float:
    """The floors of the layers' ops together, divided by their time."""
    ops = [op for op in step.ops if op.name not in OUTSIDE and op.floor is not None]
    return sum(op.floor.ms for op in ops if op.floor is not None) / sum(op.ms for op in ops)


def head_of(step: StepTime) -> float:
    """The same of the LM head."""
    return next(op.floor.share for op in step.ops if op.name == "head" and op.floor is not None)


if __name__ == "__main__":
    sys.exit(main())
