"""The program that checks grammars for ingest: what a client gave becomes a text in llguidance's own form, or an error.

    ingest ──Check──► this process ──fork──► a child for each check ──► Checked
                       one thread, the model's tokenizer     killed when its time is up

A check has a process of its own, forked in a few milliseconds with the tokenizer in it: so one that never ends, takes
all memory, or brings the library down, is just one that failed, and others go on beside it. Those that take long make
way for all else.
"""

import contextlib
import gc
import os
import selectors
import signal
import socket
import time
from collections import deque
from pathlib import Path

import msgspec

from pipeline.grammars.checks import Check, Checked
from pipeline.grammars.engine import Engine, NoEngine, bound_memory, words_of
from pipeline.grammars.entry import end_with
from pipeline.grammars.source import Unusable, to_llguidance
from pipeline.grammars.worker import Gone, receive, send
from pipeline.runtime.rust_panics import RustPanic, panics_as_errors
from pipeline.supervisor.process_usage import usage_of
from pipeline.text.formats.tool_format import Written

MAX_CHECKS = 8
"""At once; the others wait."""

MAX_BYTES = 512 * 1024**2
"""Memory that a check may take beyond what this process has."""

SHORT_S = 0.25
"""A check that takes longer makes way for everything else on the machine."""

LOW_PRIORITY = 5

HARDLY_S = 0.1
"""Of processor time: a check that has had less, on a machine that is busy, is no proof of anything when its time is up,
and goes on."""

LAST_S = 5.0
"""Longest that a check goes on so."""

MARGIN = 0.1
"""Of the time that a check may take: for its answer to be there in time."""


class Running:
    """A check and the child that makes it. Its time is over `timeout_s` after it was asked for; when it had to wait
    before, it has half of that."""

    def __init__(self, check: Check, pid: int, pipe: int, timeout_s: float) -> None:
        self.check, self.pid, self.pipe = check, pid, pipe
        self.began_s = time.monotonic()
        self.end_s = max(check.asked_s + timeout_s, self.began_s + timeout_s / 2)
        self.last_s = self.began_s + LAST_S
        self.is_slow = False
        self.parts: list[bytes] = []


class Checker:
    """The loop and what it holds."""

    def __init__(self, of: socket.socket, engine: Engine | None, why_not: str, timeout_s: float) -> None:
        self._socket, self._engine, self._why_not, self._timeout_s = of, engine, why_not, timeout_s
        self._limit_s = (1 - MARGIN) * timeout_s
        self._waiting: deque[Check] = deque()
        self._running: dict[int, Running] = {}
        """By pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(of, selectors.EVENT_READ)
        self._decoder = msgspec.msgpack.Decoder(Check)

    def loop(self) -> None:
        """Ends with Gone, when ingest has."""
        while True:
            for key, _ in self._selector.select(self._next_s()):
                if key.fileobj is self._socket:
                    self._waiting.append(self._decoder.decode(receive(self._socket)))
                else:
                    self._read(self._running[key.fd])
            self._watch()
            while self._waiting and len(self._running) < MAX_CHECKS:
                self._begin(self._waiting.popleft())

    def _next_s(self) -> float | None:
        """How long until a check is slow, or too slow."""
        now_s = time.monotonic()
        due = [run.end_s if run.is_slow else min(run.began_s + SHORT_S, run.end_s) for run in self._running.values()]
        return max(0.0, min(due) - now_s) if due else None

    def _begin(self, check: Check) -> None:
        if self._engine is None:
            self._answer(Checked(check.number, error=self._why_not))
            return
        reads, writes = os.pipe()
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                end_with(own_pid)
                self._socket.close()  # or ingest could not see that we are gone
                os.close(reads)
                bound_memory(MAX_BYTES)
                with os.fdopen(writes, "wb") as out:
                    out.write(msgspec.msgpack.encode(checked(check, self._engine)))
                code = 0
            finally:
                os._exit(code)
        os.close(writes)
        self._running[reads] = Running(check, pid, reads, self._limit_s)
        self._selector.register(reads, selectors.EVENT_READ)

    def _read(self, run: Running) -> None:
        if part := os.read(run.pipe, 2**20):
            run.parts.append(part)
        else:
            self._end(run, "")

    def _watch(self) -> None:
        """Slow checks give way, and those whose time is up end."""
        now_s = time.monotonic()
        for run in list(self._running.values()):
            if now_s >= run.end_s and now_s < run.last_s and usage_of(run.pid).cpu_s < HARDLY_S:
                run.end_s = min(now_s + self._limit_s, run.last_s)
            elif now_s >= run.end_s:
                self._end(run, f"it is too complex: checking it takes longer than {self._timeout_s:g} s")
            elif now_s >= run.began_s + SHORT_S and not run.is_slow:
                run.is_slow = True
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, run.pid, LOW_PRIORITY)

    def _end(self, run: Running, error: str) -> None:
        """The child has said all, or is given up."""
        self._selector.unregister(run.pipe)
        os.close(run.pipe)
        del self._running[run.pipe]
        if error:
            os.kill(run.pid, signal.SIGKILL)
        _, _, usage = os.wait4(run.pid, 0)
        try:
            answer = msgspec.msgpack.decode(b"".join(run.parts), type=Checked)
        except msgspec.DecodeError:  # what it had said when it broke off, if anything, is no answer
            answer = Checked(
                run.check.number,
                error=error or "it is too complex: checking it takes too much memory, or too deep a nesting",
                is_final=not error or usage.ru_utime + usage.ru_stime > self._limit_s / 4,
            )
        self._answer(msgspec.structs.replace(answer, took_s=usage.ru_utime + usage.ru_stime))

    def _answer(self, answer: Checked) -> None:
        send(self._socket, msgspec.msgpack.encode(answer))


def checked(check: Check, engine: Engine) -> Checked:
    """What becomes of it. Where it is calls, the tool whose schema is to blame is looked for."""
    try:
        with panics_as_errors():
            return _checked_all(check, engine)
    except RustPanic as panic:
        return Checked(check.number, error=f"it makes the library fail: {words_of(str(panic))}")


def _checked_all(check: Check, engine: Engine) -> Checked:
    answer = _checked(check, engine)
    if answer.error and check.kind == "calls":
        for place, schema in enumerate(msgspec.json.decode(check.source, type=Written).schemas.values()):
            alone = _checked(Check(check.number, "closed_schema", bytes(schema).decode()), engine)
            if alone.error:
                return msgspec.structs.replace(alone, place=place)
    return answer


def _checked(check: Check, engine: Engine) -> Checked:
    """All there is to check: that it is understood, that no keyword of it would be ignored, that it can be satisfied,
    and that it can be computed by."""
    try:
        grammar = to_llguidance(check.kind, check.source, engine.tokenizer)
    except Unusable as error:
        return Checked(check.number, error=str(error))
    matcher = engine.matcher(grammar)
    if matcher.is_error():
        return Checked(check.number, error=_in_our_words(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        return Checked(check.number, error=_in_our_words(warnings[0]))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        if "NoExtension" in matcher.get_error() or not matcher.is_error():
            return Checked(check.number, error="no text matches it")
        return Checked(check.number, error=_in_our_words(matcher.get_error()))
    return Checked(check.number, grammar)


def _in_our_words(error: str) -> str:
    words = words_of(error)
    if words.startswith("Unimplemented keys: "):
        keys = words.removeprefix("Unimplemented keys: ").strip("[]")
        return f"its keywords {keys} are not supported"
    if "oneOf constraints are not supported" in words:
        return 'its keyword "oneOf" is supported only where no value can match two of the schemas: use "anyOf"'
    if "recursion limit exceeded" in words:
        return "it is nested too deeply"
    return words


def main(of: socket.socket, model_dir: str, timeout_s: str) -> None:
    """Check until ingest ends."""
    engine, why_not = None, ""
    try:
        engine = Engine(Path(model_dir))
    except NoEngine as error:
        why_not = str(error)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(Gone):
        Checker(of, engine, why_not, float(timeout_s)).loop()
