"""The text and the token strings of a prompt, for clients that ask for them. No sockets, no shared memory.

Ids are decoded as in detokenize (pipeline/text/incremental_decoder.py), with special tokens, so that the text of the
prompt and that of the output join to one text.
"""

from tokenizers import Tokenizer

from pipeline.runtime.messages import ChatPrompt, IdsPrompt, Prompt, TextPrompt
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary


class PromptEcho:
    """Shows prompts as text, for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = Vocabulary(tokenizer)

    def text(self, prompt: Prompt, ids: list[int], *, is_continued: bool, is_cut: bool = False) -> str:
        """The prompt's text: as the client wrote it unless it `is_cut`, decoded for chats and ids. If it `is_continued`
        by output, an incomplete character at the end is left to the output."""
        match prompt:
            case TextPrompt(text) if not is_cut:
                return text
            case TextPrompt() | ChatPrompt() | IdsPrompt():
                return self._decoded(ids, is_continued=is_continued)

    def token_strs(self, ids: list[int]) -> list[str]:
        """The vocabulary's string of each id; empty if only the model has the id."""
        return [self._vocabulary.token(token_id) or "" for token_id in ids]

    def pieces(self, ids: list[int]) -> list[bytes]:
        """The bytes of each id, including special tokens."""
        pieces = self._vocabulary.pieces(skip_special_tokens=False)
        return [piece.encode() if isinstance(piece, str) else piece for piece in map(pieces.__getitem__, ids)]

    def _decoded(self, ids: list[int], *, is_continued: bool) -> str:
        decoder = IncrementalDecoder(self._vocabulary, (), skip_special_tokens=False)
        text = "".join(map(decoder.add, ids))
        return text if is_continued else text + decoder.finish()
