"""Logits equal those of PEFT in float32; tools/models/make_peft_reference.py made the reference."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipeline.lora.convert import convert
from tests.lora.peft_cases import CASES, IDS, REFERENCE, write_case
from tests.stages.execute import tiny_architectures
from tests.stages.execute.adapters.test_lora import LoraDriver, with_lora
from tests.stages.execute.driver import settings

REFERENCES = json.loads(REFERENCE.read_text("utf-8"))["cases"]


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_peft(tmp_path: Path, name: str) -> None:
    stored = REFERENCES[name]
    folder, _ = tiny_architectures.write(tmp_path, tiny_architectures.VARIANTS[CASES[name].base])
    adapter_id = convert(write_case(tmp_path / "peft", stored), folder, "f32", 16)
    driver = LoraDriver(folder, with_lora(settings(kernels="torch", kv_mib=2)))
    plain, adapted = driver.last_logits([(IDS, ""), (IDS, adapter_id)])
    expected = np.array(stored["logits"])
    assert np.abs(expected - np.array(stored["plain"])).max() > 0.05, "the adapter changes something"
    assert np.abs(plain - np.array(stored["plain"])).max() <= 1e-4
    assert np.abs(adapted - expected).max() <= 1e-4
