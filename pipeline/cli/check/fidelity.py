"""`pipeline check-model --fidelity`: measures how far the CPU's kernels are from the same weights in float32."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.table import Table

from pipeline.cli.check.chunks import CHUNK_SIZE, chunks_of
from pipeline.cli.check.kl_base import KlBaseFile
from pipeline.cli.check.options import NUM_TOKENS, SEED
from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.runtime import topology

MEASURE = "pipeline.stages.execute.cpu.measuring.fidelity"
"""Module with `measure(settings, folder, chunks, report)`."""
TOKENS = "pipeline.stages.prepare.check_model.text_tokens"
"""Module with `encode(folder, text)`."""
PREPARE_PROGRESS = "pipeline.stages.prepare.progress"

BUILT_IN = Path(__file__).with_name("fidelity_text.txt")
"""Prose, dialogues, JSON, logs, seven other languages, numbers, code and documentation; 3,175 positions count with
SmolLM2's tokenizer."""

HEADINGS = ("weights × activations", "positions", "top-1", "±", "mean KL", "99 % KL", "largest")


def check_options(args: argparse.Namespace, settings: Settings) -> None:
    """Raises ConfigError if options don't fit `--fidelity`, or need it and it is missing."""
    errors = []
    if not args.fidelity:
        if args.text is not None:
            errors.append("--text: is the text of --fidelity; add --fidelity, or leave out --text")
        if args.kl_base is not None:
            errors.append("--kl-base: only --fidelity has this file; add --fidelity, or leave out --kl-base")
        if (format := args.quantization) not in (None, "none"):
            errors.append(
                f"--quantization {format}: only --fidelity measures other weights than floats; add --fidelity"
            )
        if errors:
            raise ConfigError(errors)
        return
    if Path(args.checkpoint).suffix == ".json":
        errors.append(f"MODEL {args.checkpoint}: --fidelity needs a model with weights, not a config.json")
    for name, value, default in (("--tokens", args.tokens, NUM_TOKENS), ("--seed", args.seed, SEED)):
        if value != default:
            errors.append(f"{name} {value}: has no effect with --fidelity; leave it out")
    execute = settings.execute
    if execute.device != "cpu":
        errors.append(f"execute.device is {execute.device!r}: --fidelity measures the CPU's kernels; set it to 'cpu'")
    if execute.dtype != "bfloat16":
        errors.append(
            f"execute.dtype is {execute.dtype!r}: --fidelity compares with float32 itself; set it to 'bfloat16'"
        )
    if errors:
        raise ConfigError(errors)


def report(args: argparse.Namespace, settings: Settings) -> tuple[Path, list[str | Table]]:
    """Measure. Returns the prepared folder, and what to print: a line about the measurement, and the table.

    Raises UserError.
    """
    text, source = _text(args.text)
    settings = msgspec.structs.replace(settings, model=args.checkpoint)
    prepare: Any = importlib.import_module(topology.PREPARE)
    folder: Path = prepare.prepare(settings, importlib.import_module(PREPARE_PROGRESS).for_stream())
    ids, bos_id = importlib.import_module(TOKENS).encode(folder, text)
    chunks = chunks_of(ids, bos_id, source)
    measure: Any = importlib.import_module(MEASURE).measure
    with ExitStack() as stack:
        base = None if args.kl_base is None else stack.enter_context(KlBaseFile(args.kl_base))
        measured = measure(settings, folder, chunks, _Progress(len(chunks)), base)
    line = (
        f"{measured.kernels} against the same weights in float32; {source}: {len(ids)} tokens, {len(chunks)} chunks of "
        f"{CHUNK_SIZE}"
    )
    return folder, [line, table_of(measured.programs)]


def table_of(forms: Sequence[Any]) -> Table:
    """A row for each `MeasuredProgram`. KL divergences are in nats."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=heading != HEADINGS[0])
    for form in forms:
        found = form.divergence.summary()
        table.add_row(
            f"{form.weights} × {form.activations}" + (f", {form.kv_cache}" if form.kv_cache else ""),
            str(found.num_positions),
            f"{found.top1:.4f}",
            f"{found.top1_error:.4f}",
            *(f"{value:.6f}" for value in (found.mean_kl, found.kl_99, found.max_kl)),
        )
    return table


def _text(path: str | None) -> tuple[str, str]:
    """The text, and what to call it. Raises UserError if it can't be read."""
    if path is None:
        return BUILT_IN.read_bytes().decode(), "built-in text"
    source = f"--text {path}"
    try:
        return Path(path).read_bytes().decode(), source
    except OSError as error:
        raise UserError(f"{source}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: is not UTF-8 at byte {error.start}") from error


class _Progress:
    """Counts chunks on standard error: in one line on a terminal, else in a line each."""

    def __init__(self, num_chunks: int) -> None:
        self._num_chunks = num_chunks

    def __call__(self, done: int) -> None:
        line = f"chunk {done} of {self._num_chunks}"
        if not sys.stderr.isatty():
            print(line, file=sys.stderr, flush=True)
        else:
            print(f"\r{line}", end="\n" if done == self._num_chunks else "", file=sys.stderr, flush=True)
