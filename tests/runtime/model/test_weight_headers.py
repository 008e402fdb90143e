"""Facts from the headers of weight files."""

import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from pipeline.runtime.model.in_place import GgufIndex
from pipeline.runtime.model.model_folder import format_key
from pipeline.runtime.model.weight_headers import WeightFacts, weight_facts


def test_quantized_and_other_weights_of_several_files(tmp_path: Path) -> None:
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    save_file({"a": np.zeros((4, 2 * 34), np.uint8)}, one, {format_key("a"): "q8_0"})
    save_file({"b": np.zeros((2, 20), np.uint8), "norm": np.zeros(7, np.float32)}, two, {format_key("b"): "q4_1"})
    size = one.stat().st_size + two.stat().st_size
    assert weight_facts([one, two]) == WeightFacts(size, 4 * 64 + 2 * 32 + 7, "Q8_0")
    assert weight_facts([two]).format == "Q4_1"


def test_tensors_in_a_gguf_file_count_as_those_of_a_safetensors_file(tmp_path: Path) -> None:
    header = {
        "__metadata__": {format_key("a"): "q8_0"},
        "a": {"dtype": "U8", "shape": [4, 68], "data_offsets": [64, 336]},
    }
    index = GgufIndex("/models/a.gguf", 4096, 0, header)
    assert weight_facts([tmp_path / index.save(tmp_path, 1)]) == WeightFacts(272, 4 * 64, "Q8_0")


def test_a_dtype_is_the_format_of_weights_that_are_not_quantized(tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    save_file({"a": np.zeros((3, 5), np.float16), "b": np.zeros(2, np.float32)}, path)
    assert weight_facts([path]) == WeightFacts(path.stat().st_size, 17, "F16")
    assert weight_facts([]) == WeightFacts(0, 0, "")


def test_a_header_that_is_too_long_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", 2**40))
    with pytest.raises(ValueError, match="the header has 1099511627776 bytes"):
        weight_facts([path])
