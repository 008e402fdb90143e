"""Builds a tokenizer from the vocabulary in a GGUF file.

`tokenizer.ggml.pre` names the pre-tokenizer, a pattern that llama.cpp defines (src/llama-vocab.cpp). With a wrong
pattern, ids decode to the same text but differ from those that the model was trained on. So unknown names are refused.
"""

from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizer_check import check_encodes

LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r", "codeshell")
"""Single digits, and GPT-2's pattern on the text between them."""
GPT2_LIKE = ("gpt-2", "olmo", "mpt", "phi-2", "jina-es", "jina-de")
SPLITS = {
    "llama-bpe": LLAMA3_SPLIT,
    "llama3": LLAMA3_SPLIT,
    "llama-v3": LLAMA3_SPLIT,
    "smaug-bpe": LLAMA3_SPLIT,
    "qwen2": QWEN2_SPLIT,
    "deepseek-r1-qwen": QWEN2_SPLIT,
    "tekken": TEKKEN_SPLIT,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Pre-tokenizers whose words are looked up in the vocabulary before merging."""
COMPOSED = ("qwen2",)
"""Pre-tokenizers of models that normalize text to NFC first; llama.cpp leaves that to its caller."""
ADDS_BOS = WHOLE_WORDS
"""Pre-tokenizers whose texts begin with BOS, unless the file says otherwise."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "▁"

MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 1024
MAX_VOCABULARY_BYTES = 16 * 1024**2
"""Of all tokens together. Finding SentencePiece's merges tries every split of every token."""
MAX_MERGES = 2**21


class GgufVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The `tokenizer.ggml.*` keys of a GGUF file."""

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float]
    merges: list[str]
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    add_bos: bool
    add_eos: bool
    add_space_prefix: bool


def build(vocabulary: GgufVocabulary, where: str) -> Tokenizer:
    """Build the tokenizer. Raises ModelError for unknown kinds; `where` names the file."""
    match vocabulary.model:
        case "gpt2":
            tokenizer = _byte_level(vocabulary, where)
        case "llama":
            tokenizer = _sentencepiece(vocabulary, where)
        case other:
            raise ModelError(
                f"{where}: tokenizer.ggml.model is {shown(other)}; supported are 'gpt2' and 'llama'. "
                "Use a Hugging Face folder with tokenizer.json instead"
            )
    _add_marked(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary)
    check_encodes(tokenizer, where)
    return tokenizer


def _byte_level(vocabulary: GgufVocabulary, where: str) -> Tokenizer:
    pairs = (merge.partition(" ") for merge in vocabulary.merges)
    try:
        with panics_as_errors():
            model = models.BPE(
                vocab={token: i for i, token in enumerate(vocabulary.tokens)},
                merges=[(left, right) for left, _, right in pairs],
                ignore_merges=vocabulary.pre in WHOLE_WORDS,
            )
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{where}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _split(vocabulary.pre, where)
    if vocabulary.pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(pre: str, where: str) -> Any:
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in GPT2_LIKE:
        return gpt2
    if pre in DIGITS_FIRST:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if pre in SPLITS:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLITS[pre]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join(sorted((*GPT2_LIKE, *DIGITS_FIRST, *SPLITS)))
    raise ModelError(
        f"{where}: tokenizer.ggml.pre is {shown(pre)}; supported are {known}. "
        "Use a Hugging Face folder with tokenizer.json instead"
    )


def _sentencepiece(vocabulary: GgufVocabulary, where: str) -> Tokenizer:
    tokens = vocabulary.tokens
    unknown = tokens[vocabulary.unknown_id] if vocabulary.unknown_id is not None else None
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(vocabulary, where),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    replace = normalizers.Replace(" ", SPACE)
    strip = [decoders.Strip(" ", 1, 0)] if vocabulary.add_space_prefix else []
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if vocabulary.add_space_prefix else replace
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges_by_score(vocabulary: GgufVocabulary, where: str) -> list[tuple[str, str]]:
    """SentencePiece merges the adjacent pair whose union has the best score. As BPE merges: every split of a token into
    two tokens, best token first. Raises ModelError if there are too many."""
    ids = {
        token: i
        for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind not in (UNKNOWN, CONTROL)
    }
    merges = []
    for token, i in ids.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        whole = sorted((ids[a], ids[b], a, b) for a, b in splits if a in ids and b in ids)
        merges += [(-vocabulary.scores[i], i, place, a, b) for place, (_, _, a, b) in enumerate(whole)]
        if len(merges) > MAX_MERGES:
            raise ModelError(f"{where}: tokenizer.ggml.tokens can be merged in more than {MAX_MERGES} ways")
    return [(a, b) for *_, a, b in sorted(merges)]


def _add_marked(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Add the tokens that are matched before splitting: control tokens, which decoding can skip, and user-defined."""
    marked = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = [AddedToken(t, normalized=False, special=True) for t, kind in marked if kind in (CONTROL, UNKNOWN)]
    own = [AddedToken(t, normalized=False, special=False) for t, kind in marked if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(own)


def _add_ends(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """Add BOS and EOS to texts that are encoded with special tokens."""
    before = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
    behind = [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []
    if not before and not behind:
        return
    # A template has its own syntax ("$B", "a:1"), so it refers to tokens by generated names.
    names = {f"id{i}": i for i in (*before, *behind)}
    single = [f"id{i}" for i in before] + ["$A"] + [f"id{i}" for i in behind]
    specials = [{"id": name, "ids": [i], "tokens": [vocabulary.tokens[i]]} for name, i in names.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
