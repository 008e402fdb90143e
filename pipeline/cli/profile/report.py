"""A profile as tables for a terminal and as JSON."""

from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from pipeline.cli.profile.results import Case, Floor, MachineRates, Profile, StepTime
from pipeline.cli.safe_console import SafeConsole
from pipeline.cli.stacked import StackedTable

LEAST_WIDTH = 130
"""Width of output to a file or a pipe."""

MOST_DRIFT = 0.25
"""Largest drift between two readings of the machine that is not mentioned."""

NOTHING = "–"

OP_HEADINGS = ("op", "ops", "ms", "GB/s", "GFLOP/s", "floor\nms", "of\nfloor")
STEP_HEADINGS = (
    *("step", "ms", "tok/s", "GB/s", "GFLOP/s"),
    *("floor ms,\nops in turn", "of it", "floor ms,\noverlapped", "of it", "steps\ntimed"),
)


def as_tables(profile: Profile, width: int | None = None) -> list[Table | str]:
    """Tables of the ops of each step (if known), of all steps, and of the machine. With `width`, columns that do not
    fit it are stacked."""
    with_ops = [step for step in profile.steps if step.ops]
    ops = _ops(with_ops).tables(width) if with_ops else []
    return [_title(profile), *ops, *_steps(profile).tables(width), _footnotes(profile)]


def console() -> Console:
    """Standard output, wide enough for the tables if it is not a terminal."""
    found = SafeConsole(highlight=False)
    return found if found.is_terminal else SafeConsole(highlight=False, width=LEAST_WIDTH)


def stack_width(screen: Console) -> int | None:
    """The width at which columns are stacked; None if the output is not a terminal."""
    return screen.width if screen.is_terminal else None


def _title(profile: Profile) -> str:
    weights = " + ".join(
        f"{format} {num_bytes / 1e6:,.1f} MB"
        for format, num_bytes in sorted(profile.weight_bytes.items(), key=lambda item: -item[1])
    )
    random = ", random weights" if profile.plan.shape else ""
    if profile.plan.layers is not None:
        random += f", only {profile.plan.layers} layer{'s' if profile.plan.layers > 1 else ''}"
    return (
        f"{profile.model}{random}: {weights}; keys and values {profile.kv_dtype}\n"
        f"{profile.gpu or f'{profile.cpu}, {profile.num_threads} threads'}; kernels: {profile.kernels}"
    )


def _ops(steps: Sequence[StepTime]) -> StackedTable:
    table = StackedTable(OP_HEADINGS)
    for step in steps:
        table.add_title(_name(step.case))
        for op in step.ops:
            table.add_row(
                f"  {op.name}",
                str(op.count),
                _ms(op.ms),
                _rate(op.gb_per_s),
                _rate(op.gflop_per_s) + (" int8" if op.is_integer else ""),
                *_floor(op.floor),
            )
            for kernel in step.kernels:
                if kernel.op == op.name:
                    table.add_row(f"    {kernel.name}", f"{kernel.count:g}", _ms(kernel.ms), *(NOTHING,) * 4)
        table.add_row("  whole step", str(sum(op.count for op in step.ops)), _ms(step.ms), *_step_rates(step))
    return table


def _steps(profile: Profile) -> StackedTable:
    against = (f"{profile.plan.against}\nms", "times\nas fast") if profile.against else ()
    launch = ("launch\nms",) if profile.gpu else ()
    table = StackedTable((*STEP_HEADINGS, *against, *launch))
    for step in profile.steps:
        cells = [_name(step.case), _ms(step.ms), f"{step.tokens_per_s:,.1f}", *_step_rates(step)]
        cells += [*_floor(step.overlapped), str(step.num_samples)]
        if step.against_ms is not None and step.speedup is not None:
            cells += [_ms(step.against_ms), f"{step.speedup:.2f}"]
        if step.launch_ms is not None:
            cells.append(_ms(step.launch_ms))
        table.add_row(*cells)
    return table


def _footnotes(profile: Profile) -> str:
    lines = [
        "`decode 8 at 256` computes the 256th token of 8 sequences, `prefill 128` a prompt of 128. Times are medians."
    ]
    if profile.gpu:
        lines.append(
            "Steps are timed by the GPU's clock; `launch` is the host's time for one. Times of kernels are means, and "
            "kernels may overlap."
        )
    if profile.before and profile.after:
        lines.append(
            "`pipeline profile execute --help` explains the floors."
            + ("" if profile.gpu else " Operations of integers are counted as FLOP.")
        )
        verb = "copies" if profile.gpu else "reads"
        lines += [
            f"This machine before: {verb} {_rates(profile.before)}",
            f"and after:           {verb} {_rates(profile.after)}",
        ]
        drift = _drift(profile.before, profile.after)
        if drift > MOST_DRIFT:
            lines.append(
                f"The two differ by up to {100 * drift:.0f} %, and floors take the better of each: times and shares "
                "mean little unless the machine is quiet."
            )
    else:
        lines.append(f"Single ops and floors are available for native kernels only; these are {profile.kernels}.")
    if profile.against:
        lines.append(f"Beside it: {profile.against}.")
    return "\n".join(lines)


def _name(case: Case) -> str:
    if case.phase == "prefill":
        return f"prefill {case.num_new}"
    if case.phase == "verify":
        return f"verify {case.num_new - 1} of {case.num_seqs} at {case.context}"
    return f"decode {case.num_seqs} at {case.context}"


def _step_rates(step: StepTime) -> tuple[str, ...]:
    """GB/s, GFLOP/s, floor and share of a whole step."""
    if not step.ops:
        return (NOTHING, NOTHING, *_floor(step.in_turn))
    num_bytes, operations = sum(op.bytes for op in step.ops), sum(op.operations for op in step.ops)
    return (_rate(num_bytes / step.ms / 1e6), _rate(operations / step.ms / 1e6), *_floor(step.in_turn))


def _drift(before: MachineRates, after: MachineRates) -> float:
    """Largest relative difference between the readings."""
    pairs: Iterable[tuple[float, float]]
    pairs = zip(msgspec.structs.astuple(before), msgspec.structs.astuple(after), strict=True)
    return max(max(pair) / min(pair) for pair in pairs if None not in pair) - 1


def _rates(rates: MachineRates) -> str:
    int8 = "" if rates.int8_ops is None else f", {rates.int8_ops / 1e9:,.0f} int8"
    return (
        f"{rates.read_bytes / 1e9:.1f} GB/s; GFLOP/s: {rates.float32_flops / 1e9:,.0f} float32, "
        f"{rates.bf16_flops / 1e9:,.0f} bfloat16{int8}"
    )


def _ms(value: float) -> str:
    return f"{value:,.3f}" if value < 10 else f"{value:,.2f}" if value < 100 else f"{value:,.1f}"


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value else NOTHING


def _floor(floor: Floor | None) -> tuple[str, str]:
    return (NOTHING, NOTHING) if floor is None else (_ms(floor.ms), f"{100 * floor.share:.0f} %")
