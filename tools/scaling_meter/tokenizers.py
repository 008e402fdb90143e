"""Cases for tokenizers: every way of splitting texts into words, and every kind of model, with texts of one piece again
and again. What is encoded in ingest's loop must not hold up others; longer texts have threads."""

import functools
from collections.abc import Callable, Iterator, Mapping

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from pipeline.stages.ingest import loop_texts
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from tools.scaling_meter.case import Case
from tools.scaling_meter.texts import repeated

PIECES = (
    *loop_texts.PIECES,
    "ab",
    "A1",
    "  a",
    "\r\n",
    "一a",
    "'s",
    ". ",
    "▁",
    "각",
    "👩\u200d",
    "\u0300\u0316",
    "Ⅷ",
    "İ",
)
MAX_RUN = 64
"""Of one letter: vocabularies have such tokens of spaces and marks."""

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def cases() -> Iterator[Case]:
    splits = {"|".join(one.splits): (name, one.splits) for name, one in PRE_TOKENIZERS.items()}
    for name, patterns in splits.values():
        yield from _cases(f"words of {name}", functools.partial(_splitting, patterns))
    for name, tokenizer in MODELS.items():
        yield from _cases(name, tokenizer)


def _cases(name: str, tokenizer: Callable[[], Tokenizer]) -> Iterator[Case]:
    for piece in PIECES:
        for end in ("", loop_texts.END):
            make = functools.partial(_make, tokenizer, piece, end)
            yield Case(
                "tokenizer", f"{name}: {piece!r}{end}", make, loop_texts.LONG_BYTES, loop_n=loop_texts.LONG_BYTES
            )


def _make(tokenizer: Callable[[], Tokenizer], piece: str, end: str, n: int) -> Callable[[], object]:
    known, most = _measured(tokenizer)
    text = repeated(piece, end=end)(n)
    return lambda: known.encode_batch_fast([text]) if n <= most else None  # a thread does the rest


@functools.cache
def _measured(tokenizer: Callable[[], Tokenizer]) -> tuple[Tokenizer, int]:
    made = tokenizer()
    return made, loop_texts.longest(made)


def _bytes() -> models.BPE:
    """Bytes, and runs of one letter: each half of the next."""
    tokens, merges = list(ALPHABET), []
    for letter in ("a", "1", "!", "Ġ", "Ċ"):
        run = letter
        while len(run) < MAX_RUN:
            merges.append((run, run))
            run += run
            tokens.append(run)
    return models.BPE({token: i for i, token in enumerate(tokens)}, merges)


@functools.cache
def _splitting(patterns: tuple[str, ...]) -> Tokenizer:
    tokenizer = Tokenizer(_bytes())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer


def _sentencepiece() -> Tokenizer:
    """BPE of whole texts, without words."""
    tokenizer = Tokenizer(_bytes())
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def _unigram(max_run: int) -> Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), *(("a" * n, -3.0 - n / 10) for n in range(1, max_run))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def _wordpiece(max_chars: int) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(("[UNK]", "a", "##a", "aa", "##aa", "1", "##1", "!", "##!"))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=max_chars))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


MODELS: Mapping[str, Callable[[], Tokenizer]] = {
    "sentencepiece": functools.cache(_sentencepiece),
    "unigram": functools.cache(functools.partial(_unigram, 16)),
    "unigram of long pieces": functools.cache(functools.partial(_unigram, MAX_RUN)),
    "wordpiece": functools.cache(functools.partial(_wordpiece, 100)),
    "wordpiece of long words": functools.cache(functools.partial(_wordpiece, 10**6)),
}
