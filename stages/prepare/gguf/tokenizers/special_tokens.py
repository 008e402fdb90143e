"""The special tokens of a .gguf file, by llama.cpp's rules: which end a reply, which are control tokens whatever their
type says, and which take the spaces beside them.

Files don't say all of it. Many name only the token that ends a text, and type the one that ends a turn as an ordinary
token. So llama.cpp knows such tokens by their text (`llama_vocab::impl::load` in src/llama-vocab.cpp), and some models
by their names. It shows <|channel|>, <|message|>, <|start|>, <|constrain|> and gpt-oss's <|end|> as text, because it
parses replies from texts. Here they stay control tokens: replies are parsed from ids.
"""

from collections.abc import Sequence

import msgspec

from pipeline.stages.prepare.gguf.metadata import Metadata

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


class Role(msgspec.Struct, frozen=True):
    """What one token is for."""

    keys: tuple[str, ...]
    """Keys of its id below `tokenizer.ggml.`. The last one that the file has counts."""
    texts: tuple[str, ...] = ()
    """Without a key, the token with the first of these texts that the vocabulary has."""
    ends: bool = False
    """Whether it ends a reply."""


ROLES = (
    Role(("eos_token_id",), ends=True),
    Role(
        ("eot_token_id",),
        (
            *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
            *("<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"),
        ),
        ends=True,
    ),
    Role(("eom_token_id",), ("<|eom_id|>",), ends=True),
    Role(
        ("fim_pre_token_id", "prefix_token_id"),
        (
            *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>"),
            *("<PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
        ),
    ),
    Role(
        ("fim_suf_token_id", "suffix_token_id"),
        (
            *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>"),
            *("<SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
        ),
    ),
    Role(
        ("fim_mid_token_id", "middle_token_id"),
        (
            *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>"),
            *("<MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
        ),
    ),
    Role(("fim_pad_token_id",), ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"), ends=True),
    Role(("fim_rep_token_id",), ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"), ends=True),
    Role(("fim_sep_token_id",), ("<|file_sep|>",), ends=True),
)
END_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
"""They end a reply in every model, but for `MESSAGE_END` and `NOT_GEMMA4`."""
MESSAGE_END, HARMONY = (
    "<|end|>",
    (({"<|return|>"}, {"<|call|>", "<|calls|>"}), ({"<|flush|>"}, {"<|call|>", "<|calls|>"})),
)
"""In gpt-oss and solar-open, which have one text of each set, it ends a message of a reply."""
NOT_GEMMA4, GEMMA4 = "</s>", "<|tool_response>"
"""In a vocabulary with `GEMMA4`, it is a tag of HTML."""

HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>")
"""The marks of gpt-oss's messages: found in texts even if the file types them as ordinary tokens."""

MASK_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")
MASK_PRE_TOKENIZERS = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
PHI3_NAMES, PHI3_KEEPS_SPACES = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
MODERN_BERT = "modern-bert"


class SpecialTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The special tokens of a file."""

    types: list[int]
    """Of each token."""
    end_ids: list[int]
    """Those that end a reply: the file's end of text first, then those of its other keys."""
    left_strip: frozenset[int]
    """Ids of tokens that take the spaces before them."""
    right_strip: frozenset[int]
    """Ids of tokens that take the spaces behind them."""


def find(metadata: Metadata, tokens: Sequence[str], types: Sequence[int]) -> SpecialTokens:
    """The special tokens of a vocabulary. Raises ModelError if a key's id is none of the vocabulary's."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = list(types)
    ends: list[int] = []
    by_text: list[int] = []
    for role in ROLES:
        given = [metadata.token_id(f"tokenizer.ggml.{key}", len(tokens)) for key in role.keys]
        token_id = next((i for i in reversed(given) if i is not None), None)
        if token_id is not None:
            ends += [token_id] if role.ends else []
        elif texts := [text for text in role.texts if text in ids]:
            token_id = ids[texts[0]]
            found[token_id] = CONTROL
            by_text += [token_id] if role.ends else []
    for token_id in (ids[text] for text in END_TEXTS if text in ids):
        found[token_id] = CONTROL
        by_text.append(token_id)
    for token_id in (ids[text] for text in HARMONY_MARKS if text in ids):
        found[token_id] = CONTROL if found[token_id] == NORMAL else found[token_id]
    ends = list(dict.fromkeys([*ends, *sorted(by_text)]))
    end_texts = {tokens[i] for i in ends}
    if any(all(end_texts & names for names in each) for each in HARMONY) and MESSAGE_END in end_texts:
        ends.remove(ids[MESSAGE_END])
    if {GEMMA4, NOT_GEMMA4} <= end_texts:
        ends.remove(ids[NOT_GEMMA4])
        found[ids[NOT_GEMMA4]] = NORMAL
    left, right = _strips(metadata, ids, found)
    return SpecialTokens(types=found, end_ids=ends, left_strip=left, right_strip=right)


def _strips(metadata: Metadata, ids: dict[str, int], types: list[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The ids of tokens that take the spaces before them, and behind them."""
    name = metadata.get("general.name", str, "").lower()
    pre = metadata.get("tokenizer.ggml.pre", str, "")
    architecture = metadata.get("general.architecture", str, "")
    if any(each in pre for each in MASK_PRE_TOKENIZERS) or any(each in architecture for each in MASK_ARCHITECTURES):
        return _ids_of(ids, "<mask>"), frozenset()
    if any(each in name for each in PHI3_NAMES):
        marked = {i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL, USER_DEFINED)}
        return frozenset(), frozenset(marked - _ids_of(ids, *PHI3_KEEPS_SPACES))
    if MODERN_BERT in name:
        return _ids_of(ids, "[MASK]"), frozenset()
    return frozenset(), frozenset()


def _ids_of(ids: dict[str, int], *texts: str) -> frozenset[int]:
    return frozenset(ids[text] for text in texts if text in ids)
