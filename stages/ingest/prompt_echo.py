"""What a client sees of a prompt: its text and the names of its ids. No sockets, no shared memory.

Text is made of ids as detokenize makes it (pipeline/text/incremental_decoder.py), special tokens shown, so that a
prompt's text and the output's text after it are one text.
"""

from tokenizers import Tokenizer

from pipeline.runtime.messages import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary


class PromptEcho:
    """Prompts as text, for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)

    def text(self, prompt: Prompt, ids: list[int], *, goes_on: bool, is_cut: bool = False) -> str:
        """A text as it was written, unless a part of it `is_cut` off; of chats and ids, what the ids say. Where output
        goes on behind it, a character that the last ids begin and do not complete is left to the output."""
        match prompt:
            case TextPrompt(text) if not is_cut:
                return text
            case TextPrompt() | ChatPrompt() | IdsPrompt():
                return self._said(ids, goes_on=goes_on)

    def token_strs(self, ids: list[int]) -> list[str]:
        """What the vocabulary calls each id; empty where it has no such id, though the model does."""
        return [self._vocabulary.token(token_id) or "" for token_id in ids]

    def pieces(self, ids: list[int]) -> list[bytes]:
        """The bytes of text that each id stands for, special tokens as they are written."""
        pieces = self._vocabulary.pieces(skip_special_tokens=False)
        return [piece.encode() if isinstance(piece, str) else piece for piece in map(pieces.__getitem__, ids)]

    def _said(self, ids: list[int], *, goes_on: bool) -> str:
        text = IncrementalDecoder(self._vocabulary, (), skip_special_tokens=False)
        said = "".join(map(text.add, ids))
        return said if goes_on else said + text.finish()
