"""Which models are loaded, which wait and which sleep: the one place that decides it.

A model that is wanted is loaded, or woken, if it fits into what memory_bytes leaves. If it does not:

    1. idle models that are not pinned are unloaded, those first whose last request is longest ago
    2. busy ones are put to sleep, those first that are awake longest, once each was awake for `quantum_s`
    3. if that is not enough, or models don't take turns, it waits until busy ones are idle

A model that sleeps keeps its processes and what it has saved (`stays_bytes`). Models only take turns if each of them
could be the one that is awake: so one that sleeps is never shut out by those that were loaded meanwhile.
"""

import math
from collections.abc import Collection, Sequence

import msgspec

from pipeline.config.values.sizes import size_words


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """A model that has memory."""

    name: str
    num_bytes: int
    """What it needs while it is awake."""
    stays_bytes: int | None = None
    """What it needs at most while it sleeps; None if it can't be put to sleep."""
    is_pinned: bool = False
    is_busy: bool = False
    """It has open requests, is being loaded, or is leaving."""
    is_leaving: bool = False
    is_asleep: bool = False
    """It was put to sleep for another one."""
    is_falling_asleep: bool = False
    idle_since_s: float = 0.0
    awake_since_s: float = math.inf
    """Infinite while it is loaded or woken: its quantum has not begun."""

    @property
    def takes_turns(self) -> bool:
        return self.stays_bytes is not None and not self.is_pinned

    @property
    def low_bytes(self) -> int:
        """What it can't do without."""
        return self.stays_bytes if self.stays_bytes is not None and not self.is_pinned else self.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.low_bytes if self.is_asleep else self.num_bytes


class Decision(msgspec.Struct, frozen=True):
    """What is done about a model that is wanted. Without a problem, it is loaded if nothing is in its way."""

    leave: tuple[str, ...] = ()
    """Models that are unloaded for it now."""
    waits_for: tuple[str, ...] = ()
    """Models that must leave or sleep before it is loaded; those of `leave` and `sleep` among them."""
    problem: str = ""
    """Why it never fits while the pinned models are loaded."""
    sleep: tuple[str, ...] = ()
    """Models that are put to sleep for it now."""
    due_s: float = math.inf
    """When its turn comes, if it waits for the quantum of others; infinite if that is not known yet."""
    is_open_ended: bool = False
    """It waits until busy models have no open request, however long that is."""

    @property
    def loads(self) -> bool:
        return not (self.waits_for or self.problem)


def decide(
    num_bytes: int,
    occupants: Sequence[Occupant],
    memory_bytes: int,
    *,
    stays_bytes: int | None = None,
    now_s: float = 0.0,
    quantum_s: float = 0.0,
) -> Decision:
    """What is done about a model that needs so many bytes, and `stays_bytes` while it sleeps (None: it can't sleep,
    or is pinned). With `quantum_s` 0, none is put to sleep."""
    wanted = Occupant(name="", num_bytes=num_bytes, stays_bytes=stays_bytes, is_busy=True)
    kept = [one for one in occupants if not one.is_leaving]
    waits_for = [one.name for one in occupants if one.is_leaving]
    asleep = {one.name for one in kept if one.is_asleep or one.is_falling_asleep}

    def fits() -> bool:
        return _fits(wanted, kept, asleep, memory_bytes)

    if fits():
        if num_bytes + sum(one.used_bytes for one in occupants) <= memory_bytes:
            return Decision()
        waits_for += [one.name for one in kept if one.is_falling_asleep]
        return Decision(waits_for=tuple(waits_for))
    leave = []
    for one in sorted(kept, key=lambda one: one.idle_since_s):
        if not (one.is_busy or one.is_pinned or one.is_falling_asleep) and not fits():
            kept.remove(one)
            leave.append(one.name)
    waits_for += leave
    if fits():
        waits_for += [one.name for one in kept if one.is_falling_asleep]
        return Decision(tuple(leave), tuple(waits_for))
    if quantum_s and (found := _turn(wanted, kept, asleep, memory_bytes)):
        due_s = max(one.awake_since_s for one in found) + quantum_s
        names = tuple(one.name for one in found)
        waits_for += [one.name for one in kept if one.is_falling_asleep]
        sleep = names if now_s >= due_s else ()
        return Decision(tuple(leave), (*waits_for, *names), "", sleep, due_s)
    for one in sorted(kept, key=lambda one: one.idle_since_s):
        if not one.is_pinned and not fits():
            kept.remove(one)
            waits_for.append(one.name)
    if not fits():
        return Decision(problem=_problem(num_bytes, occupants, memory_bytes))
    return Decision(tuple(leave), tuple(waits_for), is_open_ended=True)


def turn_bytes(num_bytes: int, stays_bytes: int | None, occupants: Sequence[Occupant]) -> int:
    """The least memory_bytes with which a model that is wanted would take turns with those that can't leave."""
    wanted = Occupant(name="", num_bytes=num_bytes, stays_bytes=stays_bytes)
    present = [wanted, *(one for one in occupants if not one.is_leaving and (one.is_busy or one.is_pinned))]
    low = sum(one.low_bytes for one in present)
    return max(low - one.low_bytes + one.num_bytes for one in present)


def _turn(wanted: Occupant, kept: Sequence[Occupant], asleep: Collection[str], memory_bytes: int) -> list[Occupant]:
    """The models that are put to sleep, so that the wanted one fits; empty if that is not enough."""
    found: list[Occupant] = []
    movable = [one for one in kept if one.takes_turns and one.name not in asleep]
    for one in sorted(movable, key=lambda one: one.awake_since_s):
        found.append(one)
        if _fits(wanted, kept, {*asleep, *(one.name for one in found)}, memory_bytes):
            return found
    return []


def _fits(wanted: Occupant, kept: Sequence[Occupant], asleep: Collection[str], memory_bytes: int) -> bool:
    """Whether the wanted model fits beside those that are kept, of which some sleep. If some do, each that takes turns
    must fit while all the others sleep."""
    used = sum(one.low_bytes if one.name in asleep else one.num_bytes for one in kept)
    if wanted.num_bytes + used > memory_bytes:
        return False
    if not any(one.name in asleep for one in kept):
        return True
    present = [wanted, *kept]
    low = sum(one.low_bytes for one in present)
    return all(low - one.low_bytes + one.num_bytes <= memory_bytes for one in present)


def _problem(num_bytes: int, occupants: Sequence[Occupant], memory_bytes: int) -> str:
    pinned = [one for one in occupants if one.is_pinned]
    words = f"it needs {size_words(num_bytes)}, and memory_bytes is {size_words(memory_bytes)}"
    if pinned:
        taken = size_words(sum(one.num_bytes for one in pinned))
        words += f", of which pinned models have {taken}"  # not their names: a client may not know them
    return words
