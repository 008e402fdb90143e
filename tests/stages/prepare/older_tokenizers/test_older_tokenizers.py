"""Folders without tokenizer.json give the ids of AutoTokenizer, or are refused with the command that makes one.

PIPELINE_ALL_CASES=1 pytest tests/stages/prepare/older_tokenizers      also SentencePiece's, in half a minute
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.stages.prepare.sources import tokenizer_json
from pipeline.stages.prepare.sources.source import ModelError
from tests.e2e.client.packages import python_with
from tests.stages.prepare.older_tokenizers.folders import ADDS, NAMES, Folder, bpe, tekken, tiktoken
from tests.stages.prepare.tokenizers.test_special_tokens import prepared
from tests.stages.prepare.tokenizers.test_tokenizer_classes import check

CHATML = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
FOLDERS = {
    "GPT-2's, a prefix": Folder(model_type="gpt2", files=bpe(), config={"add_prefix_space": True}),
    "GPT-2's, split": Folder(model_type="gpt2", files=bpe(), config={"split_special_tokens": True}),
    "GPT-2's, alone": Folder(model_type="gpt2", files=bpe()),
    "Qwen's": Folder(model_type="qwen2", files=bpe(), config=CHATML),
    "Qwen's, BOS and EOS": Folder(model_type="qwen3", files=bpe(), config={**NAMES, **ADDS}),
    "GPT-NeoX's, BOS": Folder(model_type="gpt_neox", files=bpe(), config={**NAMES, "add_bos_token": True}),
    "Phi's": Folder(model_type="phi", files=bpe(), config={"tokenizer_class": "CodeGenTokenizer"}),
    "tekken": Folder(model_type="mistral", files=tekken()),
    "tekken, BOS": Folder(model_type="mistral3", files=tekken(), config={**NAMES, "add_bos_token": True}),
}


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS.keys())
def test_vocabularies_that_need_no_other_package_are_converted(tmp_path: Path, folder: Folder) -> None:
    check(folder.write(tmp_path / "source"), tmp_path / "target")


MAKE = (
    r"; make tokenizer\.json with: pip install {} && cd .*source && python -c \"from transformers import AutoTokenizer"
)
REFUSED = {
    "SentencePiece": ({"tokenizer.model": b"\n\x0e"}, "tokenizer.model only, .*", MAKE.format("sentencepiece")),
    "tiktoken": (tiktoken("tokenizer.model"), "tokenizer.model only, .*", MAKE.format("tiktoken")),
    "another class": (bpe(), "vocab.json only, .*; copy one from where", ".*import GPT2Tokenizer as T"),
    "old tekken": (tekken(is_old=True), "tekken.json only, .*mistral-common.*; copy one from where", ""),
    "nothing": ({}, "no tokenizer: tokenizer.json", ""),
}


@pytest.mark.parametrize(("files", "what", "right"), REFUSED.values(), ids=REFUSED.keys())
def test_others_are_refused_in_one_line_that_says_what_makes_a_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], what: str, right: str
) -> None:
    monkeypatch.setitem(tokenizer_json.PACKAGES, "sentencepiece", "not_installed")
    monkeypatch.setitem(tokenizer_json.PACKAGES, "tiktoken", "not_installed")
    source = Folder(model_type="llama", files=files).write(tmp_path / "source")
    with pytest.raises(ModelError, match=rf"source has {what}{right}") as caught:
        prepared(source, tmp_path / "target")
    assert "\n" not in str(caught.value)


if os.environ.get("PIPELINE_ALL_CASES"):

    def test_models_of_sentencepiece_and_tiktoken_are_converted_where_the_packages_are(tmp_path: Path) -> None:
        python = python_with(Path(__file__).with_name("requirements.txt"))
        [packages] = python.parent.parent.glob("lib/python*/site-packages")
        done = subprocess.run(
            [sys.executable, "-m", "tests.stages.prepare.older_tokenizers.folders", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        assert "compared 30" in done.stdout
