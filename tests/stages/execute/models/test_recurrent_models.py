"""Models with recurrent states have the logits of transformers in float64, for any split of a sequence into steps."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.kernels.cpu.isa import available
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.model_folder import NOTES
from pipeline.stages.execute.cpu.measuring import fidelity
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.prepare.stage import prepare
from pipeline.stages.prepare.weights.tensors import read_header
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.recurrent_models import VARIANTS, VOCAB_SIZE, Variant, logits_of, make, write
from tests.stages.prepare import checkpoints

MAX_ERROR = 1e-4
MAX_NATIVE_ERROR = 0.05
"""Of the native program in bfloat16 in the mean of all positions, relative to the standard deviation of the logits."""
MAX_WIDE_ERROR = 0.02
"""The same at each position, with an instruction set whose activations are float32: keys and values are bfloat16."""

Entry = tuple[int, int, int]
"""The prompt, the first of its ids and their number."""


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num).tolist()


PROMPTS = [random_ids(num, num) for num in (100, 47, 2, 33)]


class Planner:
    """Steps over the prompts, each of which has a row, blocks and a slot of its own."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.blocks = [driver.take_blocks(len(prompt)) for prompt in PROMPTS]
        self.slots = [-1] * len(PROMPTS)
        self._free = list(range(driver.runner.facts.num_state_slots))

    def step(self, *entries: Entry, changes_slots: bool = False) -> list[np.ndarray]:
        """The logits behind each entry. An entry at 0 begins without a state."""
        driver, states = self.driver, []
        for which, start, _ in entries:
            before = -1 if start == 0 else self.slots[which]
            if self.slots[which] < 0 or changes_slots:
                if self.slots[which] >= 0:
                    self._free.append(self.slots[which])
                self.slots[which] = self._free.pop(0)
            states.append((before, self.slots[which]))
        adds = [row_add(which, PROMPTS[which][: start + num], self.blocks[which]) for which, start, num in entries]
        driver.step([(*entry, True) for entry in entries], adds=adds, states=states)
        logits = list(driver.logits())
        driver.step(drops=[which for which, *_ in entries])
        return logits


def run_all(driver: Driver, seed: int | None = None) -> dict[tuple[int, int], np.ndarray]:
    """Whole prompts, chunks of 33, and decode steps in a batch; with a seed, random chunks of all prompts instead.
    Returns the logits by prompt and position."""
    planner, found = Planner(driver), {}

    def step(*entries: Entry, changes_slots: bool = False) -> None:
        for (which, start, num), logits in zip(
            entries, planner.step(*entries, changes_slots=changes_slots), strict=True
        ):
            found[which, start + num] = logits

    if seed is None:
        step((0, 0, 100))
        step((1, 0, 33))
        step((1, 33, 14))
        step((0, 0, 33), (3, 0, 20))
        step((0, 33, 33))
        step((0, 66, 30), (2, 0, 1), (3, 20, 9))
        step((2, 1, 1), (0, 96, 1))
        for i in range(3):
            step((3, 29 + i, 1), (0, 97 + i, 1), changes_slots=i == 1)
        return found
    random = np.random.default_rng(seed)
    done = [0] * len(PROMPTS)
    while any(at < len(prompt) for at, prompt in zip(done, PROMPTS, strict=True)):
        rows = [row for row, prompt in enumerate(PROMPTS) if done[row] < len(prompt) and random.random() < 0.8]
        random.shuffle(rows)
        entries = []
        for row in rows:
            num = int(min(len(PROMPTS[row]) - done[row], random.choice([1, 1, 2, 16, 30])))
            entries.append((row, done[row], num))
            done[row] += num
        if entries:
            step(*entries, changes_slots=bool(random.random() < 0.3))
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    folder, model = write(tmp_path, variant)
    driver = Driver(folder, settings(kernels="torch", kv_mib=4))
    found = run_all(driver)
    theirs = logits_of(variant, tmp_path, model, PROMPTS)
    assert min(float(logits.std()) for logits in theirs) > 100 * MAX_ERROR
    for (which, end), logits in found.items():
        np.testing.assert_allclose(logits, theirs[which][end - 1], rtol=0, atol=MAX_ERROR, err_msg=str((which, end)))


def native_driver(folder: Path, kernels: str = "auto") -> Driver:
    driver = Driver(folder, settings(dtype="bfloat16", kernels=kernels, kv_mib=4, threads=2, tokens=128))
    assert isinstance(driver.runner.program, NativeProgram)
    return driver


@pytest.mark.parametrize("name", VARIANTS)
def test_the_native_program_computes_them_in_bfloat16(tmp_path: Path, name: str) -> None:
    """Near those of transformers with the same rounded weights, and the same bits for any chunks, neighbours and
    slots."""
    variant = exact(VARIANTS[name])
    folder, model = write(tmp_path, variant)
    found = run_all(native_driver(folder))
    for seed in range(2):
        for at, logits in run_all(native_driver(folder), seed).items():
            if at in found:
                np.testing.assert_array_equal(logits, found[at], str(at))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.copy_(parameter.bfloat16())
    theirs = logits_of(variant, tmp_path, model, PROMPTS)

    def errors(logits: dict[tuple[int, int], np.ndarray]) -> list[float]:
        references = {(which, end): theirs[which][end - 1].numpy() for which, end in logits}
        return [float(np.sqrt(np.mean((logits[at] - one) ** 2)) / one.std()) for at, one in references.items()]

    assert np.mean(errors(found)) < MAX_NATIVE_ERROR
    wide = next(isa for isa in available() if isa in ("avx2", "neon", "portable"))
    assert max(errors(run_all(native_driver(folder, wide)))) < MAX_WIDE_ERROR


def test_the_text_model_of_one_for_texts_and_images(tmp_path: Path) -> None:
    """Other tensors are skipped: those for images, and of the layer that drafts."""
    model = make(VARIANTS["qwen3_5"])
    source = checkpoints.save_folder(tmp_path / "source", model)
    tensors = {
        name if name == "lm_head.weight" else f"model.language_model.{name.removeprefix('model.')}": tensor
        for name, tensor in load_file(source / "model.safetensors").items()
    }
    tensors |= {"model.visual.patch_embed.proj.weight": torch.ones(8, 8), "mtp.fc.weight": torch.ones(8, 8)}
    tensors["mtp.layers.0.input_layernorm.weight"] = torch.ones(8)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    text = json.loads((source / "config.json").read_text())
    text["rope_parameters"]["mrope_section"] = [2, 1, 1]  # of images; those of real models have more dimensions
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (source / "config.json").write_text(json.dumps({**whole, "vision_config": {"depth": 1}}))
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))
    reported = (folder / NOTES).read_text()
    assert "ignored 'model.visual.patch_embed.proj.weight': images are not served" in reported
    assert "ignored 'mtp.fc.weight' and 1 more: multi-token prediction is not supported" in reported
    planner = Planner(Driver(folder, settings(kernels="torch", kv_mib=4)))
    (logits,) = planner.step((1, 0, 47))
    (theirs,) = logits_of(VARIANTS["qwen3_5"], tmp_path, model, [PROMPTS[1]])
    np.testing.assert_allclose(logits, theirs[-1], rtol=0, atol=MAX_ERROR)


def test_what_decays_states_is_never_quantized(tmp_path: Path) -> None:
    model = make(VARIANTS["qwen3_next"])
    source = checkpoints.save_folder(tmp_path / "source", model)
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache"), quantization="q8_0"))
    formats = {}
    for path in ModelConfig.load(folder).weight_paths(folder):
        formats |= {name: entry.dtype for name, entry in read_header(path).items()}
    before = "model.layers.0.linear_attn."
    kept = ("in_proj_ba.weight", "conv1d.weight", "A_log", "dt_bias", "norm.weight")
    assert {name: formats[before + name] for name in kept} == dict.fromkeys(kept, "F32")
    assert formats[f"{before}in_proj_qkvz.weight"] == formats[f"{before}out_proj.weight"] == "U8"
    driver = native_driver(folder)
    planner = Planner(driver)
    whole, *_ = planner.step((0, 0, 100))
    planner.step((0, 0, 33))
    (chunked,) = planner.step((0, 33, 67), changes_slots=True)
    np.testing.assert_array_equal(chunked, whole)


def test_fidelity_is_refused(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, VARIANTS["qwen3_5"])
    with pytest.raises(UserError, match=r"--fidelity is not supported for .*: it has recurrent layers"):
        fidelity.measure(Settings(), folder, [], lambda _: None)


def exact(variant: Variant) -> Variant:
    """The variant whose experts compute every token: rounding errors can't change which of them do."""
    if "num_experts" not in variant.changes:
        return variant
    changes = {**variant.changes, "num_experts_per_tok": variant.changes["num_experts"]}
    return Variant(variant.kind, variant.class_name, changes)
