"""Folders whose class of transformers rebuilds the tokenizer, and those without tokenizer.json or without
tokenizer_config.json, give the ids, names and prompts of AutoTokenizer, or are refused by name.

PIPELINE_ALL_CASES=1 pytest tests/stages/prepare/tokenizers/test_tokenizer_classes.py      all folders, in half a minute
"""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from pipeline.stages.ingest.templates.budget import Budget
from pipeline.stages.ingest.templates.template import ChatTemplate
from pipeline.stages.prepare.architectures import HF_ARCHITECTURES
from pipeline.stages.prepare.families.architecture import TEXT_PARTS
from pipeline.stages.prepare.sources import tokenizer_class
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.text.incremental_decoder import IncrementalDecoder
from pipeline.text.vocabulary import Vocabulary
from tests.stages.prepare import checkpoints
from tests.stages.prepare.tokenizers.test_special_tokens import TEMPLATE, prepared, token

TEXTS = [
    "<s>user\nhello</s>fox<unk> quick  fox </s> The<x> fox <|endoftext|>12 345 I'LL don't\n\n  x",
    " fox",
    "fox É ｱ 漢字🙂\u00a0é e\u0301",
    "<bos>The fox<eos>  fox",
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SPECIAL = ["<unk>", "<s>", "</s>"]
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>", "<pad>", "<mask>", "<unk>"]
WORDS += ["fox", "user", "hello", "the", "quick", "##x", "x", "1", "##2", "##3", "e", "do", "don", "t", "'", "\u6f22"]
PIECES = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    "<mask>",
    "\u2581",
    "fox",
    "\u2581fox",
    "user",
    "h",
    "e",
    "l",
    "o",
    "\u6f22",
    "1",
]
ENCODERS = {
    **dict.fromkeys(("bert", "distilbert", "mpnet", "nomic_bert"), "words"),
    **dict.fromkeys(("xlm-roberta", "camembert", "gte"), "pieces"),
}
"""The kind of tokenizer.json that the classes of encoders read."""


@cache
def built(kind: str) -> str:
    """A tokenizer.json: "sp" as older versions wrote it for SentencePiece, "bytes", "unigram", "large": Mistral's
    pattern that transformers may replace, or those of encoders: "words" as of BERT and "pieces" as of XLM-RoBERTa."""
    if kind == "words":
        made = Tokenizer(models.WordPiece({text: i for i, text in enumerate(WORDS)}, unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece()
        return str(with_ends(made, "[CLS]", "[SEP]").to_str())
    if kind == "pieces":
        made = Tokenizer(models.Unigram([(text, -float(i)) for i, text in enumerate(PIECES)], PIECES.index("<unk>")))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        return str(with_ends(made, "<s>", "</s>").to_str())
    if kind == "large":
        parts = json.loads(checkpoints.byte_level().to_str())
        vocab = parts["model"]["vocab"]
        vocab |= {f"<{i}>": i for i in range(len(vocab), 100_100)}
        made = Tokenizer.from_str(json.dumps(parts))
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(r"\w+|\s+|[^\w\s]+"), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    elif kind == "bytes":
        made = checkpoints.byte_level()
    elif kind == "unigram":
        made = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("fox", -3.0)], 0))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Metaspace()
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=[*SPECIAL, *bytes_], show_progress=False)
        made.train_from_iterator([line for text in checkpoints.TEXTS[:3] for line in text.split()] * 8, trainer)
        model = json.loads(made.to_str())
        model["added_tokens"] = []
        made = Tokenizer.from_str(json.dumps(model))
        made.pre_tokenizer = None
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    made.add_special_tokens(SPECIAL)
    made.add_tokens(["<x>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return str(made.to_str())


def with_ends(made: Tokenizer, begin: str, end: str) -> Tokenizer:
    """An encoder's tokenizer, which puts each text between two tokens."""
    ends = [(text, made.token_to_id(text)) for text in (begin, end)]
    made.add_special_tokens([text for text in made.get_vocab() if text[0] + text[-1] in ("[]", "<>")])
    made.post_processor = processors.TemplateProcessing(single=f"{begin} $A {end}", special_tokens=ends)
    return made


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A folder's files."""

    kind: str = "sp"
    model_type: str = "llama"
    config: dict[str, Any] | None = None
    model_config: dict[str, Any] = {}
    tokenizer: dict[str, Any] = {}
    """Other members of tokenizer.json."""


def named(name: str | None, **others: Any) -> dict[str, Any]:
    return {**NAMES, "tokenizer_class": name, **others}


DECODER = {str(i): token(text, special=True) for i, text in enumerate(SPECIAL)}
CLASS_NAMES = [
    "LlamaTokenizerFast",
    "GemmaTokenizer",
    "GPT2TokenizerFast",
    "GPTNeoXTokenizer",
    "Qwen2TokenizerFast",
    "Qwen3_5Tokenizer",
]
CLASS_NAMES += ["CohereTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend", "BloomTokenizerFast"]
CASES = {
    **{f"{name}, {kind}": Case(kind=kind, config=named(name)) for name in CLASS_NAMES for kind in ("sp", "bytes")},
    **{
        f"{name} {flag}": Case(config=named(name, **flag), kind=kind)
        for name, kind in [
            (CLASS_NAMES[0], "sp"),
            (CLASS_NAMES[1], "sp"),
            *((name, "bytes") for name in CLASS_NAMES[2:]),
        ]
        for flag in (
            {"legacy": True},
            {"add_prefix_space": False},
            {"add_prefix_space": True},
            {"add_bos_token": False},
            {"add_eos_token": True},
            {"split_special_tokens": True},
            {"added_tokens_decoder": DECODER},
            {"added_tokens_decoder": {**DECODER, "2": token("</s>", special=True, lstrip=True, rstrip=True)}},
            {"extra_special_tokens": [{**token("<tool>", special=False), "__type": "AddedToken", "rstrip": True}]},
        )
    },
    **{
        f"{name}, no post-processor": Case(config=named(name), tokenizer={"post_processor": None})
        for name in CLASS_NAMES
    },
    **{
        f"{kind}, no {what}": Case(model_type=kind, kind=ENCODERS.get(kind, "sp"), config=config)
        for kind in [*HF_ARCHITECTURES, *TEXT_PARTS]
        for what, config in (("class", NAMES), ("files", None))
    },
    **{
        f"{kind}, {name}": Case(model_type=kind, config=named(name))
        for kind in [*HF_ARCHITECTURES, *TEXT_PARTS]
        for name in ("LlamaTokenizerFast", "GPT2TokenizerFast")
    },
    "Llama's class, legacy, always": Case(config=named("LlamaTokenizer", legacy=True, add_prefix_space=True)),
    "Llama's class, no legacy": Case(config=named("LlamaTokenizer", legacy=False)),
    "Llama's class in config.json": Case(config=NAMES, model_config={"tokenizer_class": "LlamaTokenizerFast"}),
    "an unknown class": Case(config=named("OurTokenizer")),
    "Code Llama's class": Case(config=named("CodeLlamaTokenizer")),
    "T5's class": Case(kind="unigram", config=named("T5Tokenizer", extra_ids=3)),
    "the general class, Unigram": Case(kind="unigram", config=named("PreTrainedTokenizerFast")),
    "a class that is not general": Case(kind="bytes", config=named("RobertaTokenizerFast", mask_token="<mask>")),
    **{
        f"Mistral's pattern, {fixes}": Case(
            kind="large", model_type="mistral", config={**NAMES, "fix_mistral_regex": fixes}
        )
        for fixes in (True, False, None)
    },
    "a class of the folder beside Llama's": Case(
        model_type="qwen2", kind="sp", config=named("LlamaTokenizer", auto_map={"AutoTokenizer": ["a.B", None]})
    ),
}


IN_BRIEF = [
    *(
        "an unknown class",
        "Code Llama's class",
        "T5's class",
        "a class that is not general",
        "Llama's class, no legacy",
    ),
    *("Llama's class in config.json", "a class of the folder beside Llama's", "llama, no files", "qwen2, no files"),
    *("gemma3, no class", "granite, GPT2TokenizerFast", "LlamaTokenizerFast {'legacy': True}"),
    *("bert, no files", "xlm-roberta, no class"),
    *(f"{name}, {kind}" for name, kind in zip(CLASS_NAMES, ["sp", "sp", *["bytes"] * 5], strict=False)),
    *(name for name in CASES if name.startswith("Qwen2TokenizerFast {'added_")),
    *(name for name in CASES if name.startswith("CohereTokenizerFast {'extra")),
]
FOLDERS = CASES if os.environ.get("PIPELINE_ALL_CASES") else {name: CASES[name] for name in IN_BRIEF}


def write(folder: Path, case: Case) -> Path:
    folder.mkdir()
    config = {"model_type": case.model_type, "bos_token_id": 1, "eos_token_id": 2, **case.model_config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps({**json.loads(built(case.kind)), **case.tokenizer}))
    if case.config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(case.config))
    return folder


def check(source: Path, target: Path) -> None:
    """Compare what we prepare with what transformers makes of the folder."""
    transformers.logging.set_verbosity_error()
    theirs = AutoTokenizer.from_pretrained(str(source), local_files_only=True, trust_remote_code=False)
    written, config = prepared(source, target)
    ours = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert ours.get_vocab() == theirs.get_vocab()
    vocabulary = Vocabulary.load(target / "tokenizer.json")
    ours.encode_special_tokens = config.split_special_tokens
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        decoder = IncrementalDecoder(vocabulary, (), skip_special_tokens=True)
        streamed = "".join(map(decoder.add, ids)) + decoder.finish()
        assert streamed == theirs.decode(ids, skip_special_tokens=True), text
        assert ours.encode(text).ids == ids, text
        for skips in (True, False):
            assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)
    assert config.special_tokens == written.special.names == theirs.special_tokens_map
    messages = [{"role": "user", "content": "fox"}]
    theirs.chat_template = TEMPLATE
    prompt = ChatTemplate(TEMPLATE, config.special_tokens).render(
        {"messages": messages}, max_chars=1000, budget=Budget(10_000, 10.0)
    )
    assert prompt == theirs.apply_chat_template(messages, tokenize=False)
    if theirs.eos_token_id is not None and theirs.eos_token_id < config.vocab_size:
        assert config.eos_ids[0] == theirs.eos_token_id
    assert config.add_bos == (theirs("fox")["input_ids"][:1] == [config.bos_id])


@pytest.mark.parametrize("case", FOLDERS.values(), ids=FOLDERS.keys())
def test_a_folder_with_tokenizer_json_is_read_as_by_its_class(tmp_path: Path, case: Case) -> None:
    check(write(tmp_path / "source", case), tmp_path / "target")


@pytest.mark.parametrize("config", [NAMES, None])
@pytest.mark.parametrize("model_type", [name for name, kind in ENCODERS.items() if kind == "pieces"])
def test_a_bpe_is_refused_where_the_model_s_class_reads_a_unigram(
    tmp_path: Path, model_type: str, config: dict[str, Any] | None
) -> None:
    source = write(tmp_path / "source", Case(model_type=model_type, config=config))
    with pytest.raises((TypeError, ValueError)):
        AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    message = rf"transformers cannot read the folder with the class {tokenizer_class.OF_MODELS[model_type]} \(.*; set"
    with pytest.raises(ModelError, match=message) as caught:
        prepared(source, tmp_path / "target")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model_type", [name for name, kind in ENCODERS.items() if kind == "words"])
def test_texts_that_a_vocabulary_without_an_unknown_token_lacks_are_those_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    """A BPE of which the class makes words: [UNK] is no word of it, and neither encodes what needs it."""
    source = write(tmp_path / "source", Case(model_type=model_type))
    theirs = AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    prepared(source, tmp_path / "target")
    ours = Tokenizer.from_file(str(tmp_path / "target" / "tokenizer.json"))
    assert ours.encode("a").ids == theirs("a")["input_ids"]
    for encode in (ours.encode, theirs):
        with pytest.raises(Exception, match=r"WordPiece error: Missing \[UNK\] token from the vocabulary"):
            encode(TEXTS[0])


@pytest.mark.parametrize("name", ["LlamaTokenizer", "GPT2TokenizerFast"])
def test_a_class_that_would_make_another_model_of_the_file_is_refused(tmp_path: Path, name: str) -> None:
    source = write(tmp_path / "source", Case(kind="unigram", config=named(name)))
    message = (
        rf"tokenizer\.json has a model of the type 'Unigram', and transformers' {name[:5]}.*PreTrainedTokenizerFast"
    )
    with pytest.raises(ModelError, match=message):
        prepared(source, tmp_path / "target")


def test_a_class_that_transformers_cannot_read_the_folder_with_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", Case(config=named("CTRLTokenizer")))
    message = (
        r"tokenizer_config\.json: transformers cannot read the folder with the class CTRLTokenizer \(.*\); set \"tok"
    )
    with pytest.raises(ModelError, match=message) as caught:
        prepared(source, tmp_path / "target")
    assert "\n" not in str(caught.value)


def test_files_for_versions_of_transformers_are_refused(tmp_path: Path) -> None:
    source = write(
        tmp_path / "source", Case(config={"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]})
    )
    with pytest.raises(
        ModelError, match=r"tokenizer_config\.json: fast_tokenizer_files is .*; only tokenizer\.json is"
    ):
        prepared(source, tmp_path / "target")


def test_the_classes_of_models_are_those_of_transformers() -> None:
    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for model_type in [*HF_ARCHITECTURES, *TEXT_PARTS]:
        registered = theirs.get(model_type)
        ours = tokenizer_class.OF_MODELS.get(model_type, "")
        assert ours == ("" if registered is None else None if registered == "TokenizersBackend" else registered)
        always = model_type in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS and ours is not None
        assert always == (model_type in tokenizer_class.ALWAYS)


ADVICE = 'set "tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json to use tokenizer.json as it is'
OLD = {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}}
"""As it was before `use_regex`."""


@pytest.mark.parametrize(
    ("case", "notes"),
    [
        (
            Case(config=named("LlamaTokenizer")),
            (
                "tokenizer.json has another normalizer and pre_tokenizer than LlamaTokenizer, whose own counts; "
                + ADVICE,
            ),
        ),
        (
            Case(kind="bytes", config=named("GPT2Tokenizer", add_prefix_space=True)),
            ("tokenizer.json has another pre_tokenizer than GPT2Tokenizer, whose own counts; " + ADVICE,),
        ),
        (Case(kind="bytes", config=named("GPT2Tokenizer")), ()),
        (Case(kind="bytes", config=named("GPT2Tokenizer"), tokenizer=OLD), ()),
        (Case(config=named("PreTrainedTokenizerFast")), ()),
        (
            Case(model_type="qwen2", config=named("PreTrainedTokenizerFast")),
            ("tokenizer.json has another normalizer and pre_tokenizer than Qwen2Tokenizer, whose own counts",),
        ),
    ],
)
def test_a_note_says_which_parts_of_the_file_do_not_count(tmp_path: Path, case: Case, notes: tuple[str, ...]) -> None:
    assert prepared(write(tmp_path / "source", case), tmp_path / "target")[0].notes == notes
