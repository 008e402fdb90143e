"""Writes what the gateway needs of a tokenizer, and adds the tokens that end a reply in the model's chat format to the
ids that end a sequence.

Models name them in generation_config.json, but .gguf files and fine-tuned models often name only one: gpt-oss ends a
call with `<|call|>` and an answer with `<|return|>`.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from pipeline.config.settings import ChatSettings
from pipeline.runtime.model import vocabulary_size
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.text.formats import added_tokens
from pipeline.text.formats.chat_formats import ChatFormats


def add_reply_ends(folder: Path, timeout_s: float) -> None:
    """Write the added tokens and the size of the vocabulary of a prepared folder, and change its config. Raises
    ModelError if finding the format takes longer than `timeout_s`: preparing a model may take an hour, but not because
    of its chat template."""
    config = ModelConfig.load(folder)
    added_tokens.write(folder)
    vocabulary_size.write(folder)
    with _deadline(
        timeout_s,
        f"{config.name}: recognizing the format of its chat template took more than {timeout_s:g} s "
        "(supervisor.start_timeout_s)",
    ):
        formats = ChatFormats.load(folder, ChatSettings())
    stops = [one for one in formats.stops if one < config.vocab_size]
    eos_ids = list(dict.fromkeys([*config.eos_ids, *stops]))
    if eos_ids != list(config.eos_ids):
        msgspec.structs.replace(config, eos_ids=eos_ids).save(folder)


@contextmanager
def _deadline(timeout_s: float, message: str) -> Iterator[None]:
    """Raise ModelError in the main thread after a time, also within a regular expression. In another thread, which has
    no signals, nothing happens: stages are threads only in a debugger, which turns timeouts off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: Any) -> NoReturn:
        raise ModelError(message)

    before = signal.signal(signal.SIGALRM, expired)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
