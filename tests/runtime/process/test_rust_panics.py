"""A panic of a Rust library is an ordinary error; every other exception passes through unchanged."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from llguidance import LLTokenizer

from pipeline.runtime.process.rust_panics import RustPanic, is_panic, panics_as_errors
from tests.stages.ingest import models as tiny


def panic_in_llguidance() -> None:
    state = json.loads(tiny.byte_tokenizer().to_str())
    state["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    LLTokenizer(json.dumps(state), n_vocab=258, eos_token=[257])


@pytest.mark.parametrize(
    ("panic", "message"), [(tiny.panic, "retry-limit-in-match over"), (panic_in_llguidance, "precompiled_charsmap")]
)
def test_a_panic_becomes_an_error_with_its_message(panic: object, message: str) -> None:
    assert callable(panic)
    with pytest.raises(BaseException, match=message) as caught:
        panic()
    assert not isinstance(caught.value, Exception) and is_panic(caught.value)
    with pytest.raises(RustPanic, match=message) as error, panics_as_errors():
        panic()
    assert error.value.__cause__ is not None and is_panic(error.value.__cause__)


class PanicException(BaseException):
    """Has only the name of a panic."""


@pytest.mark.parametrize(
    "error",
    [
        *(KeyboardInterrupt(), SystemExit(3), GeneratorExit(), asyncio.CancelledError(), PanicException("no panic")),
        *(ValueError("x"), StopIteration(4), MemoryError()),
    ],
    ids=repr,
)
def test_other_exceptions_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, panics_as_errors():
        raise error
    assert caught.value is error


def test_a_tokenizer_that_has_panicked_still_works_in_all_threads() -> None:
    tokenizer = tiny.panicking_tokenizer()
    expected = tiny.byte_tokenizer().encode("hello</s>").ids

    def encode(number: int) -> list[int]:
        text = tiny.PANICS if number % 2 else "hello</s>"
        with panics_as_errors():
            return list(tokenizer.encode_batch_fast([text])[0].ids)

    with ThreadPoolExecutor(4) as threads:
        for number, future in enumerate([threads.submit(encode, number) for number in range(12)]):
            if number % 2:
                assert isinstance(future.exception(), RustPanic)
            else:
                assert future.result() == expected
