"""What a model of several needs grows with its vocabulary, as measured."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.config.settings import Settings
from pipeline.runtime.model import vocabulary_size
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vocabulary_size import VocabularySize
from pipeline.supervisor.models.memory import VocabularyBytes, needs_of

MIB = 1 << 20
MEASURED = {
    VocabularySize("BPE", 49_152, 48_900): (29, 6, 39, 38),
    VocabularySize("BPE", 151_936, 151_387): (97, 19, 127, 126),
    VocabularySize("BPE", 262_144, 514_847): (286, 35, 398, 398),
}
"""SmolLM2, Qwen2.5 and Gemma 3: what ingest, detokenize, ingest's process for grammars and the executor's took
more than with 608 entries, in MiB."""
PROGRAM = """
import sys
from tokenizers import Tokenizer

def size():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

before = size()
tokenizer = Tokenizer.from_file(sys.argv[1])
tokenizer.encode("a")
print(size() - before)
"""


@pytest.mark.parametrize("size", MEASURED, ids=["smollm2", "qwen2.5", "gemma3"])
def test_a_vocabulary_counts_what_it_takes(size: VocabularySize) -> None:
    ingest, detokenize, checks, masks = MEASURED[size]
    found = VocabularyBytes.of(size)
    assert ingest + detokenize <= found.text / MIB <= 1.3 * (ingest + detokenize)
    assert max(checks, masks) <= found.grammar / MIB <= 1.5 * max(checks, masks)


def models(kind: str) -> dict[str, Any]:
    """A model of a tokenizer.json, with 60,000 entries."""
    entries = [f"w{index:x}" for index in range(60_000)]
    if kind == "Unigram":
        return {"type": kind, "unk_id": 0, "vocab": [[one, -float(index % 977)] for index, one in enumerate(entries)]}
    vocab = {one: index for index, one in enumerate([*"0123456789abcdef", "w", *entries])}
    if kind == "WordPiece":
        return {
            "type": kind,
            "vocab": vocab,
            "unk_token": "w0",
            "max_input_chars_per_word": 100,
            "continuing_subword_prefix": "##",
        }
    merges = [[one[:-1], one[-1]] for one in entries if one[:-1] in vocab]
    return {"type": kind, "vocab": vocab, "merges": merges}


@pytest.mark.parametrize("kind", ["BPE", "Unigram", "WordPiece"])
def test_a_tokenizer_takes_no_more_than_it_counts(tmp_path: Path, kind: str) -> None:
    model = models(kind)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    vocabulary_size.write(tmp_path)
    size = vocabulary_size.load(tmp_path, 1)
    assert (size.kind, size.num_entries) == (kind, len(model["vocab"]))
    assert size.num_merges == len(model.get("merges", ()))
    took = int(subprocess.check_output([sys.executable, "-c", PROGRAM, str(tmp_path / "tokenizer.json")]))
    assert 0.3 * size.tokenizer_bytes < took < 1.3 * size.tokenizer_bytes + 2 * MIB


def test_a_prepared_model_needs_its_vocabulary_awake_and_asleep(smollm2_dir: Path, tmp_path: Path) -> None:
    config = ModelConfig.load(smollm2_dir)
    paths = [str(one) for one in config.weight_paths(smollm2_dir)]
    msgspec.structs.replace(config, weight_files=paths).save(tmp_path)
    settings = Settings()
    guessed = needs_of(settings, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((smollm2_dir / "tokenizer.json").read_bytes())
    vocabulary_size.write(tmp_path)
    size = vocabulary_size.load(tmp_path, 1)
    needs = needs_of(settings, tmp_path)
    assert abs(needs.awake - guessed.awake) < 8 * MIB, "folders of an older version have about as many merges as ids"
    (tmp_path / vocabulary_size.FILE).write_bytes(msgspec.json.encode(VocabularySize("BPE")))
    without, vocabulary = needs_of(settings, tmp_path), VocabularyBytes.of(size)
    assert needs.awake - without.awake == vocabulary.text + 2 * vocabulary.grammar
    assert needs.processes_asleep - without.processes_asleep == vocabulary.text + vocabulary.grammar
