"""Which models are loaded: the one place that decides it.

A model that is wanted is loaded if it fits into what memory_bytes leaves. If it does not, models leave for it that are
idle and not pinned, those first whose last request is longest ago. If that is not enough, it waits until others are
idle: they are named, so that a client sees what it waits for.
"""

from collections.abc import Sequence

import msgspec

from pipeline.config.values.sizes import size_words


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has memory."""

    name: str
    num_bytes: int
    is_pinned: bool = False
    is_busy: bool = False
    """It has open requests, is being loaded, or is leaving."""
    is_leaving: bool = False
    idle_since_s: float = 0.0


class Decision(msgspec.Struct, frozen=True):
    """What is done about a model that is wanted. Without a problem, it is loaded if nothing is in its way."""

    leave: tuple[str, ...] = ()
    """Models that are unloaded for it now."""
    waits_for: tuple[str, ...] = ()
    """Models that must leave before it is loaded; those of `leave` among them."""
    problem: str = ""
    """Why it never fits while the pinned models are loaded."""

    @property
    def loads(self) -> bool:
        return not (self.waits_for or self.problem)


def decide(num_bytes: int, occupants: Sequence[Occupant], memory_bytes: int) -> Decision:
    """What is done about a model that needs so many bytes."""
    free = memory_bytes - sum(one.num_bytes for one in occupants)
    if num_bytes <= free:
        return Decision()
    free += sum(one.num_bytes for one in occupants if one.is_leaving)
    waits_for = [one.name for one in occupants if one.is_leaving]
    movable = [one for one in occupants if not (one.is_pinned or one.is_leaving)]
    leave = []
    for one in sorted(movable, key=lambda one: (one.is_busy, one.idle_since_s)):
        if num_bytes <= free:
            break
        free += one.num_bytes
        waits_for.append(one.name)
        if not one.is_busy:
            leave.append(one.name)
    if num_bytes > free:
        return Decision(problem=_problem(num_bytes, occupants, memory_bytes))
    return Decision(tuple(leave), tuple(waits_for))


def _problem(num_bytes: int, occupants: Sequence[Occupant], memory_bytes: int) -> str:
    pinned = [one for one in occupants if one.is_pinned]
    words = f"it needs {size_words(num_bytes)}, and memory_bytes is {size_words(memory_bytes)}"
    if pinned:
        taken = size_words(sum(one.num_bytes for one in pinned))
        words += f", of which pinned models ({', '.join(one.name for one in pinned)}) have {taken}"
    return words
