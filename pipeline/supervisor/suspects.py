"""Which requests may be the reason why a process has died."""

from pipeline.runtime import topology
from pipeline.supervisor.black_boxes import BlackBoxes


class Suspects:
    """Remembers them for the last process of each stage, until another one is made on purpose."""

    def __init__(self, black_boxes: BlackBoxes) -> None:
        self._black_boxes = black_boxes
        self._alone: dict[str, int] = {}
        """The only request that a process was working on when it died."""
        self._together: dict[str, list[int]] = {}
        """Those that it had in work, if it has crashed and there were several."""
        self._crashed: set[str] = set()
        """The stages whose last process died at work."""

    def at_death(self, name: str, incarnation: int, schedule: int) -> list[int]:
        """The requests of which each may be the reason why this process has died at work: those that its threads were
        working on, or else all that schedule, of this incarnation, has listed, if it or a rank of the executor has
        died. Call it before `died`."""
        if at_work := self._black_boxes.at_work(name, incarnation):
            return at_work
        if topology.stage_of(name) not in ("schedule", "execute"):
            return []
        return self._black_boxes.suspects_of(topology.SCHEDULE, schedule)

    def died(self, name: str, incarnation: int, *, has_crashed: bool) -> None:
        """Read what a dead process left. It was at work if it `has_crashed`."""
        at_work = self._black_boxes.at_work(name, incarnation)
        together = at_work or self._black_boxes.suspects_of(name, incarnation)
        self.clear(name)
        if len(at_work) == 1:
            self._alone[name] = at_work[0]
        if has_crashed:
            self._crashed.add(name)
            self._together[name] = together if len(at_work) != 1 else []

    def clear(self, name: str) -> None:
        """The last process of this name did not die, or is gone for good."""
        self._alone.pop(name, None)
        self._together.pop(name, None)
        self._crashed.discard(name)

    def alone(self, name: str) -> int | None:
        """The request that the last process of this name was working on, if it was one."""
        return self._alone.get(name)

    def together(self, name: str) -> list[int]:
        """The requests that the last process of this name had in work together, if it has crashed."""
        return self._together.get(name, [])

    def has_crashed(self, name: str) -> bool:
        return name in self._crashed
