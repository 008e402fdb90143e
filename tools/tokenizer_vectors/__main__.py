"""Write the token ids that tests/stages/prepare/gguf/test_gguf_tokenizers.py compares with, or check real vocabularies.

    python -m tools.tokenizer_vectors --write tests/data/gguf_tokenizers.json
    python -m tools.tokenizer_vectors --check

`--check` compares our tokenizers with the vectors of llama.cpp's own tests (models/ggml-vocab-*.gguf.out). Both use the
llama.cpp that `tools/compare_peers --build-only` downloads and builds.
"""

import argparse
import json
import sys
import unicodedata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import normalizers

from pipeline.errors import UserError
from pipeline.stages.prepare.gguf.file import GgufFile
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.gguf.tokenizers import tokenizer
from pipeline.stages.prepare.gguf.tokenizers.pre_tokenizers import PRE_TOKENIZERS
from pipeline.stages.prepare.gguf.tokenizers.vocabulary import MAX_TOKENS, GgufVocabulary, read_vocabulary
from tools.compare_peers.llama_cpp import PACKAGE, VERSION
from tools.tokenizer_vectors.llama_cpp import SEPARATOR, Encoded, LlamaTokenizer
from tools.tokenizer_vectors.texts import DIFFERENT, TEXTS
from tools.tokenizer_vectors.vocabularies import save, vocabularies

PEERS = Path.home() / ".cache" / "pipeline" / "peers"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.tokenizer_vectors", description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE", help="write the ids of small vocabularies")
    action.add_argument("--check", action="store_true", help="compare with the vectors of llama.cpp's tests")
    parser.add_argument("--peers", type=Path, default=PEERS, metavar="FOLDER", help="where compare_peers builds")
    args = parser.parse_args()
    llama_cpp = args.peers / f"llama.cpp-{VERSION}"
    try:
        if args.check:
            return check(llama_cpp / "source" / "models")
        write(LlamaTokenizer(llama_cpp), args.write)
    except UserError as error:
        print(f"tokenizer_vectors: error: {error}", file=sys.stderr)
        return 1
    return 0


def check(folder: Path) -> int:
    """Compare every vocabulary file that has vectors. Returns 1 if one differs or there are none."""
    files = [path for path in sorted(folder.glob("*.gguf")) if Path(f"{path}.out").is_file()]
    num_wrong = 0
    for path in files:
        vocabulary = read_vocabulary(Metadata(GgufFile(path)), MAX_TOKENS)
        texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
        lines = Path(f"{path}.out").read_text().split("\n")
        if len(lines) == len(texts) + 1 and not lines[-1]:  # some files end with a newline
            lines.pop()
        expected = [[int(word) for word in line.split()] for line in lines]
        if len(expected) != len(texts):
            raise UserError(f"{path}: has {len(texts)} texts, but ids of {len(expected)}")
        wrong = [i for i, ids in enumerate(_encode(vocabulary, texts)) if ids != expected[i]]
        num_wrong += len(wrong)
        print(f"{path.stem.removeprefix('ggml-vocab-')}: {len(texts) - len(wrong)} of {len(texts)} texts agree")
    return 1 if num_wrong or not files else 0


def _encode(vocabulary: GgufVocabulary, texts: list[str]) -> list[list[int]]:
    built = tokenizer.build(vocabulary, vocabulary.model)
    if vocabulary.pre in PRE_TOKENIZERS and PRE_TOKENIZERS[vocabulary.pre].composes:
        built.normalizer = normalizers.Sequence([])  # llama.cpp leaves NFC to its caller
    built.encode_special_tokens = True
    return [built.encode(text, add_special_tokens=False).ids for text in texts]


def write(llama: LlamaTokenizer, path: Path) -> None:
    """Write the vocabularies and what llama.cpp makes of the texts; of texts that it splits differently on purpose,
    null."""
    cases: list[dict[str, Any]] = []
    found = vocabularies()
    with TemporaryDirectory() as scratch:
        for name, keys in found.items():
            file = Path(scratch) / f"{name}.gguf"
            save(file, keys)
            if name != "byte-level":
                (encoded,) = llama.encode(file, TEXTS)
                cases.append(_case(name, [], encoded))
                continue
            by_ids: dict[str, dict[str, Any]] = {}
            for pre in [*(pre for pre, one in PRE_TOKENIZERS.items() if one.is_byte_level), "default"]:
                composes = pre in PRE_TOKENIZERS and PRE_TOKENIZERS[pre].composes
                texts = [unicodedata.normalize("NFC", text) for text in TEXTS] if composes else TEXTS
                (encoded,) = llama.encode(file, texts, [pre])
                case = _case(name, [pre], encoded)
                by_ids.setdefault(json.dumps([case["adds_bos"], case["ids"]]), {**case, "pre": []})["pre"].append(pre)
            cases += by_ids.values()
    content = {
        "made by": f"python -m tools.tokenizer_vectors, with the llama.cpp of {PACKAGE} {VERSION}",
        "vocabularies": found,
        "texts": TEXTS,
        "cases": cases,
    }
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def _case(vocabulary: str, pre: list[str], encoded: Encoded) -> dict[str, Any]:
    ids: list[list[int] | None] = list(encoded.ids)
    for names, numbers in DIFFERENT:
        if set(names.split()) & {vocabulary, *pre}:
            for number in numbers:
                ids[number] = None
    return {
        "vocabulary": vocabulary,
        "pre": pre,
        "adds_bos": encoded.adds_bos,
        "adds_eos": encoded.adds_eos,
        "ids": ids,
    }


if __name__ == "__main__":
    sys.exit(main())
