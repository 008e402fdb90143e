"""Builds a tokenizer from the vocabulary in a GGUF file.

`tokenizer.ggml.pre` names the pre-tokenizer, a pattern that llama.cpp defines (src/llama-vocab.cpp). With a wrong
pattern, ids decode to the same text but differ from those that the model was trained on. So unknown names are refused.
"""

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pipeline.runtime.process.rust_panics import panics_as_errors
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.metadata import MODEL_KEY
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS, UNNAMED, PreTokenizer
from pipeline.stages.prepare.gguf.tokenizers.special_tokens import CONTROL, UNKNOWN, USER_DEFINED
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import MAX_MERGES, PRE_KEY, GgufVocabulary
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.tokenizers.text_growth import MAX_GROWTH, longest_of_map
from pipeline.stages.prepare.tokenizers.tokenizer_check import check_encodes, check_num_added

SPACE = "▁"


def build(vocabulary: GgufVocabulary, where: str, warn: Callable[[str], None] | None = None) -> Tokenizer:
    """Build the tokenizer. Raises ModelError for unknown kinds; `where` names the file.

    `warn` takes a line about a file that names no pre-tokenizer.
    """
    match vocabulary.model:
        case "gpt2" | "gemma4":
            tokenizer = _merging(vocabulary, where, warn)
        case "llama":
            tokenizer = _sentencepiece(vocabulary, where)
        case "bert":
            tokenizer = _wordpiece(vocabulary)
        case "t5":
            tokenizer = _unigram(vocabulary, where)
        case other:
            raise ModelError(
                f"{where}: {MODEL_KEY} is {shown(other)}; supported are 'gpt2', 'llama', 'gemma4', 'bert' and 't5'. "
                "Use a Hugging Face folder with tokenizer.json instead"
            )
    _add_marked(tokenizer, vocabulary, where)
    _add_ends(tokenizer, vocabulary)
    check_encodes(tokenizer, where)
    return tokenizer


def _merging(vocabulary: GgufVocabulary, where: str, warn: Callable[[str], None] | None) -> Tokenizer:
    """BPE by the file's merges, in the words of its pre-tokenizer."""
    name = "gemma4" if vocabulary.model == "gemma4" else vocabulary.pre
    pre = _pre_tokenizer(name, where, warn)
    # A merge is two tokens with a space between; the first may begin with one.
    pairs = ((merge[:1] + left, right) for merge in vocabulary.merges for left, _, right in [merge[1:].partition(" ")])
    try:
        with panics_as_errors():
            model = models.BPE(
                vocab={token: i for i, token in enumerate(vocabulary.tokens)},
                merges=list(pairs),
                ignore_merges=pre.whole_words,
                byte_fallback=not pre.is_byte_level,
            )
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{where}: tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    tokenizer = Tokenizer(model)
    splits: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.splits]
    if pre.is_byte_level:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _pre_tokenizer(name: str, where: str, warn: Callable[[str], None] | None) -> PreTokenizer:
    if name == "default":
        if warn is not None:
            warn(
                f"{where} has no {PRE_KEY}, as old files: texts are split by llama.cpp's default, which may differ "
                "from what the model was trained on. Convert the model again, or get a newer file"
            )
        return UNNAMED
    if (found := PRE_TOKENIZERS.get(name)) is None:
        raise ModelError(
            f"{where}: {PRE_KEY} is {shown(name)}; supported are {', '.join(sorted(PRE_TOKENIZERS))}. "
            "Use a Hugging Face folder with tokenizer.json instead"
        )
    return found


def _wordpiece(vocabulary: GgufVocabulary) -> Tokenizer:
    """llama.cpp's converter writes the beginnings of words with ▁ and the rest of words without ##."""
    tokens = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_whole = kind in (CONTROL, UNKNOWN, USER_DEFINED)
        tokens[token if is_whole else token[1:] if token.startswith(SPACE) else f"##{token}"] = i
    unknown = vocabulary.tokens[vocabulary.unknown_id] if vocabulary.unknown_id is not None else "[UNK]"
    tokenizer = Tokenizer(models.WordPiece(vocab=tokens, unk_token=unknown))
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=vocabulary.lowercase, strip_accents=vocabulary.strip_accents
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def _unigram(vocabulary: GgufVocabulary, where: str) -> Tokenizer:
    """SentencePiece's unigram model: the split into tokens with the best sum of scores."""
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    if (longest := longest_of_map(vocabulary.charsmap)) > MAX_GROWTH:
        raise ModelError(
            f"{where}: tokenizer.ggml.precompiled_charsmap makes {longest} characters of one; at most {MAX_GROWTH} are "
            "supported"
        )
    try:
        with panics_as_errors():
            tokenizer = Tokenizer(models.Unigram(pieces, unk_id=vocabulary.unknown_id, byte_fallback=False))
            rules: list[Any] = [normalizers.Precompiled(vocabulary.charsmap)] if vocabulary.charsmap else []
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"{where}: its tokens, scores or precompiled_charsmap are invalid: {error}") from error
    if vocabulary.remove_extra_whitespaces:
        rules += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if vocabulary.add_space_prefix:  # not by the pre-tokenizer, which adds none before a space
        rules.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(rules)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never")
    scheme = "always" if vocabulary.add_space_prefix else "never"
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme=scheme)
    return tokenizer


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
        merges += [(-vocabulary.scores[i], i, index, a, b) for index, (_, _, a, b) in enumerate(whole)]
        if len(merges) > MAX_MERGES:
            raise ModelError(f"{where}: tokenizer.ggml.tokens can be merged in more than {MAX_MERGES} ways")
    return [(a, b) for *_, a, b in sorted(merges)]


def _add_marked(tokenizer: Tokenizer, vocabulary: GgufVocabulary, where: str) -> None:
    """Add the tokens that are matched before splitting: control tokens, which decoding can skip, and user-defined.
    Raises ModelError if there are too many."""

    def added(token_id: int, special: bool) -> AddedToken:
        strips = {"lstrip": token_id in vocabulary.left_strip, "rstrip": token_id in vocabulary.right_strip}
        return AddedToken(vocabulary.tokens[token_id], normalized=False, special=special, **strips)

    kinds = list(enumerate(vocabulary.types))
    num_marked = sum(kind in (CONTROL, UNKNOWN, USER_DEFINED) for kind in vocabulary.types)
    check_num_added(num_marked, where, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([added(i, True) for i, kind in kinds if kind in (CONTROL, UNKNOWN)])
    tokenizer.add_tokens([added(i, False) for i, kind in kinds if kind == USER_DEFINED])


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
