"""The model's tokenizer as llguidance wants it, and the limits that its matchers get."""

import resource
from pathlib import Path

import psutil
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.rust_panics import panics_as_errors

LIMITS = LLParserLimits(verbose_errors=False)
"""The library's own: fuel for each mask, items of a row, states of a lexer. Its errors then show no schema."""

MAX_WORDS = 400
"""Characters of an error that a client is told."""


class NoEngine(Exception):
    """There can be no grammars for this model; says why."""


class Engine:
    """Makes matchers for the model in a folder. Takes 0.2 s and 60 MB for 49,152 ids. Raises NoEngine."""

    def __init__(self, model_dir: Path) -> None:
        config = ModelConfig.load(model_dir)
        if not config.eos_ids:
            raise NoEngine("this model has no id that ends a sequence, so no output can be complete")
        source = (model_dir / "tokenizer.json").read_text(encoding="utf-8")
        self.vocab_size = config.vocab_size
        self.eos_ids = list(config.eos_ids)
        try:
            with panics_as_errors():
                self.tokenizer = self._tokenizer(source)
        except Exception as error:  # the library raises nothing more precise
            raise NoEngine(f"this model's tokenizer can't be used with grammars: {words_of(str(error))}") from error

    def _tokenizer(self, source: str) -> LLTokenizer:
        try:
            return LLTokenizer(source, n_vocab=self.vocab_size, eos_token=self.eos_ids)
        except ValueError:  # it has ids that the model has not, which are cut off from each mask
            return LLTokenizer(source, eos_token=self.eos_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """Of a text in llguidance's own form; look at `get_error`, for this raises nothing."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)


def words_of(error: str) -> str:
    """An error of the library without the drawings that go with it."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    words = said[0] if said else (lines[0] if lines else "no reason is known")
    return words if len(words) <= MAX_WORDS else words[:MAX_WORDS] + "…"


def bound_memory(num_bytes: int) -> None:
    """Let this process allocate `num_bytes` more. An allocation beyond that ends it, without a core file."""
    most = psutil.Process().memory_info().vms + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
