"""The models that wait to be loaded, or sleep and wait for their turn; placement.py decides about each.

wanted, oldest first ──► decide ──► load, or wake ──quantum──► put to sleep ──open requests──► wanted
                           └──► others are unloaded, or put to sleep
"""

import logging
import math
import time
from collections.abc import Callable, Mapping

from pipeline.config.values.sizes import size_words
from pipeline.supervisor.models.memory import needed_before
from pipeline.supervisor.models.model_thread import Event, ManagedModel
from pipeline.supervisor.models.placement import Decision, Occupant, decide, turn_bytes

PAUSES_S = (1.0, 2.0, 5.0, 15.0, 30.0)
"""How long a model that could not wake, or not sleep, waits until the next try, by the number of failures in a row."""


class WaitingModels:
    """Owns what is wanted. All methods but `decide` are of the manager's loop."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        memory_bytes: int,
        quantum_s: float,
        load: Callable[[ManagedModel], None],
        unload: Callable[[ManagedModel], None],
        fail: Callable[[ManagedModel, str], None],
        log: logging.Logger,
    ) -> None:
        """`fail` is called with a model that can't fit, and why."""
        self._models, self._memory_bytes, self._quantum_s = models, memory_bytes, quantum_s
        self._load, self._unload, self._fail, self._log = load, unload, fail, log
        self._wanted: dict[str, float] = {}
        """Since when, by time.time()."""
        self._decisions: dict[str, Decision] = {}
        """What was decided last about those that wait."""
        self.due_s = math.inf
        """When the next turn begins, by time.monotonic()."""
        self._reported: set[str] = set()
        """Those that wait open-endedly, which the log has."""
        self._num_failed: dict[tuple[str, Event], int] = {}
        """How many tries of a model have failed, one after the other, by its name and "not awake" or "not asleep"."""
        self._may_wake_s: dict[str, float] = {}
        """When it is woken again at the earliest, by time.monotonic()."""

    def want(self, model: ManagedModel) -> None:
        self._wanted.setdefault(model.name, time.time())

    def drop(self, name: str) -> None:
        self._wanted.pop(name, None)
        self._reported.discard(name)

    def clear(self) -> None:
        self._wanted.clear()

    def position(self, name: str) -> int:
        """1 is the next one; 0 if it does not wait."""
        return 1 + list(self._wanted).index(name) if name in self._wanted else 0

    def since_s(self, name: str) -> float:
        """Since when it waits, in Unix time; 0 if it does not."""
        return self._wanted.get(name, 0.0)

    def waits_for(self, name: str) -> tuple[str, ...]:
        return self._decisions.get(name, Decision()).waits_for if name in self._wanted else ()

    def needed(self, model: ManagedModel) -> int:
        """What it needs while it is awake."""
        return model.num_bytes or needed_before(model.settings)

    def turn(self) -> None:
        """Load and wake what fits, and make room for the others."""
        self.due_s, now_s = math.inf, time.monotonic()
        held: list[ManagedModel] = []
        """Those that wait until others have no open requests, however long that is."""
        for name in list(self._wanted):
            model = self._models[name]
            if model.is_asleep and not model.is_busy:
                del self._wanted[name]  # its requests have ended
                continue
            if model.state == "unloading":
                continue
            if not (model.is_asleep or all(self._delays_not(model, one) for one in held)):
                continue
            if model.is_asleep and now_s < (may_wake_s := self._may_wake_s.get(name, 0.0)):
                self.due_s = min(self.due_s, may_wake_s)  # its last wake has failed; others go first meanwhile
                continue
            self._decisions[name] = decision = self.decide(model, self.needed(model))
            if held and not (model.is_asleep or decision.loads):
                continue
            for other in decision.leave:
                self._unload(self._models[other])
            for other in decision.sleep:
                self._put_to_sleep(self._models[other])
            if decision.waits_for and not decision.is_open_ended:
                if not decision.sleep:
                    self.due_s = min(self.due_s, decision.due_s)
                return  # the first one that waits is the first one that loads
            if decision.is_open_ended:
                self._say_why(model)
            if decision.waits_for or (decision.problem and model.is_asleep):
                # Others end only if those that sleep have their turns.
                held.append(model)
                continue
            self.drop(name)
            if decision.problem:
                self._fail(model, decision.problem)
            elif model.is_asleep:
                self._wake(model)
            else:
                self._load(model)

    def _delays_not(self, model: ManagedModel, held: ManagedModel) -> bool:
        """Whether a model may be loaded before one that waits open-endedly: that one still fits as soon as those leave
        that it waits for (backfilling, as batch schedulers do)."""
        decision = self._decisions[held.name]
        leaving = {model.name, held.name, *decision.waits_for}
        kept = (one for one in self._models.values() if one.has_memory and one.name not in leaving)
        num_bytes = sum(map(self.needed, (model, held, *kept)))
        return not decision.problem and num_bytes <= self._memory_bytes

    def decide(self, model: ManagedModel, num_bytes: int) -> Decision:
        """What is done about a model that needs so many bytes while it is awake. Other threads may ask."""
        stays_bytes = model.stays_bytes if model.takes_turns else None
        now_s, quantum_s = time.monotonic(), self._quantum_s
        occupants = self._occupants(model)
        return decide(
            num_bytes, occupants, self._memory_bytes, stays_bytes=stays_bytes, now_s=now_s, quantum_s=quantum_s
        )

    def _occupants(self, model: ManagedModel) -> list[Occupant]:
        """All other models that have memory."""
        return [
            Occupant(
                name=one.name,
                num_bytes=self.needed(one),
                stays_bytes=one.stays_bytes if one.takes_turns and self._quantum_s else None,
                is_pinned=one.settings.pinned,
                is_busy=one.is_busy or one.state == "loading" or one.turn == "waking",
                is_leaving=one.state == "unloading",
                is_asleep=one.turn == "asleep",
                is_falling_asleep=one.turn == "falling asleep",
                idle_since_s=one.idle_since_s,
                awake_since_s=math.inf if one.state == "loading" or one.turn != "awake" else one.awake_since_s,
            )
            for one in self._models.values()
            if one.has_memory and one is not model
        ]

    def _say_why(self, model: ManagedModel) -> None:
        """A model waits until others have no open requests: once, say what turns would need."""
        if model.name in self._reported:
            return
        self._reported.add(model.name)
        fields: dict[str, object] = {"model": model.name, "after": ", ".join(self.waits_for(model.name))}
        if self._quantum_s and model.takes_turns:
            least = turn_bytes(self.needed(model), model.stays_bytes, self._occupants(model))
            fields["turns_need"] = size_words(least, up=True)
            fields["memory_bytes"] = size_words(self._memory_bytes)
        self._log.info("waits until others have no open requests", extra={"fields": fields})

    # --------------------------------------------------------------------------------------------------------- turns

    def _put_to_sleep(self, model: ManagedModel) -> None:
        assert model.thread is not None
        model.turn = "falling asleep"
        model.thread.set_turn(sleeps=True)

    def _wake(self, model: ManagedModel) -> None:
        assert model.thread is not None
        model.turn = "waking"
        model.thread.set_turn(sleeps=False)

    def happened(self, model: ManagedModel, event: Event, num_bytes: int) -> None:
        """A model has fallen asleep or woken, or could not."""
        now_s = time.monotonic()
        if event in ("asleep", "not awake"):
            if event == "asleep":
                self._num_failed.pop((model.name, "not asleep"), None)
                model.saved_bytes = num_bytes
                model.num_turns += 1
            else:
                pause_s = self._failed(model.name, event, 0.0)
                self._may_wake_s[model.name] = now_s + pause_s
                self._log.warning("can't wake", extra={"fields": {"model": model.name, "again_s": pause_s}})
            model.turn = "asleep"
            if model.is_busy:
                self.want(model)
            return
        model.turn, model.awake_since_s = "awake", now_s
        if event == "awake":
            self._num_failed.pop((model.name, "not awake"), None)
        else:  # it sleeps at the end of its quantum, which begins later
            model.awake_since_s += self._failed(model.name, event, self._quantum_s) - self._quantum_s

    def _failed(self, name: str, event: Event, least_s: float) -> float:
        """Returns the seconds until the next try."""
        num_before = self._num_failed.get((name, event), 0)
        self._num_failed[name, event] = num_before + 1
        return max(least_s, PAUSES_S[min(num_before, len(PAUSES_S) - 1)])
