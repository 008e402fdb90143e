"""The special tokens of .gguf files are llama.cpp's, whatever types and keys the files lack."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.gguf.tokenizers import special_tokens, tokenizer
from pipeline.stages.prepare.gguf.tokenizers.special_tokens import CONTROL, END_TEXTS, NORMAL, ROLES, USER_DEFINED
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import GgufVocabulary, read_vocabulary
from tools.tokenizer_vectors.vocabularies import save

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "data" / "gguf_tokenizers.json").read_text("utf-8"))
KINDS = ("byte-level", "sentencepiece")


class Case(msgspec.Struct, frozen=True):
    """A file that a user may have."""

    added: list[str]
    """Tokens that the vocabulary has too."""
    ends: set[str]
    """The tokens that end a reply, besides </s>, the file's eos."""
    kind: int = NORMAL
    """Of the added tokens."""
    keys: dict[str, str] = {}
    """Keys below `tokenizer.ggml`, and their tokens."""
    name: str = "tiny"
    pre: str = ""
    removed: set[str] = set()
    """Tokens of the vocabulary that end no reply here."""


CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
FIM = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"]
PHI3 = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>", "<unk>"]
"""llama.cpp refuses a Phi-3 without <unk>."""

CASES = {
    "only eos": Case(["<tool>"], set()),
    "ChatML": Case(CHATML, set(CHATML[1:])),
    "ChatML, user-defined": Case(CHATML, set(CHATML[1:]), USER_DEFINED),
    "Llama 3": Case(["<|eot_id|>", "<|eom_id|>"], {"<|eot_id|>", "<|eom_id|>"}),
    "Gemma": Case(["<start_of_turn>", "<end_of_turn>"], {"<end_of_turn>"}),
    "Gemma, user-defined": Case(["<start_of_turn>", "<end_of_turn>"], {"<end_of_turn>"}, USER_DEFINED),
    "Gemma 4": Case(["<turn|>", "<|tool_response>", "<eos>"], {"<turn|>", "<|tool_response>", "<eos>"}),
    "Phi-3": Case(PHI3, {"<|end|>", "<|endoftext|>"}, CONTROL, name="Phi 3"),
    "Phi-3, by name": Case(PHI3, {"<|end|>", "<|endoftext|>"}, CONTROL, name="My-Phi-3-mini"),
    "Phi3, user-defined": Case(PHI3, {"<|end|>", "<|endoftext|>"}, USER_DEFINED, name="PHI3 tuned"),
    "gpt-oss": Case(HARMONY, {"<|return|>", "<|call|>"}, CONTROL),
    "gpt-oss, normal": Case(HARMONY, {"<|return|>", "<|call|>"}),
    "half of gpt-oss": Case(["<|end|>", "<|return|>"], {"<|end|>", "<|return|>"}, CONTROL),
    "solar-open": Case(["<|end|>", "<|flush|>", "<|calls|>"], {"<|flush|>", "<|calls|>"}, CONTROL),
    "Kimi K2": Case(["[EOT]", "[EOS]", "[PAD]"], {"[EOT]", "[EOS]", "[PAD]"}),
    "DeepSeek": Case(["<｜end▁of▁sentence｜>", "<｜fim▁hole｜>"], {"<｜end▁of▁sentence｜>"}),
    "MiniMax": Case(["[e~["], {"[e~["}),
    "Granite": Case(["<|end_of_text|>", "<fim_prefix>", "<reponame>"], {"<|end_of_text|>", "<reponame>"}),
    "CodeLlama": Case(["▁<PRE>", "▁<SUF>", "▁<MID>", "_<EOT>"], {"_<EOT>"}),
    "Qwen coder": Case(FIM, {"<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}),
    "keys for all": Case(
        ["<a>", "<b>", "<c>", "<d>", "<e>"],
        {"<a>", "<b>", "<c>", "<d>", "<e>"},
        CONTROL,
        {
            "eot_token_id": "<a>",
            "eom_token_id": "<b>",
            "fim_pad_token_id": "<c>",
            "fim_rep_token_id": "<d>",
            "fim_sep_token_id": "<e>",
        },
    ),
    "a key instead of the text": Case(["<|fim_pad|>", "<a>"], {"<a>"}, keys={"fim_pad_token_id": "<a>"}),
    "old keys": Case(["<a>", "<|fim_prefix|>"], set(), keys={"prefix_token_id": "<a>"}),
    "jina": Case(["<mask>"], set(), CONTROL, pre="jina-v2-de"),
    "ModernBERT": Case(["[MASK]"], set(), CONTROL, name="modern-bert-base"),
    "a mask of others": Case(["<mask>", "[MASK]"], set(), CONTROL),
    **{f"all of {role.keys[0]}": Case([text], {text} if role.ends else set()) for role in ROLES for text in role.texts},
    **{f"end {text}": Case([text], {text}) for text in END_TEXTS if text != "</s>"},
}
CASES["Gemma 4"] = msgspec.structs.replace(CASES["Gemma 4"], removed={"</s>"})
CASES["end <|tool_response>"] = msgspec.structs.replace(CASES["end <|tool_response>"], removed={"</s>"})


def texts_of(case: Case) -> list[str]:
    """Texts with each token between words, spaces and others."""
    marks = [*case.added, "</s>", "<s>", "<unk>"]
    return [*(f"a {mark}  \n b{mark} {mark}{mark}\n" for mark in marks), " ".join(marks), "plain  text"]


def write(folder: Path, kind: str, case: Case) -> Path:
    keys = dict(VECTORS["vocabularies"][kind])
    added = [token for token in case.added if token not in keys["tokens"]]
    keys["tokens"] = [*keys["tokens"], *added]
    keys["token_type"] = [*keys["token_type"], *[case.kind] * len(added)]
    if "scores" in keys:
        keys["scores"] = [*keys["scores"], *[-1000.0] * len(added)]
    if case.pre and kind == "byte-level":
        keys["pre"] = case.pre
    keys |= {key: keys["tokens"].index(token) for key, token in case.keys.items()}
    path = folder / "file.gguf"
    save(path, keys, case.name)
    return path


def read(path: Path) -> GgufVocabulary:
    return read_vocabulary(Metadata(GgufFile(path)), 2**20)


def changed(path: Path, kind: str, **changes: Any) -> GgufVocabulary:
    """A vocabulary whose file has other keys, or lacks those that are None."""
    keys = {key: value for key, value in {**VECTORS["vocabularies"][kind], **changes}.items() if value is not None}
    save(path, keys)
    return read(path)


NO_IDS = dict.fromkeys(f"{name}_token_id" for name in ("bos", "eos", "unknown", "padding", "cls", "seperator"))


def test_files_without_ids_have_the_usual_ones(tmp_path: Path) -> None:
    """As in llama.cpp, by the kind of the vocabulary."""
    found = changed(tmp_path / "a.gguf", "sentencepiece", **NO_IDS)
    assert (found.bos_id, found.eos_id, found.unknown_id, found.end_ids) == (1, 2, 0, [2])
    assert found.names == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.build(found, "a test").encode("a").ids[0] == 1
    found = changed(tmp_path / "b.gguf", "unigram", **NO_IDS)
    assert (found.bos_id, found.eos_id, found.unknown_id, found.end_ids) == (None, 1, 2, [1])
    assert found.names == {"bos_token": "", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    found = changed(tmp_path / "c.gguf", "wordpiece", **NO_IDS)
    assert (found.bos_id, found.eos_id, found.unknown_id) == (101, 102, 100)
    found = changed(tmp_path / "d.gguf", "byte-level", **NO_IDS)
    # llama.cpp takes 11 here, an end of text of Falcon alone; only the text ends it.
    assert (found.bos_id, found.eos_id, [found.tokens[i] for i in found.end_ids]) == (None, None, ["</s>"])


def test_a_default_id_is_one_of_the_vocabulary(tmp_path: Path) -> None:
    found = changed(tmp_path / "a.gguf", "sentencepiece", **NO_IDS, tokens=["a", "b"], token_type=None, scores=None)
    assert (found.bos_id, found.eos_id, found.unknown_id, found.end_ids) == (1, None, 0, [])


def test_wordpiece_begins_with_the_files_bos(tmp_path: Path) -> None:
    """As the converter writes [CLS]; without it, the key of [CLS] counts."""
    assert changed(tmp_path / "a.gguf", "wordpiece", bos_token_id=5).bos_id == 5
    assert changed(tmp_path / "b.gguf", "wordpiece", bos_token_id=None, cls_token_id=0).bos_id == 0


def test_texts_of_gemma_4_begin_with_bos_whatever_the_file_says(tmp_path: Path) -> None:
    for number, (kind, pre) in enumerate([("gemma4", None), ("byte-level", "gemma4")]):
        assert changed(tmp_path / f"{number}.gguf", kind, pre=pre, add_bos_token=False).add_bos
    assert not changed(tmp_path / "b.gguf", "byte-level", pre="llama-bpe", add_bos_token=False).add_bos


def test_files_that_do_not_say_it_have_a_space_before_texts_as_in_llama_cpp(tmp_path: Path) -> None:
    """A unigram model has it if it joins spaces."""
    for kind, adds in (("sentencepiece", True), ("unigram", True), ("unigram with all spaces", False)):
        assert changed(tmp_path / f"{kind}.gguf", kind, add_space_prefix=None).add_space_prefix == adds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_end_tokens(tmp_path: Path, kind: str, case: Case) -> None:
    vocabulary = read(write(tmp_path, kind, case))
    eos = {"</s>"} - (case.removed if vocabulary.tokens[vocabulary.end_ids[0]] != "</s>" else set())
    assert {vocabulary.tokens[i] for i in vocabulary.end_ids} == case.ends | eos
    assert len(set(vocabulary.end_ids)) == len(vocabulary.end_ids)
    built = tokenizer.build(vocabulary, "a test")
    for end in case.ends - set(case.keys.values()):
        assert len(built.encode(end, add_special_tokens=False).ids) == 1
        assert built.decode(built.encode(end).ids, skip_special_tokens=True) == ""


def test_the_special_tokens_of_phi_3_take_the_spaces_behind_them(tmp_path: Path) -> None:
    def ids(name: str, text: str) -> list[str]:
        vocabulary = read(write(tmp_path, "byte-level", Case(PHI3, set(), CONTROL, name=name)))
        return [vocabulary.tokens[i] for i in tokenizer.build(vocabulary, "a test").encode(text).ids]

    turn = "<|user|>\n<|end|>\n<|assistant|>\n"
    assert ids("Phi-3-mini", turn) == ["<|user|>", "<|end|>", "<|assistant|>"]
    assert ids("other", turn) == ["<|user|>", "Ċ", "<|end|>", "Ċ", "<|assistant|>", "Ċ"]
    assert ids("Phi-3-mini", "<|endoftext|>\n<s>\n") == ["<|endoftext|>", "Ċ", "<s>", "Ċ"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_marks_of_gpt_oss_are_found_in_texts_whatever_their_type(tmp_path: Path, kind: str) -> None:
    built = tokenizer.build(read(write(tmp_path, kind, CASES["gpt-oss, normal"])), "a test")
    ids = built.encode("".join(HARMONY), add_special_tokens=False).ids
    assert [built.id_to_token(i) for i in ids] == HARMONY
    assert built.decode(ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    ("mark", "case"),
    [("<mask>", CASES["jina"]), ("[MASK]", CASES["ModernBERT"])],
)
def test_masks_take_the_spaces_before_them(tmp_path: Path, mark: str, case: Case) -> None:
    built = tokenizer.build(read(write(tmp_path, "byte-level", case)), "a test")
    assert built.encode(f"a  {mark}").ids == [built.token_to_id("a"), built.token_to_id(mark)]
    other = tokenizer.build(read(write(tmp_path, "byte-level", CASES["a mask of others"])), "a test")
    assert other.encode(f"a  {mark}").ids[1:] != [other.token_to_id(mark)]


def test_the_files_own_end_of_text_is_first(tmp_path: Path) -> None:
    vocabulary = read(write(tmp_path, "byte-level", CASES["keys for all"]))
    assert [vocabulary.tokens[i] for i in vocabulary.end_ids] == ["</s>", "<a>", "<b>", "<c>", "<d>", "<e>"]


def test_every_file_s_special_tokens_are_those_of_llama_cpp(tmp_path: Path, llama_cpp: Path) -> None:
    wrong = []
    for kind in KINDS:
        for name, case in CASES.items():
            path = write(tmp_path, kind, case)
            vocabulary = read(path)
            built = tokenizer.build(vocabulary, "a test")
            texts = texts_of(case)
            theirs = by_llama_cpp(llama_cpp, path, texts)
            wrong += [f"{kind}, {name}: end ids"] if sorted(vocabulary.end_ids) != theirs["ends"] else []
            shown = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}
            shown |= {"<|end|>"} if special_tokens.MESSAGE_END not in case.ends else set()
            control = [i for i, each in enumerate(vocabulary.types) if each == CONTROL]
            ours = [i for i in control if vocabulary.tokens[i] not in shown]
            wrong += [f"{kind}, {name}: control tokens"] if ours != theirs["control"] else []
            for text, ids in zip(texts, theirs["ids"], strict=True):
                if built.encode(text, add_special_tokens=False).ids != ids:
                    wrong.append(f"{kind}, {name}: {text!r}")
    assert not wrong, "\n".join(wrong)


PACKAGE = "@node-llama-cpp/linux-x64@3.22.1"
FETCH_S, RUN_S = 300.0, 60.0


def by_llama_cpp(folder: Path, path: Path, texts: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "tools.tokenizer_vectors.libllama", str(folder), str(path)]
    done = subprocess.run(
        command, input=json.dumps(texts).encode(), capture_output=True, timeout=RUN_S, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")[-2000:]
    result: dict[str, Any] = json.loads(done.stdout)
    return result


ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def llama_cpp() -> Path:
    """The folder of llama.cpp's libraries, fetched once from the npm registry."""
    assert shutil.which("npm"), "npm not found: install Node.js 20 or newer with npm (https://nodejs.org)"
    cache = Path.home() / ".cache" / "pipeline-tests" / PACKAGE.rpartition("/")[2]
    libraries = cache / "node_modules" / "@node-llama-cpp" / "linux-x64" / "bins" / "linux-x64"
    if not libraries.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        install = ["npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(cache), PACKAGE]
        subprocess.run(install, check=True, timeout=FETCH_S, capture_output=True)
    return libraries
