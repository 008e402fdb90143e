"""The checker process of ingest: it converts clients' grammars to llguidance's format, or returns an error.

    ingest ──Check──► this process ──fork──► a child for each check ──► Checked
                       one thread, the model's tokenizer     killed when its time is up

Each check runs in a child of its own, forked in a few milliseconds with the tokenizer in memory. So a check that never
ends, takes all memory or crashes the library just fails, and the others continue. Slow checks get a lower priority.
"""

import contextlib
import gc
import os
import re
import selectors
import signal
import socket
import time
from collections import deque
from pathlib import Path

import msgspec

from pipeline.grammars.checks import MAX_CHECKS, Check, Checked
from pipeline.grammars.engine import Engine, GrammarsUnsupported, limit_memory, short_message
from pipeline.grammars.entry import die_with_parent
from pipeline.grammars.source import InvalidGrammar, to_llguidance
from pipeline.grammars.worker import WorkerLostError, receive, send
from pipeline.runtime.process.process_usage import usage_of
from pipeline.runtime.process.rust_panics import RustPanic, panics_as_errors
from pipeline.text.formats.grammar.lark import LarkGrammar

MAX_BYTES = 512 * 1024**2
"""Maximum memory of a check, in addition to the memory of this process."""

SHORT_S = 0.25
"""After this time, a check gets a lower priority."""

LOW_PRIORITY = 5
"""The nice value of slow checks."""

MIN_CPU_S = 0.1
MIN_CPU_SHARE = 0.25
"""On a busy machine, a check that got less CPU time than this by its deadline gets more time: this share of its time
limit, or the seconds. If it gets no more until its last deadline, its answer says nothing about the grammar."""

MAX_EXTENDED_S = 5.0
"""Maximum duration of a check with such extensions."""

_REF_ERROR = re.compile(
    "Resource ('.*') is not present in a registry|Pointer ('.*') does not exist|Anchor ('.*') does not exist"
)
"""The library's words about a reference that leads nowhere"""
NO_BASE = "json-schema:///"
"""What it writes before a reference that is relative to no `$id`"""

MARGIN = 0.1
"""Fraction of the time limit that is reserved for returning the answer."""


class Running:
    """A check and its child process. The deadline is `timeout_s` after the request. A check that had to wait gets at
    least half of `timeout_s`."""

    def __init__(self, check: Check, pid: int, pipe: int, timeout_s: float) -> None:
        self.check, self.pid, self.pipe = check, pid, pipe
        self.began_s = time.monotonic()
        self.end_s = max(check.asked_s + timeout_s, self.began_s + timeout_s / 2)
        self.last_s = self.began_s + MAX_EXTENDED_S
        self.is_slow = False
        self.parts: list[bytes] = []


class Checker:
    """The main loop and its state. Without an engine, each check gets the answer `no_engine`."""

    def __init__(self, ingest: socket.socket, engine: Engine | None, no_engine: str, timeout_s: float) -> None:
        self._socket, self._engine, self._no_engine, self._timeout_s = ingest, engine, no_engine, timeout_s
        self._limit_s = (1 - MARGIN) * timeout_s
        self._min_cpu_s = max(MIN_CPU_S, MIN_CPU_SHARE * self._limit_s)
        self._waiting: deque[Check] = deque()
        self._running: dict[int, Running] = {}
        """By the descriptor of the child's pipe."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(ingest, selectors.EVENT_READ)
        self._decoder = msgspec.msgpack.Decoder(Check)

    def loop(self) -> None:
        """Run until ingest ends. Raises WorkerLostError then."""
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
        """Seconds until the next check becomes slow or reaches its deadline."""
        now_s = time.monotonic()
        due = [run.end_s if run.is_slow else min(run.began_s + SHORT_S, run.end_s) for run in self._running.values()]
        return max(0.0, min(due) - now_s) if due else None

    def _begin(self, check: Check) -> None:
        if self._engine is None:
            self._answer(Checked(check.number, error=self._no_engine))
            return
        reads, writes = os.pipe()
        own_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                die_with_parent(own_pid)
                self._socket.close()  # an open copy would hide the parent's death from ingest
                os.close(reads)
                limit_memory(MAX_BYTES)
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
        """Lower the priority of slow checks, and end those that are past their deadline."""
        now_s = time.monotonic()
        for run in list(self._running.values()):
            if now_s >= run.end_s and now_s < run.last_s and usage_of(run.pid).cpu_s < self._min_cpu_s:
                run.end_s = min(now_s + self._limit_s, run.last_s)
            elif now_s >= run.end_s:
                self._end(run, f"it is too complex: checking it takes longer than {self._timeout_s:g} s")
            elif now_s >= run.began_s + SHORT_S and not run.is_slow:
                run.is_slow = True
                with contextlib.suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, run.pid, LOW_PRIORITY)

    def _end(self, run: Running, error: str) -> None:
        """Answer a check whose child has closed its pipe, or kill the child and answer with `error`."""
        self._selector.unregister(run.pipe)
        os.close(run.pipe)
        del self._running[run.pipe]
        if error:
            os.kill(run.pid, signal.SIGKILL)
        _, _, usage = os.wait4(run.pid, 0)
        try:
            answer = msgspec.msgpack.decode(b"".join(run.parts), type=Checked)
        except msgspec.DecodeError:  # the child died before its answer was complete
            answer = Checked(
                run.check.number,
                error=error or "it is too complex: checking it takes too much memory, or too deep a nesting",
                is_final=not error or usage.ru_utime + usage.ru_stime >= self._min_cpu_s,
            )
        self._answer(msgspec.structs.replace(answer, took_s=usage.ru_utime + usage.ru_stime))

    def _answer(self, answer: Checked) -> None:
        send(self._socket, msgspec.msgpack.encode(answer))


def checked(check: Check, engine: Engine) -> Checked:
    """Run a check. If tool calls are invalid, find the tool whose schema is the cause."""
    try:
        with panics_as_errors():
            return _checked_all(check, engine)
    except RustPanic as panic:
        return Checked(check.number, error=f"it makes the library fail: {short_message(str(panic))}")


def _checked_all(check: Check, engine: Engine) -> Checked:
    answer = _checked(check, engine)
    if answer.error and check.kind == "calls":
        for index, schema in enumerate(msgspec.json.decode(check.source, type=LarkGrammar).schemas.values()):
            alone = _checked(Check(check.number, "closed_schema", bytes(schema).decode()), engine)
            if alone.error:
                return msgspec.structs.replace(alone, index=index)
    return answer


def _checked(check: Check, engine: Engine) -> Checked:
    """Check that the grammar is valid, no keyword of it would be ignored, some text matches it, and masks can be
    computed."""
    try:
        grammar = to_llguidance(check.kind, check.source, engine.tokenizer)
    except InvalidGrammar as error:
        return Checked(check.number, error=str(error))
    matcher = engine.matcher(grammar)
    if matcher.is_error():
        return Checked(check.number, error=_client_error(matcher.get_error()))
    if warnings := matcher.get_grammar_warnings():
        return Checked(check.number, error=_client_error(warnings[0]))
    mask = matcher.compute_bitmask()
    if matcher.is_error() or not any(mask):
        if "NoExtension" in matcher.get_error() or not matcher.is_error():
            return Checked(check.number, error="no text matches it")
        return Checked(check.number, error=_client_error(matcher.get_error()))
    return Checked(check.number, grammar)


def _client_error(error: str) -> str:
    """An error of the library, reworded for clients."""
    words = short_message(error)
    if words.startswith("Unimplemented keys: "):
        keys = words.removeprefix("Unimplemented keys: ").strip("[]")
        return f"its keywords {keys} are not supported"
    if "oneOf constraints are not supported" in words:
        return 'its keyword "oneOf" is supported only where no value can match two of the schemas: use "anyOf"'
    if (found := _REF_ERROR.search(words)) is not None:
        named = (found[1] or found[2] or found[3]).replace(NO_BASE, "")
        return f'its keyword "$ref" names {named}, which is no part of the schema itself'
    if "look-around" in words:
        return f'a pattern, such as one of its keyword "pattern", can\'t be used: {words}'
    if "'multipleOf' has too many digits" in words:
        return 'its keyword "multipleOf" has too many digits'
    if "Failed to generate regex for" in words:
        return "the bounds of a number (such as minimum and maximum) are too far apart, or contradict each other"
    if "recursion limit exceeded" in words:
        return "it is nested too deeply"
    return words


def main(ingest: socket.socket, model_dir: str, timeout_s: str) -> None:
    """Run the checker until ingest ends."""
    engine, no_engine = None, ""
    try:
        engine = Engine(Path(model_dir))
    except GrammarsUnsupported as error:
        no_engine = str(error)
    gc.collect()
    gc.freeze()
    with contextlib.suppress(WorkerLostError):
        Checker(ingest, engine, no_engine, float(timeout_s)).loop()
