"""A tokenizer.json from the vocabulary in a GGUF file.

Built directly: `tokenizer.ggml.pre` names how text is split before merging, and each name stands for a pattern that
llama.cpp defines (src/llama-vocab.cpp). A wrong split still gives ids that decode to the same text, but not those that
the model was trained on, so a name that isn't known here is refused.
"""

from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pipeline.runtime.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizer_check import begun_ids

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
"""Each digit by itself, then GPT-2's pattern on what lies between."""
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
"""Splits after which a word that is in the vocabulary is taken as it is, without merging."""
COMPOSED = ("qwen2",)
"""Splits of models whose own tokenizers compose characters first (NFC); llama.cpp leaves that to whoever calls it."""
ADDS_BOS = WHOLE_WORDS
"""Splits whose texts begin with the id for the beginning, unless the file says otherwise."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
SPACE = "▁"

MAX_TOKENS = 2**20
MAX_TOKEN_BYTES = 1024
MAX_VOCABULARY_BYTES = 16 * 1024**2
"""Of all tokens together: SentencePiece's merges are looked for at every place of every token."""
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
    """The tokenizer. Raises ModelError for kinds that aren't known; `where` names the file."""
    match vocabulary.model:
        case "gpt2":
            tokenizer = _byte_level(vocabulary, where)
        case "llama":
            tokenizer = _sentencepiece(vocabulary, where)
        case other:
            raise ModelError(
                f"{where}: tokenizer.ggml.model is {shown(other)}; known are 'gpt2' and 'llama'. "
                "Give the model as a Hugging Face folder with its tokenizer.json"
            )
    _add_marked(tokenizer, vocabulary)
    _add_ends(tokenizer, vocabulary)
    begun_ids(tokenizer, where)
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
        f"{where}: tokenizer.ggml.pre is {shown(pre)}; known are {known}. "
        "Give the model as a Hugging Face folder with its tokenizer.json"
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
    """SentencePiece joins the neighbours whose union scores best; as merges: every split of a token into two, the best
    token first."""
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
    """Tokens that are found whole in any text: control tokens, which decoding may leave out, and the user's own."""
    marked = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    control = [AddedToken(t, normalized=False, special=True) for t, kind in marked if kind in (CONTROL, UNKNOWN)]
    own = [AddedToken(t, normalized=False, special=False) for t, kind in marked if kind == USER_DEFINED]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(own)


def _add_ends(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    """What encoding with special tokens puts before and behind the text."""
    before = [vocabulary.bos_id] if vocabulary.add_bos and vocabulary.bos_id is not None else []
    behind = [vocabulary.eos_id] if vocabulary.add_eos and vocabulary.eos_id is not None else []
    if not before and not behind:
        return
    # The library reads what stands in a template ("$B", "a:1"), so the tokens have names of ours in it.
    names = {f"id{i}": i for i in (*before, *behind)}
    single = [f"id{i}" for i in before] + ["$A"] + [f"id{i}" for i in behind]
    specials = [{"id": name, "ids": [i], "tokens": [vocabulary.tokens[i]]} for name, i in names.items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=specials)
