"""The text or bytes of each token id, from the tokenizer's own tables.

The decoder of a `tokenizer.json` joins tokens and decodes their bytes. These kinds work token by token, so text can
grow by one id without looking back:

    ByteLevel                                   each letter of a token stands for a byte (GPT-2, Llama 3, SmolLM2 …)
    Replace, ByteFallback, Fuse, maybe Strip    tokens are text, and `<0xE2>` is a byte (Llama 2, Mistral, Gemma …)
    Replace                                     tokens are text (SentencePiece without bytes)
    Metaspace                                   the same, without the first space (T5, XLM-RoBERTa)
    WordPiece                                   tokens are words, with a space before all but the first; `##` continues
                                                a word (BERT)

An id's piece is `str` if it consists of whole characters, and `bytes` if it may be part of one. The table is filled on
first use of each id, so a large vocabulary costs nothing at start.
"""

import codecs
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.errors import UserError
from pipeline.runtime.model.model_folder import read_file

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Piece = str | bytes

WHOLE_PARTS = "replace"
"""An incomplete character becomes one U+FFFD, as Unicode recommends and ByteLevel does (Python's own handler)."""

EACH_BYTE = "pipeline.each_byte"
"""An incomplete character becomes one U+FFFD for each of its bytes, as ByteFallback does."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(EACH_BYTE, _replace_each_byte)


class _Pattern(msgspec.Struct, rename="pascal"):
    string: str | None = None
    regex: str | None = None


class _ByteLevel(msgspec.Struct, tag_field="type", tag="ByteLevel"):
    pass


class _Replace(msgspec.Struct, tag_field="type", tag="Replace"):
    pattern: _Pattern
    content: str


class _ByteFallback(msgspec.Struct, tag_field="type", tag="ByteFallback"):
    pass


class _Fuse(msgspec.Struct, tag_field="type", tag="Fuse"):
    pass


class _Strip(msgspec.Struct, tag_field="type", tag="Strip"):
    content: str
    start: int
    stop: int


class _Metaspace(msgspec.Struct, tag_field="type", tag="Metaspace"):
    replacement: str
    prepend_scheme: str = "always"


class _WordPiece(msgspec.Struct, tag_field="type", tag="WordPiece"):
    prefix: str
    cleanup: bool

    def first(self, token: str) -> str:
        """The text of a token before which there is none."""
        if self.cleanup:
            for written, content in _CLEANUPS:
                token = token.replace(written, content)
        return token

    def later(self, token: str) -> str:
        """The text of another token."""
        if token.startswith(self.prefix):
            return self.first(token.removeprefix(self.prefix))
        return self.first(f" {token}")


_CLEANUPS = (
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
)
"""What WordPiece's `cleanup` replaces in the text of each token, in this order."""


class _Sequence(msgspec.Struct, tag_field="type", tag="Sequence"):
    decoders: list[_ByteLevel | _Metaspace | _Replace | _ByteFallback | _Fuse | _Strip | _WordPiece]


_Decoder = _ByteLevel | _Metaspace | _Replace | _WordPiece | _Sequence


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    """Unigram's has the tokens in the order of their ids, with their scores."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    """The part of a `tokenizer.json` that decoding needs."""

    model: _Model
    decoder: msgspec.Raw
    added_tokens: list[_AddedToken]

    def tokens(self) -> list[str | None] | None:
        """The token of each id; None unless ids are those that `Tokenizer.from_file` gives."""
        # It ignores the ids of added tokens that the vocabulary lacks, and numbers them from its end on.
        vocab = self.model.vocab
        if isinstance(vocab, list):
            vocab = {content: token_id for token_id, (content, _) in enumerate(vocab)}
            if len(vocab) < len(self.model.vocab):
                return None
        tokens: list[str | None] = [None] * len(vocab)
        for content, token_id in vocab.items():
            if not 0 <= token_id < len(vocab) or tokens[token_id] is not None:
                return None
            tokens[token_id] = content
        for token in self.added_tokens:
            if token.id != vocab.get(token.content, len(tokens)) or not token.content:
                return None
            if token.id == len(tokens):
                vocab[token.content] = token.id
                tokens.append(token.content)
        return tokens


def _byte_letters() -> dict[str, int]:
    """The letters that represent bytes in byte-level vocabularies.

    Printable Latin-1 bytes represent themselves. The others are numbered from U+0100 on, as in GPT-2's
    `bytes_to_unicode` (https://github.com/openai/gpt-2/blob/master/src/encoder.py).
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_LETTERS = _byte_letters()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _whole_or_part(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class Pieces(dict[int, Piece]):
    """Id → piece. Unknown and hidden ids are the empty string."""

    def __init__(self, vocabulary: "Vocabulary", hidden: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._hidden = hidden

    def __missing__(self, token_id: int) -> Piece:
        token = self._vocabulary.token(token_id)
        piece = "" if token is None or token_id in self._hidden else self._vocabulary.piece(token)
        self[token_id] = piece
        return piece

    def first(self, token_id: int) -> Piece | None:
        """The piece of an id before which there is no text; None if it is unknown or hidden."""
        token = self._vocabulary.token(token_id)
        return None if token is None or token_id in self._hidden else self._vocabulary.first_piece(token)


class Vocabulary:
    """The decoding half of a tokenizer. Raises UserError if its decoder is of another kind than those above."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        decoder = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b"null"
        added = tokenizer.get_added_tokens_decoder().items()
        special_ids = frozenset(token_id for token_id, token in added if token.special)
        self._read(decoder, special_ids, tokenizer.id_to_token)

    def _read(self, decoder: bytes, special_ids: frozenset[int], token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self.special_ids = special_ids
        self._replacements: list[tuple[str, str]] = []
        self.strip = ""
        """Removed from the start of a text, at most `num_strip` times."""
        self.num_strip = 0
        self._words: _WordPiece | None = None
        self._read_decoder(decoder)
        self._shown = {True: Pieces(self, special_ids), False: Pieces(self, frozenset())}

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Read a `tokenizer.json`.

        Reading only what decoding needs takes a quarter of the time of `Tokenizer.from_file`, which also prepares to
        encode. Vocabularies of another form than BPE's, and ids with gaps, are left to that.
        """
        vocabulary = cls.__new__(cls)
        if vocabulary._read_file(path):
            return vocabulary
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_buffer(read_file(path)))

    @classmethod
    def silent(cls) -> "Vocabulary":
        """One in which every id is the empty string, for models that generate no text."""
        vocabulary = cls.__new__(cls)
        vocabulary._read(b'{"type": "ByteLevel"}', frozenset(), lambda token_id: None)
        return vocabulary

    def _read_file(self, path: Path) -> bool:
        """Whether the file is in the usual form."""
        try:
            file = msgspec.json.decode(read_file(path), type=_TokenizerFile)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        if (tokens := file.tokens()) is None:
            return False
        special_ids = frozenset(token.id for token in file.added_tokens if token.special)
        try:
            self._read(bytes(file.decoder), special_ids, lambda id: tokens[id] if id < len(tokens) else None)
        except UserError:
            return False
        return True

    def pieces(self, *, skip_special_tokens: bool) -> Pieces:
        return self._shown[skip_special_tokens]

    def token(self, token_id: int) -> str | None:
        return self._token_of(token_id) if token_id >= 0 else None

    @property
    def has_words(self) -> bool:
        """Whether tokens are words, and the first one of a text has a piece of its own."""
        return self._words is not None

    def first_piece(self, token: str) -> Piece:
        """The piece of a token that begins a text."""
        return self.piece(token) if self._words is None else self._words.first(token)

    def piece(self, token: str) -> Piece:
        if self._words is not None:
            return self._words.later(token)
        if self._is_byte_level:
            try:
                return _whole_or_part(bytes(map(_BYTE_LETTERS.__getitem__, token)))
            except KeyError:
                return token  # an added token, which is plain text
        for pattern, content in self._replacements:
            token = token.replace(pattern, content)
        if self._has_bytes and (byte := _BYTE_TOKEN.fullmatch(token)):
            return _whole_or_part(bytes.fromhex(byte[1]))
        return token

    def _read_decoder(self, state: bytes) -> None:
        try:
            decoder = msgspec.json.decode(state, type=_Decoder)
        except msgspec.ValidationError as error:
            raise _unsupported(state) from error
        steps = decoder.decoders if isinstance(decoder, _Sequence) else [decoder]
        self._is_byte_level, self._has_bytes, self.errors = False, True, EACH_BYTE
        replaces: list[Any] = []
        match steps:
            case [_ByteLevel()]:
                self._is_byte_level, self.errors = True, WHOLE_PARTS
            case [_Metaspace(replacement, scheme)]:
                # Of a first token of several spaces, it would leave out all.
                self._has_bytes, self.strip, self.num_strip = False, " ", int(scheme != "never")
                self._replacements.append((replacement, " "))
            case [_WordPiece() as words]:
                self._has_bytes, self._words = False, words
            case [*replaces, _ByteFallback(), _Fuse()]:
                pass
            case [*replaces, _ByteFallback(), _Fuse(), _Strip(stop=0) as strip]:
                self.strip, self.num_strip = strip.content, strip.start
            case [*replaces]:
                self._has_bytes = False
        for replace in replaces:
            if not isinstance(replace, _Replace) or replace.pattern.string is None:
                raise _unsupported(state)
            self._replacements.append((replace.pattern.string, replace.content))


def _unsupported(state: bytes) -> UserError:
    return UserError(
        "the decoder in the model's tokenizer.json is not supported; supported are ByteLevel, "
        f"Metaspace, WordPiece, Replace, and Replace, ByteFallback, Fuse, Strip; it is {state.decode()}"
    )
