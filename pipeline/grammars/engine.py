"""The model's tokenizer in llguidance's form, and the limits of its matchers."""

from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import read_text
from pipeline.runtime.process.rust_panics import panics_as_errors

LIMITS = LLParserLimits(verbose_errors=False, step_max_items=20_000)
"""The library's default limits (fuel per mask, items per row, lexer states), but two fifths of the items per mask: with
50,000, a chain of 300 rules took 0.35 s of CPU time for a mask, and schemas of 490 optional properties need less than
20,000. Without verbose errors, its messages do not quote the schema."""

MAX_MESSAGE_CHARS = 400
"""Maximum length of an error message for a client."""


class GrammarsUnsupported(Exception):
    """This model can't be used with grammars. The message says why."""


class Engine:
    """Creates matchers for the model in a folder. Takes 0.2 s and 60 MB for 49,152 ids. Raises NoEngine."""

    def __init__(self, model_dir: Path) -> None:
        config = ModelConfig.load(model_dir)
        if not config.eos_ids:
            raise GrammarsUnsupported("this model has no id that ends a sequence, so no output can be complete")
        source = read_text(model_dir / "tokenizer.json")
        self.vocab_size = config.vocab_size
        self.eos_ids = list(config.eos_ids)
        try:
            with panics_as_errors():
                self.tokenizer = self._tokenizer(source)
        except Exception as error:  # the library raises nothing more precise
            raise GrammarsUnsupported(
                f"this model's tokenizer can't be used with grammars: {short_message(str(error))}"
            ) from error

    def _tokenizer(self, source: str) -> LLTokenizer:
        try:
            return LLTokenizer(source, n_vocab=self.vocab_size, eos_token=self.eos_ids)
        except ValueError:  # it has more ids than the model; masks are cut to the model's ids
            return LLTokenizer(source, eos_token=self.eos_ids)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher of a grammar in llguidance's format. Raises nothing: check `get_error`."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)


def short_message(error: str) -> str:
    """The main line of one of the library's multi-line errors."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    message = errors[0] if errors else (lines[0] if lines else "unknown reason")
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
