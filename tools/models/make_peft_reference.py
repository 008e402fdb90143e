"""Make the logits that the tests of LoRA adapters compare with, by PEFT over tiny random models in float32.

    pip install --no-deps --target /tmp/peft peft accelerate
    PYTHONPATH=/tmp/peft python -m tools.models.make_peft_reference tests/data/peft_reference.json

PEFT makes an adapter for each case of tests/lora/peft_cases.py, saves it, and computes the logits after a prompt. The
reference has its adapter_config.json, the names and shapes of its tensors (their values come from a seed), and the
logits.
"""

import argparse
import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.numpy import load_file

from pipeline.cli.out_file import write_output
from tests.lora.peft_cases import CASES, IDS, PeftCase, tensors_of
from tests.stages.execute.tiny_architectures import VARIANTS, make


def reference_of(peft: Any, case: PeftCase) -> dict[str, Any]:
    """Logits are those of the base, and with the adapter."""
    model = make(VARIANTS[case.base])
    with torch.inference_mode():
        plain = model(torch.tensor([IDS])).logits[0, -1]
    adapted = peft.get_peft_model(model, peft.LoraConfig(**case.config)).eval()
    with tempfile.TemporaryDirectory() as folder:
        adapted.save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text("utf-8"))
        shapes = {
            name: list(each.shape) for name, each in load_file(Path(folder) / "adapter_model.safetensors").items()
        }
    state = {name: torch.from_numpy(each) for name, each in tensors_of(shapes).items()}
    loaded = peft.set_peft_model_state_dict(adapted, state)
    assert not loaded.unexpected_keys
    with torch.inference_mode():
        logits = adapted(torch.tensor([IDS])).logits[0, -1]
    given = {name: value for name, value in config.items() if value not in (None, False, {}, [])}
    return {"config": given, "shapes": shapes, "plain": _rounded(plain), "logits": _rounded(logits)}


def _rounded(logits: torch.Tensor) -> list[float]:
    return [round(value, 6) for value in logits.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    peft = importlib.import_module("peft")
    cases = {name: reference_of(peft, case) for name, case in CASES.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    write_output(args.out, f'{{"peft": "{peft.__version__}", "cases": {{\n{lines}\n}}}}\n')
    print(f"peft {peft.__version__}: {len(cases)} cases, {args.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
