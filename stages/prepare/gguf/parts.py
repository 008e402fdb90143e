"""Reads the parts of a model that llama.cpp's `gguf-split` wrote, as one.

NAME-00001-of-00003.gguf   all keys; split.no = 0, split.count = 3, split.tensors.count
NAME-00002-of-00003.gguf   split.no = 1, …
"""

from pathlib import Path

from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.gguf.file import GgufFile, GgufTensor
from pipeline.stages.prepare.gguf.metadata import Metadata
from pipeline.stages.prepare.sources.source import ModelError

NUMBER_KEY, COUNT_KEY, TENSORS_KEY = "split.no", "split.count", "split.tensors.count"

Parts = tuple[Metadata, dict[str, GgufTensor]]
"""The keys of the first part, and the tensors of all."""


def read_parts(paths: list[Path]) -> Parts:
    """The keys of the first part, and the tensors of all. Raises ModelError unless they are all parts of one model."""
    files = [GgufFile(path) for path in paths]
    metadata = Metadata(files[0])
    tensors: dict[str, GgufTensor] = {}
    for number, file in enumerate(files):
        _check_number(Metadata(file), number, len(files))
        for name, tensor in file.tensors.items():
            if name in tensors:
                raise ModelError(f"{file.path}: the tensor {shown(name)} is also in another part of the model")
            tensors[name] = tensor
    expected = metadata.get(TENSORS_KEY, int, len(tensors))
    if expected != len(tensors):
        raise ModelError(
            f"{metadata.path}: {TENSORS_KEY} is {shown(expected)}, but the {len(files)} parts have {len(tensors)} "
            "tensors: get all parts of the same model again"
        )
    return metadata, tensors


def _check_number(metadata: Metadata, number: int, count: int) -> None:
    """Raises ModelError unless a file says that it is part `number`, from 0, of `count`."""
    found = metadata.get(COUNT_KEY, int, 1), metadata.get(NUMBER_KEY, int, 0)
    if found == (count, number):
        return
    if count == 1:
        raise ModelError(
            f"{metadata.path} is one of {found[0]} parts of a model ({COUNT_KEY}): its name must be "
            f"NAME-{found[1] + 1:05}-of-{found[0]:05}.gguf, beside the other parts"
        )
    raise ModelError(
        f"{metadata.path} says that it is part {found[1] + 1} of {found[0]} ({NUMBER_KEY}, {COUNT_KEY}); by its name "
        f"it is part {number + 1} of {count}: restore the names of the parts"
    )
