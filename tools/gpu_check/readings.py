"""Results of items. Each is appended to a file as a line of JSON at once, so that a crash loses nothing."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Result = Literal["", "pass", "FAIL", "cut"]


@dataclass(frozen=True, slots=True)
class Reading:
    """One row of the report."""

    case: str
    value: float | None = None
    unit: str = ""
    bound: float | None = None
    """The hardware limit, or the largest allowed error, in the same unit."""
    must: float | None = None
    goal: float | None = None
    less_is_better: bool = False
    result: Result = ""
    """Of a check; "cut" if it was skipped for lack of time."""
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Further values of the measurement, for the JSON."""
    section: str = ""

    @property
    def share(self) -> float | None:
        """Ratio to the hardware limit; None for checks."""
        if self.result or not self.value or not self.bound:
            return None
        return self.bound / self.value if self.less_is_better else self.value / self.bound

    @property
    def verdict(self) -> str:
        """The result of the check, or the target that was reached."""
        if self.result or self.value is None or self.must is None:
            return self.result
        if not self._reaches(self.must):
            return "missed"
        return "goal" if self.goal is not None and self._reaches(self.goal) else "must"

    def _reaches(self, wanted: float) -> bool:
        assert self.value is not None
        return self.value <= wanted if self.less_is_better else self.value >= wanted


def check(case: str, error: float, bound: float, note: str = "", **numbers: Any) -> Reading:
    """A reading that passes if `error` is at most `bound`. NaN fails."""
    return Reading(
        case, error, "", bound, result="pass" if error <= bound else "FAIL", less_is_better=True, note=note,
        numbers=numbers,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Started:
    """An item started."""

    item: str
    limit_s: float


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item raised an error."""

    item: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ended:
    """An item ended, with or without an error."""

    item: str
    took_s: float


Line = Started | Reading | FailedItem | Ended
KINDS: dict[str, type[Line]] = {kind.__name__: kind for kind in (Started, Reading, FailedItem, Ended)}


def write(path: Path, line: Line) -> None:
    """Append a line. It survives a crash of this process."""
    with path.open("a") as file:
        # A killed process may have left half a line.
        file.write("\n" + json.dumps({"kind": type(line).__name__, **asdict(line)}) + "\n")


def read(path: Path) -> list[Line]:
    """All complete lines of a file; none if it does not exist."""
    if not path.exists():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            fields = json.loads(text)
        except json.JSONDecodeError:
            continue  # empty or incomplete
        lines.append(KINDS[fields.pop("kind")](**fields))
    return lines
