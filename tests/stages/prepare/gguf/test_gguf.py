"""A .gguf file becomes the model that it was made from."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import LlamaForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipeline.config.settings import Settings
from pipeline.runtime.model import generation_config
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.rope import Llama3Rope
from pipeline.stages.prepare.gguf.tokenizers import tokenizer
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import GgufVocabulary
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.stage import prepare
from tests.stages.prepare import checkpoints


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return checkpoints.tiny_llama()


def prepared(path: Path) -> Path:
    return prepare(Settings(model=str(path), cache_dir=str(path.parent / "cache")))


SIZES_BY_LAYER = {
    "llama.attention.head_count": [4, 4],
    "llama.attention.head_count_kv": [2, 2],
    "llama.feed_forward_length": [96, 96],
}


def test_sizes_may_be_given_for_each_layer(tmp_path: Path, model: LlamaForCausalLM) -> None:
    config = ModelConfig.load(prepared(checkpoints.save_gguf(tmp_path / "a.gguf", model, metadata=SIZES_BY_LAYER)))
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (4, 2, 96)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_have_the_names_and_order_of_hugging_face(tmp_path: Path, bias: bool, tied: bool) -> None:
    model = checkpoints.tiny_llama(tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model))
    expected = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    found = checkpoints.weights_of(folder)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor if tensor.ndim == 1 else tensor.to(torch.bfloat16)), name
    config = ModelConfig.load(folder)
    assert (config.tie_embeddings, config.qkv_bias, config.out_bias, config.mlp_bias) == (tied, bias, bias, bias)


def test_the_config_is_the_models(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = checkpoints.save_gguf(
        tmp_path / "Tiny-Model.Q4_1.gguf", model, metadata={"tokenizer.ggml.eot_token_id": 5}, chat_template="{{ x }}"
    )
    folder = prepared(path)
    assert ModelConfig.load(folder) == ModelConfig(
        name="Tiny-Model",
        architecture="llama",
        num_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=608,
        max_position=256,
        rms_norm_eps=1e-6,
        rope_theta=5000.0,
        tie_embeddings=False,
        eos_ids=[2, 5],
        bos_id=1,
        weight_files=["model.safetensors"],
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    assert (folder / "chat_template.jinja").read_text() == "{{ x }}"


def divisors_of(factor: float, head_dim: int, theta: float) -> "np.ndarray[Any, Any]":
    """Llama 3's divisors as computed by transformers."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = checkpoints.tiny_llama(rope_parameters=rope, head_dim=head_dim).config
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    return (plain / frequencies.numpy()).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama_3s_rope_scaling_is_recognised(tmp_path: Path, factor: float) -> None:
    model = checkpoints.tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, head_dim=64)
    divisors = divisors_of(factor, 64, 500000.0)
    path = checkpoints.save_gguf(
        tmp_path / "tiny.gguf",
        model,
        extra_tensors={"rope_freqs.weight": divisors},
        metadata={"llama.attention.key_length": 64},
    )
    assert ModelConfig.load(prepared(path)).rope_scaling == Llama3Rope(
        factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
    )


def test_another_rope_scaling_is_rejected(tmp_path: Path, model: LlamaForCausalLM) -> None:
    divisors = {"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)}
    with pytest.raises(ModelError, match="not Llama 3's rope scaling"):
        prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, extra_tensors=divisors))


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.expert_count": 8}, r"llama\.expert_used_count is 0; it must be an integer from 1 to 8"),
        ({"llama.rope.scaling.type": "dynamic"}, r"llama\.rope\.scaling\.type is 'dynamic'"),
        ({"llama.attention.value_length": 8}, r"value_length is 8"),
        ({"llama.attention.sliding_window": "x"}, r"sliding_window is 'x', not of type"),
        ({"llama.rope.scale_linear": -2.0}, r"llama\.rope\.scale_linear is -2; it must be a positive number"),
        ({"llama.attention.head_count": 0}, r"embedding_length is 64; .* llama\.attention\.head_count = 0"),
        ({"llama.attention.head_count": 5}, r"embedding_length is 64; .* llama\.attention\.head_count = 5"),
        (
            {"llama.attention.head_count_kv": 3},
            r"llama\.attention\.head_count_kv is 3; it must be a divisor of \S+ = 4",
        ),
        ({"llama.attention.head_count_kv": 0}, r"llama\.attention\.head_count_kv is 0; it must be an integer"),
        (
            {"llama.attention.key_length": 15, "llama.rope.dimension_count": 15},
            r"llama\.attention\.key_length is 15; it must be even",
        ),
        ({"llama.context_length": 0}, r"llama\.context_length is 0; it must be an integer"),
        ({"llama.context_length": True}, r"llama\.context_length is True, not of type"),
        (
            {"llama.attention.layer_norm_rms_epsilon": float("nan")},
            r"layer_norm_rms_epsilon is nan; it must be a pos",
        ),
        ({"llama.rope.freq_base": 0.0}, r"llama\.rope\.freq_base is 0\.0; it must be a positive number"),
        (
            {"tokenizer.ggml.bos_token_id": 608},
            r"tokenizer\.ggml\.bos_token_id is 608; it must be an id of the vocabulary",
        ),
        (
            {"tokenizer.ggml.eos_token_id": 608},
            r"tokenizer\.ggml\.eos_token_id is 608; it must be an id of the vocabulary",
        ),
        (
            {"tokenizer.ggml.eot_token_id": 608},
            r"tokenizer\.ggml\.eot_token_id is 608; it must be an id of the vocabulary",
        ),
        (
            {"tokenizer.ggml.unknown_token_id": 608},
            r"tokenizer\.ggml\.unknown_token_id is 608; it must be an id of the vocabulary",
        ),
        ({"llama.attention.head_count_kv": [2, 4]}, r"head_count_kv is \[2, 4\]: layers of different sizes"),
        ({"llama.attention.head_count": [4]}, r"head_count is \[4\]; it must be an integer, or one for each layer"),
        ({"llama.feed_forward_length": ["a", "b"]}, r"feed_forward_length has values that are not of type"),
        ({"tokenizer.ggml.token_type": [1, 2]}, r"tokenizer\.ggml\.token_type has 2 values; \S+tokens has 608"),
        ({"tokenizer.ggml.tokens": ["a"] * 609}, r"tokenizer\.ggml\.tokens has 609 tokens, but \S+ has 608 rows"),
        ({"tokenizer.ggml.merges": ["xyzzy plugh"]}, r"tokenizer\.ggml\.merges does not fit"),
        ({"tokenizer.ggml.merges": [7]}, r"tokenizer\.ggml\.merges has values that are not of type"),
        ({"tokenizer.chat_template": b"\xff"}, r"tokenizer\.chat_template is not UTF-8 text"),
    ],
)
def test_the_error_for_an_unsupported_file_names_its_key(
    tmp_path: Path, model: LlamaForCausalLM, metadata: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, metadata=metadata))


@pytest.mark.parametrize(
    ("pre", "metadata", "begins"),
    [
        ("llama-bpe", {}, True),
        ("llama3", {}, True),
        ("llama-v3", {}, True),
        ("tekken", {}, True),
        ("gpt-2", {}, False),
        ("qwen2", {}, False),
        ("smaug-bpe", {}, False),
        ("llama-bpe", {"tokenizer.ggml.add_bos_token": False}, False),
        ("gpt-2", {"tokenizer.ggml.add_bos_token": True}, True),
    ],
)
def test_adding_bos_has_the_defaults_of_llama_cpp(
    tmp_path: Path, model: LlamaForCausalLM, pre: str, metadata: dict[str, Any], begins: bool
) -> None:
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, pre=pre, metadata=metadata))
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("fox").ids
    assert (ids[0] == 1, ModelConfig.load(folder).add_bos) == (begins, begins)


def test_other_architectures_tokenizers_and_tensors_are_rejected(tmp_path: Path, model: LlamaForCausalLM) -> None:
    with pytest.raises(
        ModelError,
        match=r"general\.architecture is 'mamba', which is not supported; `pipeline models --supported` lists",
    ):
        prepared(checkpoints.save_gguf(tmp_path / "a.gguf", model, architecture="mamba"))
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre is 'klingon'; supported are .*smollm"):
        prepared(checkpoints.save_gguf(tmp_path / "b.gguf", model, pre="klingon"))
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is missing"):
        prepared(checkpoints.save_gguf(tmp_path / "c.gguf", model, without="model.layers.1.mlp.up_proj.weight"))
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((4, 4), np.float32)}
    with pytest.raises(ModelError, match=r"ffn_gate_inp\.weight is not part of the model that the metadata"):
        prepared(checkpoints.save_gguf(tmp_path / "d.gguf", model, extra_tensors=extra))


@pytest.mark.parametrize("keep", [0, 3, 100, 5000, -1000])
def test_a_truncated_file_and_a_file_that_is_not_gguf_are_rejected(
    tmp_path: Path, model: LlamaForCausalLM, keep: int
) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        prepared(path)
    path.write_bytes(b"no model at all" * 100)
    with pytest.raises(ModelError, match="not a complete GGUF file"):
        prepared(path)


def test_a_changed_file_is_converted_again(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model)
    first = prepared(path)
    assert prepared(path) == first
    path.unlink()
    other = checkpoints.tiny_llama(num_hidden_layers=1)
    assert ModelConfig.load(prepared(checkpoints.save_gguf(path, other))).num_layers == 1


SPLITS = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}


@pytest.mark.parametrize("pre", SPLITS)
def test_the_tokenizer_is_the_one_the_file_was_made_from(tmp_path: Path, model: LlamaForCausalLM, pre: str) -> None:
    original = checkpoints.train_tokenizer(SPLITS[pre])
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, tokenizer=original, pre=pre)
    built = Tokenizer.from_file(str(prepared(path) / "tokenizer.json"))
    for text in checkpoints.TEXTS:
        encoding = built.encode(text)
        assert encoding.ids == original.encode(text).ids
        assert built.decode(encoding.ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-2"])
def test_splits_agree_with_transformers(tmp_path: Path, model: LlamaForCausalLM, pre: str) -> None:
    """Expected splits are in a file, made by transformers 5.23 from these GGUFs: 5.17 loses the field `pre`."""
    theirs = json.loads((Path(__file__).parents[3] / "data" / "gguf_splits.json").read_text())[pre]
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, pre=pre)
    built = Tokenizer.from_file(str(prepared(path) / "tokenizer.json"))
    for text, splits in zip(checkpoints.TEXTS, theirs, strict=True):
        assert [piece for piece, _ in built.pre_tokenizer.pre_tokenize_str(text)] == splits


def pieces_vocabulary(**changes: Any) -> GgufVocabulary:
    """A SentencePiece vocabulary: control tokens, bytes, letters, and joined pieces with decreasing scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    joined = ["▁t", "he", "▁the", "in", "ing", "▁a", "an", "and", "▁and", "er", "re", "▁▁", "ab", "bc", "abc"]
    tokens += [*joined, *letters]
    types += [1] * (len(joined) + len(letters))
    scores = [0.0] * 259 + [-float(i) for i in range(len(joined))] + [-100.0 - i for i in range(len(letters))]
    base: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "types": types,
        "scores": scores,
        "merges": [],
        "bos_id": 1,
        "eos_id": 2,
        "unknown_id": 0,
        "names": {},
        "end_ids": [2],
        "add_bos": True,
        "add_eos": False,
        "add_space_prefix": True,
    }
    return GgufVocabulary(**{**base, **changes})


def by_sentencepiece(vocabulary: GgufVocabulary, text: str) -> list[str]:
    """SentencePiece's BPE by definition: join the neighbours whose union scores best, leftmost first, until no union is
    in the vocabulary; unknown rest falls back to bytes."""
    scores = dict(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    pieces = [*("▁" + text.replace(" ", "▁"))]
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in scores]
        if not joins:
            break
        at = -max(joins)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [p for piece in pieces for p in ([piece] if piece in scores else [f"<0x{b:02X}>" for b in piece.encode()])]


@given(st.text(st.sampled_from("abcdeghinrt  \té🙂"), min_size=1, max_size=40))
def test_a_sentencepiece_vocabulary_merges_by_score(text: str) -> None:
    vocabulary = pieces_vocabulary()
    encoding = PIECES.encode(text)
    assert encoding.tokens == ["<s>", *by_sentencepiece(vocabulary, text)]
    assert PIECES.decode(encoding.ids) == text


PIECES = tokenizer.build(pieces_vocabulary(), "a test")


def test_bos_eos_and_space_are_added_only_if_the_file_requires_it() -> None:
    plain = tokenizer.build(pieces_vocabulary(add_bos=False, add_space_prefix=False), "a test")
    assert plain.encode("the").tokens == ["t", "he"]
    both = tokenizer.build(pieces_vocabulary(add_eos=True), "a test")
    assert both.encode("the").tokens == ["<s>", "▁the", "</s>"]
    assert both.encode("the", add_special_tokens=False).tokens == ["▁the"]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.model is 'rwkv'"):
        tokenizer.build(pieces_vocabulary(model="rwkv"), "a test")


@pytest.mark.parametrize("name", ["$B", "$A", "a:b", "$A:zz", "$5000000000", ""])
def test_bos_and_eos_may_have_any_name(name: str) -> None:
    """The library interprets `$A`, `$B` and `a:1` in a template differently, and panics on each text with `$B`."""
    tokens = pieces_vocabulary().tokens
    named = pieces_vocabulary(tokens=["<unk>", name, *tokens[2:]], add_eos=True)
    ids = tokenizer.build(named, "a test").encode("the").ids
    assert ids == [1, tokens.index("▁the"), 2]


def test_a_vocabulary_that_cannot_encode_texts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "_add_ends", break_template)
    with pytest.raises(ModelError, match="a test: its tokenizer cannot encode a text: index out of bounds"):
        tokenizer.build(pieces_vocabulary(), "a test")


def break_template(tokenizer: Tokenizer, _: GgufVocabulary) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(single="$A $B")


def test_recommended_sampling_parameters_are_kept(tmp_path: Path, model: LlamaForCausalLM) -> None:
    recommended = {
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": 0.95,
        "general.sampling.min_p": 0.0,
        "general.sampling.penalty_repeat": 1.05,
        "general.sampling.mirostat": 0,
    }
    folder = prepared(checkpoints.save_gguf(tmp_path / "tiny.gguf", model, metadata=recommended))
    expected = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.05)
    assert generation_config.load(Settings(), folder) == expected


def test_tokens_that_llama_cpp_never_samples_are_kept(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, metadata={"tokenizer.ggml.suppress_tokens": [7, -1, 5]})
    assert generation_config.excluded(Settings(), prepared(path)).runs(()) == [[7], [5]]
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, metadata={"tokenizer.ggml.suppress_tokens": ["a"]})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.suppress_tokens has values that are not of type"):
        prepared(path)


def test_a_sampling_parameter_of_another_type_is_an_error(tmp_path: Path, model: LlamaForCausalLM) -> None:
    path = checkpoints.save_gguf(tmp_path / "tiny.gguf", model, metadata={"general.sampling.top_k": "many"})
    with pytest.raises(ModelError, match=r"general\.sampling\.top_k is 'many', not of type"):
        prepared(path)
