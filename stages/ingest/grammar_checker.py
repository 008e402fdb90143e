"""Checks the grammars of requests in a separate process (pipeline/grammars/checker.py), which starts with the first
grammar. Recent outcomes are cached. Grammars wait here for their check, in a queue that is fair to the API keys."""

import asyncio
import hashlib
import time
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.config.settings import LimitSettings
from pipeline.grammars.checks import MAX_CHECKS, Check, Checked
from pipeline.runtime.messages import Failure, Grammar
from pipeline.runtime.process import suspension
from pipeline.runtime.queues.fair_gate import FairGate
from pipeline.runtime.workers.job_dispatcher import JobDispatcher
from pipeline.runtime.workers.worker import WorkerLostError
from pipeline.stages.ingest.prompts.rejection import RequestRejected

MAX_KNOWN = 256
"""Outcomes in the cache."""

MAX_KNOWN_BYTES = 16 * 1024**2

SLOW_S = 0.05
"""The executor prepares a grammar in about the time that checking it took, and a step may have to wait for it. Grammars
slower than this are passed on one by one."""

MIN_SLOW_S = 1e-6

SHARE = 0.1
"""The largest share of time that the executor spends on slow grammars; it sets the interval between them."""

MAX_PREPARED = 16
"""The executor has prepared at least this many of the last grammars. It keeps 64, of all ingests, and one may be there
in several forms: with reasoning before it, or behind."""

CHECK_TIMEOUT_S = 30.0
"""Longest time of a check, including the start of the process and the checks before it; also of the wait for a turn
after it, if the grammar is slow."""

MAX_CHECKS_PER_SCOPE = MAX_CHECKS - 2
"""Of the checks at the same time. The others are for other API keys."""

NAMES = {
    "json_object": "response_format",
    "json_schema": "the schema",
    "closed_schema": "the schema",
    "regex": "the regex",
    "choice": "the choices",
    "grammar": "the grammar",
    "structural_tag": "the structural tag",
    "calls": "the schema of a tool",
}


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of a check. Either `grammar` or `error` is empty."""

    grammar: str
    error: str
    index: int = -1
    """As in `Checked`."""
    took_s: float = 0.0
    """CPU time of the check."""

    @property
    def is_slow(self) -> bool:
        return bool(self.grammar) and self.took_s > SLOW_S


class GrammarChecker:
    """Owns the process and the cache. `model_dir` is a prepared folder."""

    def __init__(self, model_dir: Path, limits: LimitSettings, title: str = "pipeline: grammars") -> None:
        self._limits = limits
        self._known: OrderedDict[bytes, CheckOutcome] = OrderedDict()
        self._known_bytes = 0
        self._asked: dict[tuple[str, bytes], asyncio.Event] = {}
        """Set when a check of a scope's grammar, and the wait for its turn, are over."""
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        """The last grammars that were passed on."""
        self._dispatcher = JobDispatcher(
            "pipeline.grammars.checker",
            title,
            [str(model_dir), str(limits.grammar_timeout_s)],
            Checked,
            FairGate(MAX_CHECKS, MAX_CHECKS_PER_SCOPE),
            CHECK_TIMEOUT_S,
        )
        self._next_slow_s = 0.0
        """When the next slow grammar may be passed on, by time.monotonic()."""
        self._slow_gate = FairGate(1, num_per_scope=1)
        self._slow_s: defaultdict[str, float] = defaultdict(float)
        """How long the slow grammars of each scope wait if only it has some."""

    async def check(self, grammar: Grammar, scope: str = "") -> str:
        """Return the grammar in llguidance's form; `scope` is whose it is. All prompts of a request have the same one:
        a scope has each checked once at a time. Raises RequestRejected if it can't be used."""
        self._check_size(grammar)
        key = _key(grammar)
        while (outcome := self._ready(key)) is None:
            if (over := self._asked.get((scope, key))) is not None:
                await self._wait(over, grammar)
                continue
            self._asked[scope, key] = over = asyncio.Event()
            try:
                outcome = await self._prepared(grammar, key, scope)
                break
            finally:
                del self._asked[scope, key]
                over.set()
        if outcome.error:
            raise rejection(grammar, outcome.error, outcome.index)
        self._passed[key] = None
        self._passed.move_to_end(key)
        if len(self._passed) > MAX_PREPARED:
            self._passed.popitem(last=False)
        return outcome.grammar

    def _ready(self, key: bytes) -> CheckOutcome | None:
        """The outcome of a check, if it is cached and the executor need not wait for it."""
        if (outcome := self._known.get(key)) is None:
            return None
        self._known.move_to_end(key)
        return None if outcome.is_slow and key not in self._passed else outcome

    async def _wait(self, over: asyncio.Event, grammar: Grammar) -> None:
        """Wait for another check of a grammar, and for its turn. Raises RequestRejected if that takes too long."""
        due_s = asyncio.get_running_loop().time() + 2 * CHECK_TIMEOUT_S
        try:
            async with asyncio.timeout_at(due_s):
                await over.wait()
        except TimeoutError:
            if not suspension.missed(due_s):
                raise _busy(grammar) from None

    async def _prepared(self, grammar: Grammar, key: bytes, scope: str) -> CheckOutcome:
        """The outcome of a check, when the executor may get the grammar. Raises RequestRejected if there is none in
        time."""
        outcome = self._known.get(key) or await self._checked(grammar, key, scope)
        if outcome.is_slow:
            await self._take_turn(grammar, outcome.took_s, scope)
        return outcome

    async def _checked(self, grammar: Grammar, key: bytes, scope: str) -> CheckOutcome:
        async def make_job(number: int) -> tuple[bytes, Sequence[int]]:
            return msgspec.msgpack.encode(Check(number, grammar.kind, grammar.source, time.monotonic())), ()

        try:
            checked = await self._dispatcher.query(scope, len(grammar.source), make_job)
        except WorkerLostError:
            raise _busy(grammar) from None
        if not checked.is_final:
            raise _busy(grammar)
        outcome = CheckOutcome(checked.grammar, checked.error, checked.index, checked.took_s)
        self._remember(key, outcome)
        return outcome

    async def _take_turn(self, grammar: Grammar, took_s: float, scope: str) -> None:
        """Delay a slow grammar until its turn. Raises RequestRejected if that takes too long."""
        if self._next_slow_s - time.monotonic() > CHECK_TIMEOUT_S or self._slow_s[scope] > CHECK_TIMEOUT_S:
            raise _busy(grammar)
        self._slow_s[scope] += took_s / SHARE
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await self._slow_gate.enter(scope, int(took_s * 1e6))
                try:
                    await asyncio.sleep(self._next_slow_s - time.monotonic())
                    self._next_slow_s = max(self._next_slow_s, time.monotonic()) + took_s / SHARE
                finally:
                    self._slow_gate.leave(scope)
        except TimeoutError:
            raise _busy(grammar) from None
        finally:
            self._slow_s[scope] -= took_s / SHARE
            if self._slow_s[scope] < MIN_SLOW_S:
                del self._slow_s[scope]

    def close(self) -> None:
        self._dispatcher.close()

    def _remember(self, key: bytes, outcome: CheckOutcome) -> None:
        if (before := self._known.pop(key, None)) is not None:  # another scope's check
            self._known_bytes -= _size(before)
        self._known[key] = outcome
        self._known_bytes += _size(outcome)
        while len(self._known) > MAX_KNOWN or self._known_bytes > MAX_KNOWN_BYTES:
            _, dropped = self._known.popitem(last=False)
            self._known_bytes -= _size(dropped)

    def _check_size(self, grammar: Grammar) -> None:
        limit = self._limits.max_grammar_bytes
        num_bytes = len(grammar.source)
        if num_bytes <= limit:  # otherwise it has more bytes in any case
            try:
                num_bytes = len(grammar.source.encode())
            except UnicodeEncodeError:
                raise rejection(grammar, "it contains a lone surrogate, which is not a valid character") from None
        if num_bytes > limit:
            raise rejection(grammar, f"it has at least {num_bytes} bytes, the limit is {limit}")


def rejection(grammar: Grammar, why: str, index: int = -1) -> RequestRejected:
    """A RequestRejected for the client. `index` is the index of the tool whose schema failed."""
    what, param = NAMES.get(grammar.kind.removeprefix("compact_"), "the grammar"), grammar.param
    if index >= 0 and param == "tools":
        param = f"tools[{index}].function.parameters"
    if param.startswith("tools["):
        what = f"the schema of {param.partition('.')[0]}"
    return RequestRejected(Failure(400, f"{what} can't be used: {why}", param or None, "invalid_grammar"))


def _busy(grammar: Grammar) -> RequestRejected:
    message = f"{NAMES.get(grammar.kind, 'the grammar')} could not be checked in time: try again"
    return RequestRejected(Failure(503, message, grammar.param or None, "overloaded"))


def _key(grammar: Grammar) -> bytes:
    """A key that no two grammars share."""
    text = f"{grammar.kind}\0{grammar.source}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _size(outcome: CheckOutcome) -> int:
    return len(outcome.grammar) + len(outcome.error) + 100


_outcomes = msgspec.msgpack.Decoder(str | Failure)


def encode_outcome(outcome: str | RequestRejected) -> bytes:
    """Encode the outcome of a check for a recording."""
    return msgspec.msgpack.encode(outcome.failure if isinstance(outcome, RequestRejected) else outcome)


def decode_outcome(data: bytes) -> str | RequestRejected:
    outcome = _outcomes.decode(data)
    return RequestRejected(outcome) if isinstance(outcome, Failure) else outcome
