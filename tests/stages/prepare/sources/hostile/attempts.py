"""Prepares an untrusted model in a process with little memory and time, so that a model that hangs or fills the memory
fails only its own test."""

import multiprocessing
import resource
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare import files
from pipeline.stages.prepare.gguf import file, model
from pipeline.stages.prepare.sources import folder, hub, wheel
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.tokenizers import tokenizer_probe
from pipeline.stages.prepare.weights import tensors

LOADED = (files, folder, file, model, hub, tensors, tokenizer_probe, wheel)
"""Modules that a child would otherwise import under its memory limit."""
MEMORY_BYTES = 1024**3
TIMEOUT_S = 120.0
U64 = struct.Struct("<Q").pack


def refusal(model: Path) -> str:
    """The message of the ModelError that rejects a model, which must be one line."""
    ours, theirs = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_try, args=(model, theirs))
    with warnings.catch_warnings():  # newer Pythons warn of forks with running threads, which do not affect the child
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S), f"preparing {model.name} did not end"
        words = ours.recv()
    except EOFError:
        words = None
    finally:
        child.kill()
        child.join()
    assert isinstance(words, str), f"preparing {model.name} ended with exit code {child.exitcode}"
    assert len(words.splitlines()) == 1
    return words


def _try(model: Path, answer: Any) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        prepare(Settings(model=str(model), cache_dir=str(model.parent / "cache")))
        answer.send(None)
    except ModelError as error:
        answer.send(str(error))


def config_of(model: Path) -> ModelConfig:
    return ModelConfig.load(prepare(Settings(model=str(model), cache_dir=str(model.parent / "cache"))))


def assert_matches(message: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        raise ModelError(message)
