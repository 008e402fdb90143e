"""The results as a table for the terminal, as Markdown and as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tools.gpu_check.child import number
from tools.gpu_check.readings import FailedItem, Reading

HEADINGS = ("case", "measured", "bound", "share", "must", "goal", "result", "note")
LEFT = (0, 6, 7)
"""Left-aligned columns."""
MEANINGLESS = "Kernels were interpreted on the CPU: the times are meaningless."
MOST_NOTE = 60
"""Longest note in the terminal's table, in characters. Markdown and JSON have the full notes."""


@dataclass(frozen=True, slots=True)
class Results:
    """All results of a run."""

    readings: list[Reading]
    failed: list[FailedItem]
    interpreted: bool

    @property
    def is_wrong(self) -> bool:
        """Whether a check failed or an item raised an error. Missed targets and skipped cases don't count."""
        return bool(self.failed) or any(reading.result == "FAIL" for reading in self.readings)

    @property
    def summary(self) -> str:
        """The number of each kind of result, in a line."""
        num = {kind: sum(reading.verdict == kind for reading in self.readings) for kind in ("pass", "FAIL", "cut")}
        targets = [reading for reading in self.readings if reading.must is not None and not reading.result]
        reached = sum(reading.verdict in ("must", "goal") for reading in targets)
        goals = sum(reading.verdict == "goal" for reading in targets)
        return (
            f"checks: {num['pass']} passed, {num['FAIL']} failed; errors: {len(self.failed)}; out of time: "
            f"{num['cut']}; targets: {reached} of {len(targets)} reached, {goals} of them the goal"
        )


def as_text(found: Results) -> str:
    """The table for a terminal."""
    rows = [HEADINGS, *(_cells(reading, MOST_NOTE) for reading in found.readings)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    lines = []
    section = ""
    for row, reading in zip(rows, [None, *found.readings], strict=True):
        if reading is not None and reading.section != section:
            section = reading.section
            lines.append(f"-- {section}")
        cells = [cell.ljust(width) if i in LEFT else cell.rjust(width) for i, (cell, width) in _columns(row, widths)]
        lines.append("  ".join(cells).rstrip())
    lines += [f"FAILED {failed.item}: {_last_line(failed.traceback)}" for failed in found.failed]
    if found.interpreted:
        lines.append(MEANINGLESS)
    return "\n".join([*lines, found.summary])


def as_markdown(found: Results) -> str:
    """Tables for docs/performance.md, one for each section."""
    lines = []
    for section in dict.fromkeys(reading.section for reading in found.readings):
        rows = [_cells(reading, None) for reading in found.readings if reading.section == section]
        lines += [f"### {section}", "", _markdown(HEADINGS), _markdown(["---"] * len(HEADINGS))]
        lines += [*map(_markdown, rows), ""]
    for failed in found.failed:
        lines += [f"### failed: {failed.item}", "", "```", failed.traceback.rstrip(), "```", ""]
    if found.interpreted:
        lines += [MEANINGLESS, ""]
    return "\n".join([*lines, found.summary, ""])


def as_json(found: Results) -> str:
    """All results as indented JSON."""
    readings = [{**asdict(reading), "share": reading.share, "verdict": reading.verdict} for reading in found.readings]
    whole = {
        "interpreted": found.interpreted,
        "summary": found.summary,
        "readings": readings,
        "failed": [asdict(failed) for failed in found.failed],
    }
    return json.dumps(_finite(whole), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """Replace infinities and NaN, which JSON does not have, by strings."""
    match value:
        case float() if not math.isfinite(value):
            return str(value)
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def _cells(reading: Reading, most_note: int | None) -> tuple[str, ...]:
    share = "" if reading.share is None else f"{reading.share:.0%}"
    must, goal = ("" if limit is None else _amount(limit, reading.unit) for limit in (reading.must, reading.goal))
    note = reading.note if most_note is None or len(reading.note) <= most_note else f"{reading.note[: most_note - 1]}…"
    measured, bound = (
        "" if value is None else _amount(value, reading.unit) for value in (reading.value, reading.bound)
    )
    return reading.case, measured, bound, share, must, goal, reading.verdict, note


def _amount(value: float, unit: str) -> str:
    return f"{number(value)} {unit}".rstrip()


def _columns(row: Sequence[str], widths: Sequence[int]) -> list[tuple[int, tuple[str, int]]]:
    return list(enumerate(zip(row, widths, strict=True)))


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
