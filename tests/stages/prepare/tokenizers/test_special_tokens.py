"""Folders with their special tokens in any of the files that transformers has written over the years give the ids,
names and prompts of its AutoTokenizer."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.ingest.templates.budget import Budget
from pipeline.stages.ingest.templates.template import ChatTemplate
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.sources.special_tokens import _merge
from pipeline.stages.prepare.sources.tokenizer_json import WrittenTokenizer, with_special_ids, write_tokenizer
from tests.stages.prepare.checkpoints import byte_level

TEXTS = [
    "<s>user\nhello</s>fox<unk> <|im_start|>user\nfox<|im_end|>\n<|im_end|> <|im_start|> <pad> <img> <tool> <eos> fox",
    "fox",
    " fox <|im_end|>  <|im_start|>  fox <a> <b> <A> <|endoftext|>",
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    "{{ eos_token }}"
    "|{{ pad_token }}|{{ unk_token }}|{{ image_token }}|{{ sep_token is defined }}|{{ bos_token is defined }}"
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    """As `save_pretrained` writes it."""
    base = {"content": content, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {**base, **flags}


CHATML = ["<|im_start|>", "<|im_end|>"]
DECODER = {
    "0": token("<unk>", special=True),
    "1": token("<s>", special=True),
    "2": token("</s>", special=True),
    "600": token("<|im_start|>", special=True),
    "601": token("<|im_end|>", special=True, rstrip=True),
    "602": token("<tool>", special=False),
}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TYPED = {"__type": "AddedToken"}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a folder beside tokenizer.json."""

    config: dict[str, Any] | None = None
    map: dict[str, Any] | None = None
    added: dict[str, int] | None = None
    model_type: str = "llama"
    adds: list[str] = []
    """Tokens that tokenizer.json has too, as ordinary added ones."""
    first: str | None = None
    """The token that tokenizer.json's post-processor adds."""


CASES = {
    "nothing": Case(),
    "empty": Case(config={}),
    "names": Case(config=NAMES),
    "a null bos": Case(config={**NAMES, "bos_token": None}),
    "a null bos, which the tokenizer adds": Case(config={**NAMES, "bos_token": None}, first="<s>"),
    "an empty bos": Case(config={"eos_token": "</s>", "bos_token": None, "pad_token": None}),
    "names as objects": Case(
        config={"bos_token": {**TYPED, **token("<s>")}, "eos_token": {**TYPED, **token("<|im_end|>", rstrip=True)}}
    ),
    "all names": Case(config={**NAMES, "pad_token": "<pad>", "unk_token": "<unk>", "sep_token": "<sep>"}),
    "eos absent": Case(config={**NAMES, "eos_token": "<|im_end|>"}),
    "eos is a word": Case(config={**NAMES, "eos_token": "fo"}),
    "eos is not special": Case(config={**NAMES, "eos_token": "<|im_end|>"}, adds=CHATML),
    "added_tokens_decoder": Case(config={**NAMES, "added_tokens_decoder": DECODER}),
    "added_tokens_decoder with gaps": Case(
        config={**NAMES, "added_tokens_decoder": {"900": token("<b>", special=True), "605": token("<a>", special=True)}}
    ),
    "added_tokens_decoder and the old files": Case(
        config={**NAMES, "added_tokens_decoder": DECODER}, map={"eos_token": "<a>"}, added={"<b>": 700}
    ),
    "an empty added_tokens_decoder": Case(config={**NAMES, "added_tokens_decoder": {}}, added={"<b>": 700}),
    "added_tokens_decoder changes flags": Case(
        config={**NAMES, "added_tokens_decoder": {"600": token("<|im_start|>", special=True, lstrip=True)}}, adds=CHATML
    ),
    "additional_special_tokens": Case(config={**NAMES, "additional_special_tokens": CHATML}),
    "extra_special_tokens": Case(config={**NAMES, "extra_special_tokens": CHATML}),
    "both lists": Case(config={**NAMES, "extra_special_tokens": ["<a>"], "additional_special_tokens": CHATML}),
    "an empty list and a full one": Case(
        config={**NAMES, "extra_special_tokens": [], "additional_special_tokens": CHATML}
    ),
    "an empty object and a full list": Case(
        config={**NAMES, "extra_special_tokens": {}, "additional_special_tokens": CHATML}
    ),
    "extra_special_tokens as objects": Case(
        config={**NAMES, "extra_special_tokens": [{**TYPED, **token("<|im_start|>", rstrip=True)}, "<|im_end|>"]}
    ),
    "extra_special_tokens by name": Case(config={**NAMES, "extra_special_tokens": {"image_token": "<img>"}}),
    "own names": Case(config={"image_token": "<img>", **NAMES, "extra_special_tokens": ["<a>"]}),
    "an own name as an object": Case(config={**NAMES, "image_token": {**TYPED, **token("<img>")}, "b_token": "<b>"}),
    "own names and named ones": Case(
        config={**NAMES, "b_token": "<b>", "extra_special_tokens": {"image_token": "<img>", "a_token": "<a>"}}
    ),
    "an own name as an object of no type": Case(config={**NAMES, "image_token": token("<img>"), "b_token": "<b>"}),
    "model_specific_special_tokens": Case(
        config={
            **NAMES,
            "model_specific_special_tokens": {"image_token": "<img>", "a_token": {**TYPED, **token("<a>")}},
        }
    ),
    "model_specific_special_tokens and own names": Case(
        config={**NAMES, "model_specific_special_tokens": {"image_token": "<img>"}, "b_token": "<b>"}
    ),
    "model_specific_special_tokens and names in the map": Case(
        config={**NAMES, "model_specific_special_tokens": {"image_token": "<img>", "b_token": "<b>"}},
        map={"extra_special_tokens": {"image_token": "<a>"}},
    ),
    "model_specific_special_tokens and names by extra_special_tokens": Case(
        config={
            **NAMES,
            "model_specific_special_tokens": {"image_token": "<img>"},
            "extra_special_tokens": {"b_token": "<b>"},
        }
    ),
    "an own name that the vocabulary has": Case(config={**NAMES, "image_token": "fox"}),
    "special_tokens_map": Case(map={"bos_token": token("<s>"), "eos_token": token("<|im_end|>"), "pad_token": "</s>"}),
    "special_tokens_map wins": Case(config=NAMES, map={"bos_token": "</s>", "eos_token": token("<|im_end|>")}),
    "special_tokens_map with a list": Case(
        config=NAMES, map={"additional_special_tokens": CHATML, "pad_token": {**token("<pad>"), "special": False}}
    ),
    "lists in both files": Case(
        config={**NAMES, "additional_special_tokens": ["<a>"]}, map={"additional_special_tokens": CHATML}
    ),
    "extra lists in both files": Case(
        config={**NAMES, "extra_special_tokens": ["<a>"]}, map={"extra_special_tokens": ["<a>", *CHATML]}
    ),
    "names in the map": Case(config=NAMES, map={"extra_special_tokens": {"image_token": "<img>"}}),
    "an own name in the map": Case(config=NAMES, map={"image_token": "<img>", "a_token": token("<a>")}),
    "added_tokens.json": Case(config=NAMES, added={"<|im_start|>": 601, "<|im_end|>": 600}),
    "added_tokens.json, special": Case(
        config={**NAMES, "additional_special_tokens": CHATML},
        added={"<|im_start|>": 600, "<|im_end|>": 601, "<a>": 602},
    ),
    "added_tokens.json, a name": Case(
        config={**NAMES, "eos_token": "<|im_end|>"}, added={"<|im_start|>": 600, "<|im_end|>": 601}
    ),
    "all old files": Case(
        config={**NAMES, "tokenizer_class": "PreTrainedTokenizerFast"},
        map={**NAMES, "additional_special_tokens": CHATML, "pad_token": "<pad>"},
        added={"<|im_start|>": 600, "<|im_end|>": 601, "<pad>": 602},
    ),
    "two names of a token, with other flags": Case(
        config={
            "sep_token": {**TYPED, **token("<|im_end|>", single_word=True, normalized=True)},
            "pad_token": {**TYPED, **token("<|im_end|>", lstrip=True)},
        }
    ),
    "a token's name and its own name, with other flags": Case(
        config={"pad_token": "fo", "x_token": {**TYPED, **token("fo", single_word=True, normalized=True)}}
    ),
    "a token of added_tokens_decoder with its own name, Qwen's class": Case(
        config={
            "added_tokens_decoder": {"600": token("<img>", special=False, lstrip=True)},
            "image_token": {**TYPED, **token("<img>", rstrip=True)},
        },
        model_type="qwen2",
    ),
    "names in the map replace the list": Case(
        config={**NAMES, "additional_special_tokens": ["fox"]}, map={"extra_special_tokens": {"image_token": "<unk>"}}
    ),
    "a special token again, not special, split": Case(
        config={"split_special_tokens": True}, added={"<s>": 600, "<pad>": 601}, first="<s>"
    ),
    "split": Case(config={**NAMES, "split_special_tokens": True}),
    "not split": Case(config={**NAMES, "split_special_tokens": False}),
    "a prefix": Case(config={**NAMES, "add_prefix_space": True}),
    "a prefix of GPT-2": Case(config={"add_prefix_space": True, "tokenizer_class": "GPT2TokenizerFast"}),
    "a prefix of a GPT-2 model": Case(config={"add_prefix_space": True}, model_type="gpt2"),
    "no prefix of a GPT-2 model": Case(config={"add_prefix_space": False, **NAMES}, model_type="gpt2"),
    "a prefix of a Mistral": Case(
        config={"add_prefix_space": True, "tokenizer_class": "GPT2Tokenizer"}, model_type="mistral"
    ),
    "Llama's class": Case(config={"tokenizer_class": "LlamaTokenizerFast"}),
    "GPT-2's class": Case(config={"tokenizer_class": "GPT2TokenizerFast"}, adds=["<|endoftext|>"]),
    "GPT-2's class, null": Case(
        config={"tokenizer_class": "GPT2TokenizerFast", "bos_token": None}, adds=["<|endoftext|>"]
    ),
    "the general class": Case(config={"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}),
    "transformers 5": Case(config={"tokenizer_class": "TokenizersBackend", **NAMES, "extra_special_tokens": CHATML}),
    "GPT-2's class by its model": Case(model_type="gpt2", config={}, adds=["<|endoftext|>"]),
}


def write(folder: Path, case: Case) -> Path:
    built = byte_level()
    built.add_special_tokens(["<unk>", "<s>", "</s>"])
    built.add_tokens(case.adds)
    if case.first is not None:
        number = built.token_to_id(case.first)
        built.post_processor = processors.TemplateProcessing(
            single=f"{case.first} $A", special_tokens=[(case.first, number)]
        )
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    files = {
        "config.json": {"model_type": case.model_type, "bos_token_id": 1, "eos_token_id": 2},
        "tokenizer_config.json": case.config,
        "special_tokens_map.json": case.map,
        "added_tokens.json": case.added,
    }
    for name, content in files.items():
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def prepared(source: Path, target: Path) -> tuple[WrittenTokenizer, ModelConfig]:
    target.mkdir()
    written = write_tokenizer(source, target, json.loads((source / "config.json").read_text()))
    config = ModelConfig(
        name="tiny",
        architecture="llama",
        num_layers=1,
        hidden_size=1,
        intermediate_size=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=620,
        max_position=64,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        tie_embeddings=True,
        eos_ids=[2],
        bos_id=1,
        weight_files=[],
    )
    return written, with_special_ids(config, written, source)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_ids_names_and_prompts_are_those_of_auto_tokenizer(tmp_path: Path, case: Case) -> None:
    transformers.logging.set_verbosity_error()
    source = write(tmp_path / "source", case)
    theirs = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    written, config = prepared(source, tmp_path / "target")
    ours = Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    assert ours.get_vocab() == written.tokenizer.get_vocab()
    ours.encode_special_tokens = config.split_special_tokens
    for text in TEXTS:
        assert ours.encode(text).ids == theirs(text)["input_ids"], text
        ids = [*theirs(text)["input_ids"], *range(600, ours.get_vocab_size())]
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert written.special.names == theirs.special_tokens_map
    messages = [{"role": "user", "content": "fox"}]
    theirs.chat_template = TEMPLATE
    prompt = ChatTemplate(TEMPLATE, written.special.names).render(
        {"messages": messages}, max_chars=1000, budget=Budget(10_000, 10.0)
    )
    assert prompt == theirs.apply_chat_template(messages, tokenize=False)
    if (eos := theirs.eos_token_id) is not None:
        assert config.eos_ids[0] == eos


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma", "qwen2", "qwen3", "phi", "opt", "gpt_neox", "llama"])
@pytest.mark.parametrize("tokenizer_class", [None, "PreTrainedTokenizerFast", "LlamaTokenizerFast", "GPT2Tokenizer"])
def test_names_that_no_file_has_are_those_of_the_class(
    tmp_path: Path, model_type: str, tokenizer_class: str | None
) -> None:
    config = {"tokenizer_class": tokenizer_class, "pad_token": "</s>"}
    source = write(tmp_path / "source", Case(config=config, model_type=model_type))
    theirs = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    written, _ = prepared(source, tmp_path / "target")
    assert written.special.names == theirs.special_tokens_map


def test_a_turn_of_chatml_whose_marks_only_tokenizer_config_has_is_few_ids_and_ends(tmp_path: Path) -> None:
    config = {"eos_token": "<|im_end|>", "additional_special_tokens": CHATML}
    written, model = prepared(write(tmp_path / "source", Case(config=config)), tmp_path / "target")
    start, end = (written.tokenizer.token_to_id(mark) for mark in CHATML)
    ids = written.tokenizer.encode("<|im_start|>fox<|im_end|>").ids
    assert (ids[0], ids[-1]) == (start, end)
    assert model.eos_ids == [end, 2]


def test_a_token_without_a_row_in_the_model_ends_nothing(tmp_path: Path) -> None:
    decoder = {str(700 + i): token(f"<x{i}>", special=True) for i in range(300)}
    case = Case(config={"eos_token": "<x299>", "bos_token": "<x298>", "added_tokens_decoder": decoder})
    _, model = prepared(write(tmp_path / "source", case), tmp_path / "target")
    assert (model.eos_ids, model.bos_id) == ([2], 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": []}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"x": "a"}}, "added_tokens_decoder is"),
        ({"added_tokens_decoder": {"3": 4}}, "added_tokens_decoder is 4; it must be a token's text"),
        ({"eos_token": 7}, "eos_token is 7; it must be a token's text"),
        ({"extra_special_tokens": "<a>"}, "extra_special_tokens is '<a>'; it must be a list"),
        ({"extra_special_tokens": [None]}, "extra_special_tokens is None"),
        (
            {"model_specific_special_tokens": ["<a>"]},
            r"model_specific_special_tokens is \['<a>'\]; it must be an object",
        ),
        ({"added_tokens_decoder": {"9" * 5000: "a"}}, "added_tokens_decoder is"),
        ({f"x{i}_token": "<s>" for i in range(2000)}, "2000 special tokens have names; at most 1024"),
    ],
)
def test_values_of_other_kinds_are_refused_by_name(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {message}"):
        prepared(write(tmp_path / "source", Case(config=config)), tmp_path / "target")


@pytest.mark.parametrize("value", [True, 7, "<a>"])
def test_a_list_is_not_merged_with_a_value_of_another_kind(tmp_path: Path, value: Any) -> None:
    case = Case(config={"extra_special_tokens": value}, map={"extra_special_tokens": ["<b>"]})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: extra_special_tokens is"):
        prepared(write(tmp_path / "source", case), tmp_path / "target")


class _Counted(dict[str, Any]):
    """A token that counts how often it is compared with another one."""

    num_compared = 0
    __hash__ = None

    def __eq__(self, other: object) -> bool:
        _Counted.num_compared += 1
        return super().__eq__(other)


def test_merging_lists_of_tokens_compares_none_with_each_other() -> None:
    found: dict[str, Any] = {"extra_special_tokens": [_Counted(content=f"<a{i}>") for i in range(1000)]}
    more = [_Counted(content=f"<{'ab'[i % 2]}{i}>") for i in range(1000)]
    _merge(found, {}, {"extra_special_tokens": more}, Path("special_tokens_map.json"))
    assert len(found["extra_special_tokens"]) == 1500
    assert _Counted.num_compared < 3000


HOSTILE_NORMALIZERS = {
    "backtracks": (
        {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"},
        f"{'a' * 40}b",
        "cannot be read: ",
    ),
    "expands": (
        {
            "type": "Sequence",
            "normalizers": [{"type": "Replace", "pattern": {"String": "q"}, "content": "q" * 100}] * 6,
        },
        "q",
        "normalizer can make ",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE_NORMALIZERS)
def test_a_normalizer_that_fails_on_a_token_of_another_file_is_an_error_of_one_line(tmp_path: Path, kind: str) -> None:
    normalizer, text, words = HOSTILE_NORMALIZERS[kind]
    decoder = {"600": token(text) | {"normalized": True}}
    source = write(tmp_path / "source", Case(config={"added_tokens_decoder": decoder}))
    path = source / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), "normalizer": normalizer}), "utf-8")
    with pytest.raises(ModelError, match=rf"tokenizer\.json:? {words}[^\n]+$"):
        prepared(source, tmp_path / "target")
