"""How large a model's vocabulary is, which decides how much memory its tokenizer takes in each process that has it.

vocabulary.json    {"kind": "BPE", "num_entries": 151936, "num_merges": 151387}

prepare writes it, so that no process with other work has to read tokenizer.json for it.
"""

from pathlib import Path

import msgspec

from pipeline.runtime.model.model_folder import read_file

FILE = "vocabulary.json"
ENTRY_BYTES = {"BPE": 360, "Unigram": 910}
OTHER_ENTRY_BYTES, MERGE_BYTES = 320, 400
"""What the `tokenizers` library takes for each entry and merge. Measured: 30 MiB for SmolLM2 (49,152 entries, and as
many merges), 82 for Qwen2.5 (151,936), 286 for Gemma 3 (262,144, and 514,847 merges); 226 and 80 with its entries as
Unigram and as WordPiece."""


class VocabularySize(msgspec.Struct, frozen=True):
    """Of a tokenizer.json."""

    kind: str = ""
    num_entries: int = 0
    num_merges: int = 0

    @property
    def tokenizer_bytes(self) -> int:
        """What a process takes to have the tokenizer."""
        return self.num_entries * ENTRY_BYTES.get(self.kind, OTHER_ENTRY_BYTES) + self.num_merges * MERGE_BYTES


class _Model(msgspec.Struct):
    type: str = "BPE"
    vocab: dict[str, msgspec.Raw] | list[msgspec.Raw] = {}
    merges: list[msgspec.Raw] = []


class _Tokenizer(msgspec.Struct):
    model: _Model


def write(folder: Path) -> None:
    """Write the file beside tokenizer.json, if there is one. Raises OSError and msgspec.DecodeError."""
    if (path := folder / "tokenizer.json").exists():
        model = msgspec.json.decode(read_file(path), type=_Tokenizer).model
        found = VocabularySize(model.type, len(model.vocab), len(model.merges))
        (folder / FILE).write_bytes(msgspec.json.encode(found))


def load(folder: Path, vocab_size: int) -> VocabularySize:
    """That of a prepared model with so many ids. In a folder of an older version it is a guess: one merge for each id,
    as most have."""
    path = folder / FILE
    if not path.exists():
        return VocabularySize("BPE", vocab_size, vocab_size)
    return msgspec.json.decode(read_file(path), type=VocabularySize)
