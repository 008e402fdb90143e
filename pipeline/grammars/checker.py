"""The checker process of ingest: it converts clients' grammars to llguidance's format, or returns an error. Each check
runs in a child of its own (pipeline/runtime/workers/forked_jobs.py), which has the model's tokenizer."""

import contextlib
import gc
import re
import socket
from pathlib import Path

import msgspec

from pipeline.grammars.checks import MAX_CHECKS, Check, Checked
from pipeline.grammars.engine import Engine, GrammarsUnsupported, short_message
from pipeline.grammars.source import InvalidGrammar, to_llguidance
from pipeline.runtime.process.rust_panics import RustPanic, panics_as_errors
from pipeline.runtime.workers.forked_jobs import Ended, ForkedJobs
from pipeline.runtime.workers.worker import WorkerLostError, receive, send
from pipeline.text.formats.grammar.lark import LarkGrammar

MAX_BYTES = 512 * 1024**2
"""Maximum memory of a check, in addition to the memory of this process."""

_REF_ERROR = re.compile(
    "Resource ('.*') is not present in a registry|Pointer ('.*') does not exist|Anchor ('.*') does not exist"
)
"""The library's words about a reference that leads nowhere"""
NO_BASE = "json-schema:///"
"""What it writes before a reference that is relative to no `$id`"""


class Checker(ForkedJobs[Check]):
    """Without an engine, each check gets the answer `no_engine`."""

    def __init__(self, ingest: socket.socket, engine: Engine | None, no_engine: str, timeout_s: float) -> None:
        super().__init__(ingest, MAX_CHECKS, timeout_s, MAX_BYTES)
        self._socket, self._engine, self._no_engine, self._timeout_s = ingest, engine, no_engine, timeout_s
        self._decoder = msgspec.msgpack.Decoder(Check)

    def next_job(self) -> Check:
        return self._decoder.decode(receive(self._socket))

    def run(self, job: Check) -> bytes:
        answer = Checked(job.number, error=self._no_engine) if self._engine is None else checked(job, self._engine)
        return msgspec.msgpack.encode(answer)

    def ended(self, end: Ended[Check]) -> None:
        try:
            answer = msgspec.msgpack.decode(end.answer, type=Checked)
        except msgspec.DecodeError:  # the child died before its answer was complete
            answer = Checked(end.job.number, error=self._failure(end), is_final=end.is_final)
        send(self._socket, msgspec.msgpack.encode(msgspec.structs.replace(answer, took_s=end.cpu_s)))

    def _failure(self, end: Ended[Check]) -> str:
        if end.is_late:
            return f"it is too complex: checking it takes longer than {self._timeout_s:g} s"
        if end.signal_name:  # the library aborts for want of memory, and for want of stack
            return f"checking it ends with {end.signal_name}: it takes too much memory, or is nested too deeply"
        return "it is too complex: checking it takes too much memory" if end.lacked_memory else "checking it failed"


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
