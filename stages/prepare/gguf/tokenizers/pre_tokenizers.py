"""The pre-tokenizers that `tokenizer.ggml.pre` names: patterns that split a text into words before merging.

Each pattern splits the pieces that the ones before it left, and its matches become pieces of their own. The names,
patterns and defaults are those of llama.cpp (src/llama-vocab.cpp). If llama.cpp had to adapt the pattern of a model's
tokenizer.json to its own matcher, this is the original.
"""

from dataclasses import dataclass

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS_AND_SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+|{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # fmt: skip

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + "|" + WORDS_AND_SPACES.replace("{digits}", r"\p{N}{1,3}")
QWEN2 = CONTRACTIONS + "|" + WORDS_AND_SPACES.replace("{digits}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _by_case(digits: str, contraction: str = "", upper: str = UPPER, lower: str = LOWER, rest: str = "/") -> str:
    """Words that end where a lower-case letter is followed by an upper-case one, as in `camelCase`."""
    return (
        rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{contraction}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{rest}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


TEKKEN = _by_case(r"\p{N}")
GPT4O = _by_case(r"\p{N}{1,3}", CONTRACTIONS + "?")

CJK = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+{newlines}"
    r"|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (r"\p{N}{1,3}", CJK, DEEPSEEK3_WORDS.replace("{newlines}", r"[\r\n]*|\s*[\r\n]+"))
LETTERS_WITH_CASE = (
    "A-Za-z\u00b5À-ÖØ-öø-ƺƼ-ƿ\u01c4-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-\u03f5Ϸ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗ"
    "ὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼ\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124"
    "\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149ⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿ\ufb00"
    "-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
DEEPSEEK_CJK = "[一-龥ࠀ-一가-퟿]+"
EVERY_THREE_DIGITS = r"(?=(\p{N}{3})+(?!\p{N}))"
"""Matches no characters, so it splits a number before every third digit from its end."""
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
LINES = r"[^\n]+|\n+"
NOT_HAN = r"&&[^\p{Han}]]"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizer:
    """How one value of `tokenizer.ggml.pre` splits texts, and what a file need not say about its vocabulary."""

    splits: tuple[str, ...]
    """Oniguruma patterns."""
    whole_words: bool = False
    """Words are looked up in the vocabulary before merging."""
    adds_bos: bool = False
    adds_sep: bool = False
    """Texts end with the separator."""
    composes: bool = False
    """The models' own tokenizers normalize texts to NFC; llama.cpp leaves that to its caller."""
    is_byte_level: bool = True
    """Tokens spell bytes as GPT-2 does. Otherwise they are UTF-8 with ▁ for a space, and tokens such as <0x0A> stand
    for single bytes."""


def _table(*entries: tuple[str, PreTokenizer]) -> dict[str, PreTokenizer]:
    return {name: entry for names, entry in entries for name in names.split()}


DIGIT = r"\p{N}"
PRE_TOKENIZERS = _table(
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 jais trillion "
        "granite-docling",
        PreTokenizer(splits=(GPT2,)),
    ),
    ("olmo mpt", PreTokenizer(splits=(GPT2,), composes=True)),
    ("jina-v1-en jina-v2-code roberta-bpe", PreTokenizer(splits=(GPT2,), adds_sep=True)),
    (
        "starcoder refact smollm codeshell exaone minerva-7b mellum2",
        PreTokenizer(splits=(DIGIT, GPT2)),
    ),
    ("command-r", PreTokenizer(splits=(DIGIT, GPT2), composes=True)),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer(splits=(LLAMA3,), whole_words=True, adds_bos=True),
    ),
    ("smaug-bpe dbrx chatglm-bpe", PreTokenizer(splits=(LLAMA3,))),
    ("glm4 glm5", PreTokenizer(splits=(LLAMA3,), whole_words=True)),
    ("minicpm5", PreTokenizer(splits=(r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), whole_words=True)),
    (
        "jais-2",
        PreTokenizer(
            splits=(
                LLAMA3.removesuffix(r"|\s+(?!\S)|\s+")
                + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                + r"|\s",
            )
        ),
    ),
    ("qwen2 kormo f2llmv2 megrez", PreTokenizer(splits=(QWEN2,), composes=True)),
    ("deepseek-r1-qwen stablelm2 hunyuan solar-open grok-2", PreTokenizer(splits=(QWEN2,))),
    ("ufakzeka", PreTokenizer(splits=(QWEN2.removeprefix(CONTRACTIONS + "|"),))),
    (
        "qwen35",
        PreTokenizer(
            splits=(QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"),),
            composes=True,
        ),
    ),
    ("laguna", PreTokenizer(splits=(LINES, QWEN2))),
    ("seed-coder", PreTokenizer(splits=(QWEN2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+"),))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            splits=(
                r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
                r"|\s+(?!\S)|\s+",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            splits=(
                CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("tekken", PreTokenizer(splits=(TEKKEN,), whole_words=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer(splits=(GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer(splits=(GPT4O,), whole_words=True)),
    ("tiny_aya cohere2moe", PreTokenizer(splits=(r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O))),
    (
        "youtu",
        PreTokenizer(
            splits=(
                "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + CJK,
                _by_case(r"\p{N}", CONTRACTIONS + "?"),
            ),
            whole_words=True,
        ),
    ),
    (
        "kimi-k2",
        PreTokenizer(
            splits=(
                r"\p{Han}+",
                _by_case(
                    r"\p{N}{1,3}",
                    CONTRACTIONS + "?",
                    upper=UPPER.replace("]", NOT_HAN),
                    lower=LOWER.replace("]", NOT_HAN),
                    rest="",
                ),
            )
        ),
    ),
    ("superbpe", PreTokenizer(splits=(r"\p{N}+", EVERY_THREE_DIGITS))),
    (
        "deepseek-llm",
        PreTokenizer(
            splits=(
                r"[\r\n]",
                rf"\s?[{LETTERS_WITH_CASE}]+",
                r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
                r"\s+$",
                DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(splits=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_CJK, DIGIT)),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer(splits=DEEPSEEK3)),
    (
        "spark2_5",
        PreTokenizer(splits=(*DEEPSEEK3[:2], DEEPSEEK3_WORDS.replace("{newlines}", r"|[\r\n]"), DIGIT)),
    ),
    (
        "afmoe",
        PreTokenizer(
            splits=(
                r"\p{N}+",
                EVERY_THREE_DIGITS,
                "[一-鿿㐀-䶿豈-﫿\u3040-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿\u0e80-\u0effក-៿က-႟ꩠ-ꩿꧠ-꧿가-\ud7afᄀ-ᇿ]+",
                DEEPSEEK3[2],
            )
        ),
    ),
    ("falcon", PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
    ("bloom gpt3-finnish poro-chat", PreTokenizer(splits=(BLOOM,))),
    ("viking", PreTokenizer(splits=(BLOOM, DIGIT))),
    (
        "chameleon",
        PreTokenizer(
            splits=(
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]",
                GPT2,
            ),
            adds_bos=True,
        ),
    ),
    ("gemma4 granite-embed-multi-311m", PreTokenizer(splits=(LINES,), adds_bos=True, is_byte_level=False)),
    ("sarvam-moe", PreTokenizer(splits=(LINES,), is_byte_level=False)),
)
"""By the value of `tokenizer.ggml.pre`."""

UNNAMED = PreTokenizer(splits=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
"""What llama.cpp uses for a byte-level vocabulary without `tokenizer.ggml.pre`, as in files from before May 2024."""
