"""The forms that .gguf files of users have: what they say of their vocabulary, and what they leave out."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from gguf import GGMLQuantizationType as Kind

from pipeline.stages.prepare.gguf.tokenizers.special_tokens import (
    CONTROL,
    END_TEXTS,
    NORMAL,
    ROLES,
    UNKNOWN,
    USER_DEFINED,
)
from tools.tokenizer_vectors.vocabularies import Keys, vocabularies

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = ROOT / "tests" / "data" / "templates"

CONTENT = "{{ messages[0]['content'] }}"
"""A template that writes a text as it is: its special tokens are the client's."""
ADDED_SCORE = -1000.0
UNUSED = 5
SUPPRESSED = 7
"""Each of so many ids is not sampled in the files that say so."""
MARK = re.compile(r"<\|[^\s|<>{}'\"\\]{1,40}\|?>|<｜[^｜<>]{1,40}｜>|</?[a-z_]{1,30}\|?>|\[/?[A-Z_]{3,20}\]")
"""The tokens that a chat template writes."""


class FileVariant(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `changes` are keys below `tokenizer.ggml`: tokens for keys of ids, None for keys that it lacks."""

    name: str
    vocabulary: str = "byte-level"
    added: Mapping[str, int] = {}
    """Tokens that the vocabulary has too, and their types."""
    changes: Mapping[str, Any] = {}
    templates: Mapping[str, str] = msgspec.field(default_factory=lambda: {"": CONTENT})
    """By their names; the default's is empty."""
    model_name: str = "tiny"
    architecture: str = "llama"
    parameters: Mapping[str, Any] = {}
    """Further keys below the architecture's name."""
    tied: bool = False
    weights: Kind = Kind.F32
    is_chat: bool = False
    """Whether chats are compared. Otherwise texts are, and all special tokens."""

    @property
    def keys(self) -> Keys:
        """The keys below `tokenizer.ggml` with their values."""
        keys = dict(_vocabulary(self.vocabulary))
        added = {token: kind for token, kind in self.added.items() if token not in keys["tokens"]}
        keys["tokens"] = [*keys["tokens"], *added]
        keys["token_type"] = [*keys["token_type"], *added.values()]
        if "scores" in keys:
            keys["scores"] = [*keys["scores"], *[ADDED_SCORE] * len(added)]
        for key, value in self.changes.items():
            if value is None:
                keys.pop(key, None)
            elif key.endswith("_id") and isinstance(value, str):
                keys[key] = keys["tokens"].index(value)
            else:
                keys[key] = value
        return keys

    @property
    def types(self) -> list[int]:
        """Of each token: the file's, but another one than NORMAL for all that were added."""
        keys = dict(_vocabulary(self.vocabulary))
        known = dict(zip(keys["tokens"], keys["token_type"], strict=True))
        return [known.get(token, CONTROL) for token in self.keys["tokens"]]


@cache
def _vocabulary(name: str) -> Keys:
    return vocabularies()[name]


def variants() -> list[FileVariant]:
    """All of them. Vocabularies of WordPiece have no models that write texts."""
    made = [*_vocabularies(), *_flags(), *_special_tokens(), *_weights(), *_architectures(), *_templates()]
    assert len({variant.name for variant in made}) == len(made)
    return made


def _vocabularies() -> Iterator[FileVariant]:
    for name in ("byte-level", "gemma4", "sentencepiece", "sentencepiece without prefix"):
        yield FileVariant(name=name, vocabulary=name)
    for name in ("unigram", "unigram with all spaces"):
        yield FileVariant(name=name, vocabulary=name)
    yield FileVariant(name="unigram, no add_space_prefix", vocabulary="unigram", changes={"add_space_prefix": None})
    for pre in ("llama-bpe", "qwen2", "tekken", "gpt-4o", "deepseek-v3", "deepseek-llm", "falcon", "bloom", "qwen35"):
        yield FileVariant(name=f"pre {pre}", changes={"pre": pre})
    yield FileVariant(name="no pre", changes={"pre": None})


def _flags() -> Iterator[FileVariant]:
    for vocabulary, short in (("byte-level", "bpe"), ("sentencepiece", "spm"), ("unigram", "unigram")):
        for key in ("add_bos_token", "add_eos_token"):
            for value in (True, False):
                if (short, key, value) == ("unigram", "add_bos_token", True):
                    continue  # it has no BOS
                yield FileVariant(name=f"{short}, {key} {value}", vocabulary=vocabulary, changes={key: value})
        for key in ("bos_token_id", "eos_token_id", "unknown_token_id"):
            yield FileVariant(name=f"{short}, no {key}", vocabulary=vocabulary, changes={key: None})
    both = {"add_bos_token": True, "add_eos_token": True}
    yield FileVariant(name="bpe, bos and eos", changes=both)
    yield FileVariant(name="spm, bos and eos", vocabulary="sentencepiece", changes=both)
    yield FileVariant(name="bpe, add_sep", changes={"add_sep_token": True, "seperator_token_id": "</s>"})
    yield FileVariant(name="spm, no scores", vocabulary="sentencepiece", changes={"scores": None})
    yield FileVariant(name="spm, add_space_prefix True", vocabulary="sentencepiece", changes={"add_space_prefix": True})
    for vocabulary, short in (("byte-level", "bpe"), ("sentencepiece", "spm")):
        suppressed = {"suppress_tokens": [-1, *range(0, 900, SUPPRESSED), 10**6]}
        yield FileVariant(name=f"{short}, suppress_tokens", vocabulary=vocabulary, changes=suppressed)
    yield FileVariant(name="bpe, add_space_prefix True", changes={"add_space_prefix": True})
    yield FileVariant(name="bpe, add_space_prefix False", changes={"add_space_prefix": False})
    for name in ("byte-level", "sentencepiece"):
        yield FileVariant(name=f"{name}, no token_type", vocabulary=name, changes={"token_type": None})
        yield FileVariant(name=f"{name}, one end", vocabulary=name, changes={"bos_token_id": "</s>"})
        unused = {"[unused0]": UNUSED, "<extra_id_0>": USER_DEFINED, "<pad>": CONTROL, "<gone>": UNKNOWN}
        yield FileVariant(name=f"{name}, unused", vocabulary=name, added=unused, changes={"padding_token_id": "<pad>"})


def _special_tokens() -> Iterator[FileVariant]:
    kinds = ((NORMAL, "normal"), (CONTROL, "control"), (USER_DEFINED, "user-defined"))
    keys = {key: f"<{key[:-9]}>" for role in ROLES for key in role.keys[:1] if key != "eos_token_id"}
    named = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<unk>", "<mask>", "[MASK]"]
    harmony = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"]
    ends = [text for text in END_TEXTS if text not in (*harmony, "</s>", "<|tool_response>", "<|flush|>", "<|calls|>")]
    for vocabulary, short in (("byte-level", "bpe"), ("sentencepiece", "spm")):

        def variant(name: str, tokens: Sequence[str], kind: int, model: str = "tiny", **changes: Any) -> FileVariant:
            added = dict.fromkeys(tokens, kind)
            return FileVariant(name=name, vocabulary=vocabulary, added=added, changes=changes, model_name=model)  # noqa: B023

        # llama.cpp takes any of a role's texts, in the order of its hash table: a file has one of each role.
        for number in range(max(len(role.texts) for role in ROLES[2:])):
            kind, word = kinds[number % len(kinds)]
            texts = [role.texts[number] for role in ROLES[2:] if number < len(role.texts)]
            yield variant(f"{short}, roles by text {number}, {word}", texts, kind)
        for kind, word in kinds:
            yield variant(f"{short}, ends, {word}", ends, kind)
            yield variant(f"{short}, gpt-oss, {word}", harmony, kind)
        yield variant(f"{short}, solar-open", ["<|end|>", "<|flush|>", "<|calls|>"], CONTROL)
        yield variant(f"{short}, keys", list(keys.values()), NORMAL, **keys)
        yield variant(f"{short}, keys of control tokens", list(keys.values()), CONTROL, **keys)
        yield variant(f"{short}, Gemma 4", ["<turn|>", "<|tool_response>", "<|turn>", "<eos>"], CONTROL)
        yield variant(f"{short}, Phi-3", named, CONTROL, "Phi-3-mini")
        yield variant(f"{short}, Phi-3, user-defined", named, USER_DEFINED, "phi3")
        yield variant(f"{short}, ModernBERT", named, CONTROL, "ModernBERT modern-bert-base")
    yield FileVariant(name="bpe, jina", added=dict.fromkeys(named, CONTROL), changes={"pre": "jina-v2-code"})


def _weights() -> Iterator[FileVariant]:
    for kind in (Kind.BF16, Kind.F16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1):
        yield FileVariant(name=f"weights {kind.name}", weights=kind)
    yield FileVariant(name="tied", tied=True)
    yield FileVariant(name="tied, Q8_0", tied=True, weights=Kind.Q8_0)


YARN = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 16,
    "rope.scaling.yarn_attn_factor": 0.1 * math.log(4) + 1,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
"""As llama.cpp's converter writes it for OLMo 3."""


def _architectures() -> Iterator[FileVariant]:
    """Windows are shorter than replies."""
    window = {"attention.sliding_window": 8}
    layers = [True, False, False, True, True]
    olmo: dict[str, Mapping[str, Any]] = {
        "OLMo 2": {},
        "OLMo 2, YaRN": YARN,
        "OLMo 3": window,
        "OLMo 3, YaRN": window | YARN,
        "OLMo 3, list of layers, YaRN": window | YARN | {"attention.sliding_window_pattern": layers},
    }
    for name, parameters in olmo.items():
        yield FileVariant(name=name, architecture="olmo2", parameters=parameters)
    yield FileVariant(name="llama, YaRN", parameters=YARN)


NOT_BY_LLAMA_CPP = ("gemma3",)
"""Templates with a test that llama.cpp's Jinja lacks: its server does not start."""
BEGINS = ("llama3", "llama4", "gemma", "mistral", "ministral", "deepseek", "command", "smollm3")
SENTENCEPIECE = ("gemma2", "mistral3", "phi3.5")
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|END_OF_TURN_TOKEN|>")


def _templates() -> Iterator[FileVariant]:
    sources = {path.name.removesuffix(".jinja"): path.read_text("utf-8") for path in sorted(TEMPLATES.glob("*.jinja"))}
    for name, source in sources.items():
        if name.endswith(".tool_use") or name in NOT_BY_LLAMA_CPP:
            continue
        vocabulary = "sentencepiece" if name in SENTENCEPIECE else "byte-level"
        flags = {"add_bos_token": True} if name.startswith(BEGINS) else {}
        yield _chat(f"chat {name}", vocabulary, {"": source}, flags)
        if name.startswith(BEGINS):
            yield _chat(f"chat {name}, add_bos False", vocabulary, {"": source}, {"add_bos_token": False})
    both = {"": sources["llama3.1"], "tool_use": sources["hermes3.tool_use"]}
    yield _chat("chat with a template for tools", "byte-level", both, {"add_bos_token": True})
    yield _chat("chat, BOS of the file alone", "byte-level", {"": sources["qwen2.5"]}, {"add_bos_token": True})
    yield _chat("chat, BOS and EOS of the file", "sentencepiece", {"": sources["phi3.5"]}, {"add_eos_token": True})
    yield _chat("chat, no BOS token", "byte-level", {"": sources["llama3.2"]}, {"bos_token_id": None})


def _chat(name: str, vocabulary: str, templates: Mapping[str, str], flags: Mapping[str, Any]) -> FileVariant:
    marks = sorted({mark for source in templates.values() for mark in MARK.findall(source)} - {"<s>", "</s>"})
    added = {mark: CONTROL if mark[:2] in ("<|", "<｜") or mark[0] == "[" else USER_DEFINED for mark in marks}
    ends = [mark for mark in TURN_ENDS if mark in added]
    changes = {**({"eos_token_id": ends[0]} if ends else {}), **flags}
    return FileVariant(
        name=name, vocabulary=vocabulary, added=added, changes=changes, templates=templates, is_chat=True
    )
