"""Encodes a text for a measurement of a model, as plain text: special tokens in it are not recognized."""

from pathlib import Path

from tokenizers import Tokenizer

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.prepare.sources.source import ModelError


def encode(folder: Path, text: str) -> tuple[list[int], int | None]:
    """The token ids of a text by the tokenizer of a prepared folder, and the BOS id that they begin with, None if the
    tokenizer adds none. An EOS that it adds is left out.

    Raises ModelError if the tokenizer can't encode the text, or gives an id that the model doesn't have.
    """
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            tokenizer.no_truncation()
            tokenizer.no_padding()
            tokenizer.encode_special_tokens = True
            encoding = tokenizer.encode(text)
            ids, is_added = encoding.ids, encoding.special_tokens_mask
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"the model's tokenizer cannot encode the text: {error}") from error
    while ids and is_added[len(ids) - 1]:
        ids.pop()
    vocab_size = ModelConfig.load(folder).vocab_size
    if ids and max(ids) >= vocab_size:
        raise ModelError(
            f"the model's tokenizer gives the text the token id {max(ids)}, but the model's largest is {vocab_size - 1}"
        )
    return ids, ids[0] if ids and is_added[0] else None
