"""What was found, one thing at a time. A section's process writes each as a line of JSON the moment it has it, so that
one that dies takes nothing along."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Result = Literal["", "pass", "FAIL", "cut"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One row of the table."""

    case: str
    value: float | None = None
    unit: str = ""
    bound: float | None = None
    """What the machine allows, or the largest error that is right; in the same unit."""
    must: float | None = None
    goal: float | None = None
    less_is_better: bool = False
    result: Result = ""
    """Of a check; "cut" where there was no time for it."""
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    """More of the same measurement, for the JSON."""
    section: str = ""

    @property
    def share(self) -> float | None:
        """Of what the bound allows, where that is a bound on speed."""
        if self.result or not self.value or not self.bound:
            return None
        return self.bound / self.value if self.less_is_better else self.value / self.bound

    @property
    def verdict(self) -> str:
        """What became of the check, or of what must be reached."""
        if self.result or self.value is None or self.must is None:
            return self.result
        if not self._reaches(self.must):
            return "missed"
        return "goal" if self.goal is not None and self._reaches(self.goal) else "must"

    def _reaches(self, wanted: float) -> bool:
        assert self.value is not None
        return self.value <= wanted if self.less_is_better else self.value >= wanted


def check(case: str, error: float, bound: float, note: str = "", **numbers: Any) -> Reading:
    """An error and the largest that is right. NaN is none."""
    return Reading(
        case, error, "", bound, result="pass" if error <= bound else "FAIL", less_is_better=True, note=note,
        numbers=numbers,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Begun:
    """An item begins."""

    item: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item has ended by an error."""

    item: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An item is done, whatever it found."""

    item: str
    took_s: float


Line = Begun | Reading | FailedItem | Ended
KINDS: dict[str, type[Line]] = {kind.__name__: kind for kind in (Begun, Reading, FailedItem, Ended)}


def write(path: Path, line: Line) -> None:
    """Append a line; on return it outlives this process."""
    with path.open("a") as file:
        # A process that was killed may have left half a line before this one.
        file.write("\n" + json.dumps({"kind": type(line).__name__, **asdict(line)}) + "\n")


def read(path: Path) -> list[Line]:
    """All whole lines of a file, which may not be there yet."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            fields = json.loads(text)
        except json.JSONDecodeError:
            continue  # empty, or half of one
        lines.append(KINDS[fields.pop("kind")](**fields))
    return lines
