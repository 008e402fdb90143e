"""Every architecture has the logits of transformers, for any split of a sequence into steps."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Exaone4_5_Config,
    Exaone4_5_ForConditionalGeneration,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
)

from pipeline.config.settings import Settings
from pipeline.stages.execute.cpu.native.program import NativeProgram
from pipeline.stages.execute.cpu.pytorch.program import TorchProgram
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import tiny_architectures
from tests.stages.execute.driver import Driver, row_add, settings
from tests.stages.execute.pair import NUM_THREADS
from tests.stages.execute.tiny_architectures import SIZES, VARIANTS, VOCAB_SIZE, Variant
from tests.stages.prepare import checkpoints

MAX_ERROR = 1e-4
MAX_NATIVE_ERROR = 0.05
"""Of the native program in bfloat16, relative to the standard deviation of the logits. A layer that computes something
else has tens of percent."""

ALL_FORMS = ["gemma2", "gpt_oss", "falcon rw", "qwen2_moe", "ministral3", "granite"]
"""Together they have windows, sinks, ALiBi, caps, experts with a gate of their own, growing queries, multipliers, and
norms and activations of all kinds."""


def random_ids(num: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num).tolist()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    """A whole prompt, one in chunks, one behind a cached prefix, and all of them decoding in one batch."""
    variant = VARIANTS[name]
    folder, model = tiny_architectures.write(tmp_path, variant)
    driver = Driver(folder, settings(kernels="torch", max_model_len=variant.max_model_len, kv_mib=2))
    prefix = random_ids(32, 1)
    prompts = [prefix + random_ids(28, 2), random_ids(50, 3), prefix + random_ids(14, 4)]
    continued = [prompt + random_ids(3, 5) for prompt in prompts]
    blocks = [driver.take_blocks(80), driver.take_blocks(80), []]
    blocks[2] = blocks[0][:2] + driver.take_blocks(48)
    made: list[tuple[int, int, np.ndarray]] = []

    def step(*entries: tuple[int, int, int, bool], known: int = 0) -> None:
        """`known` is how many ids after the prompt the new rows have."""
        sampling = [entry for entry in entries if entry[3]]
        adds = [
            row_add(row, continued[row][: start + count if known else len(prompts[row])], blocks[row])
            for row, start, count, _ in entries
            if known or row not in added
        ]
        added.update(entry[0] for entry in entries)
        driver.step(list(entries), adds=adds)
        made.extend(
            (row, start + count, logits)
            for (row, start, count, _), logits in zip(sampling, driver.logits(), strict=True)
        )
        if known:
            driver.step(drops=[entry[0] for entry in entries])

    added: set[int] = set()
    step((0, 0, 60, True))
    for start, count in ((0, 17), (17, 1), (18, 32)):
        step((1, start, count, start + count == 50))
    step((2, 32, 14, True))
    driver.step(drops=[0, 1, 2])
    for more in range(1, 4):
        step(*((row, len(prompt) + more - 1, 1, True) for row, prompt in enumerate(prompts)), known=more)
    assert len(made) == 3 + 3 * 3
    with torch.inference_mode():
        theirs = [model(torch.tensor([ids])).logits[0].numpy() for ids in continued]
    assert min(logits.std() for logits in theirs) > 100 * MAX_ERROR
    for row, end, logits in made:
        np.testing.assert_allclose(logits, theirs[row][end - 1], rtol=0, atol=MAX_ERROR)


def native_driver(folder: Path, variant: Variant) -> Driver:
    how = settings(dtype="bfloat16", max_model_len=variant.max_model_len, kv_mib=2, threads=2, tokens=256)
    driver = Driver(folder, how)
    assert isinstance(driver.runner.program, NativeProgram)
    return driver


@pytest.mark.parametrize("name", VARIANTS)
def test_the_native_program_computes_them_in_bfloat16(tmp_path: Path, name: str) -> None:
    """Near those of transformers with the same rounded weights, and the same bits for any chunks and neighbours."""
    variant = VARIANTS[name]
    folder, model = tiny_architectures.write(tmp_path / "variant", variant)
    driver = native_driver(folder, variant)
    prompts = [random_ids(60, 1), random_ids(47, 2)]
    blocks = [driver.take_blocks(80) for _ in range(6)]

    def last_logits(*entries: tuple[int, int, int, bool]) -> list[np.ndarray]:
        """Logits of entries (prompt, start, count, whether to sample) in new rows."""
        rows = [(next_row(), *entry) for entry in entries]
        adds = [row_add(row, prompts[which], blocks[which]) for row, which, *_ in rows]
        driver.step([(row, start, count, samples) for row, _, start, count, samples in rows], adds=adds)
        logits = list(driver.logits())
        driver.step(drops=[row for row, *_ in rows])
        return logits

    taken = iter(range(100))

    def next_row() -> int:
        return next(taken) % 8

    (whole,) = last_logits((0, 0, 60, True))
    together = last_logits((1, 0, 47, True), (0, 0, 60, True))
    np.testing.assert_array_equal(together[1], whole)
    last_logits((0, 0, 21, False))
    (chunked,) = last_logits((0, 21, 39, True))
    np.testing.assert_array_equal(chunked, whole)
    (decoded,) = last_logits((0, 59, 1, True))
    np.testing.assert_array_equal(decoded, whole)
    if (exact := tiny_architectures.without_choice(variant)) is not variant:
        folder, model = tiny_architectures.write(tmp_path / "exact", exact)
        driver = native_driver(folder, exact)
        blocks = [driver.take_blocks(80) for _ in range(2)]
        together = last_logits((1, 0, 47, True), (0, 0, 60, True))
    with torch.inference_mode():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16())
        theirs = [model(torch.tensor([ids])).logits[0, -1].numpy() for ids in prompts]
    for ours, reference in zip((together[1], together[0]), theirs, strict=True):
        assert np.sqrt(np.mean((ours - reference) ** 2)) < MAX_NATIVE_ERROR * reference.std()


@pytest.mark.parametrize("name", VARIANTS if os.environ.get("PIPELINE_ALL_CASES") else ALL_FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_torch_program_has_the_same_bits_for_any_chunks_and_neighbours(
    tmp_path: Path, name: str, dtype: str
) -> None:
    variant = VARIANTS[name]
    folder, _ = tiny_architectures.write(tmp_path, variant)
    how = settings(
        dtype=dtype, kernels="torch", max_model_len=variant.max_model_len, kv_mib=2, threads=NUM_THREADS, max_num_seqs=8
    )
    driver = Driver(folder, how)
    assert isinstance(driver.runner.program, TorchProgram)
    prompts = [random_ids(num, num) for num in (60, 47, 17, 33)]
    blocks = [driver.take_blocks(64) for _ in prompts]

    def run(steps: list[list[tuple[int, int, int]]]) -> dict[tuple[int, int], np.ndarray]:
        """Logits behind each prompt's ends of the entries (prompt, start, count)."""
        found: dict[tuple[int, int], np.ndarray] = {}
        for entries in steps:
            adds = [row_add(row, prompts[row][: at + num], blocks[row]) for row, at, num in entries]
            driver.step([(*entry, True) for entry in entries], adds=adds)
            found |= {(row, at + num): one for (row, at, num), one in zip(entries, driver.logits().copy(), strict=True)}
            driver.step(drops=[row for row, *_ in entries])
        return found

    alone: dict[tuple[int, int], np.ndarray] = {}
    for row, prompt in enumerate(prompts):
        alone |= run([[(row, at, 1)] for at in range(len(prompt))])
    random = np.random.default_rng(0)
    for _ in range(3):
        done, steps = [0] * len(prompts), []
        while any(at < len(prompt) for at, prompt in zip(done, prompts, strict=True)):
            rows = [row for row, prompt in enumerate(prompts) if done[row] < len(prompt) and random.random() < 0.8]
            random.shuffle(rows)
            steps.append([])
            for row in rows:
                num = int(min(len(prompts[row]) - done[row], random.choice([1, 1, 2, 16, 30])))
                steps[-1].append((row, done[row], num))
                done[row] += num
        for at, logits in run([entries for entries in steps if entries]).items():
            np.testing.assert_array_equal(logits, alone[at], str(at))


def _gemma() -> Any:
    text = {**SIZES, "vocab_size": VOCAB_SIZE, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 21}
    vision = {**dict.fromkeys(("hidden_size", "intermediate_size"), 32), "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def _exaone() -> Any:
    text = {**SIZES, "vocab_size": VOCAB_SIZE, "head_dim": 16, "sliding_window": 21, "sliding_window_pattern": "LLG"}
    text |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "model_type": "exaone4"}
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "num_key_value_heads": 2,
    }
    vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [0]}
    return Exaone4_5_ForConditionalGeneration(Exaone4_5_Config(text_config=text, vision_config=vision))


@pytest.mark.parametrize("make", [_gemma, _exaone])
def test_the_text_model_of_one_for_texts_and_images(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make().eval()
    source = checkpoints.save_folder(tmp_path / "source", model)
    driver = Driver(
        prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache"))), settings(kernels="torch", kv_mib=2)
    )
    ids = random_ids(40, 1)
    driver.step([(0, 0, 40, True)], adds=[row_add(0, ids, driver.take_blocks(40))])
    with torch.inference_mode():
        theirs = model(input_ids=torch.tensor([ids])).logits[0, -1].numpy()
    assert theirs.std() > 100 * MAX_ERROR
    np.testing.assert_allclose(driver.logits()[0], theirs, rtol=0, atol=MAX_ERROR)


def test_names_without_a_prefix_are_those_of_the_same_tensors(tmp_path: Path) -> None:
    """As in the files of GPT-2 on the hub, which also have causal masks."""
    variant = VARIANTS["gpt2"]
    source = checkpoints.save_folder(tmp_path / "source", tiny_architectures.make(variant))
    tensors = load_file(source / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    renamed["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(renamed, source / "model.safetensors", {"format": "pt"})
    folder = prepare(Settings(model=str(source), cache_dir=str(tmp_path / "cache")))
    ids, found = random_ids(20, 1), []
    for one in (folder, tiny_architectures.write(tmp_path / "plain", variant)[0]):
        driver = Driver(one, settings(kernels="torch", kv_mib=2))
        driver.step([(0, 0, 20, True)], adds=[row_add(0, ids, driver.take_blocks(20))])
        found.append(driver.logits())
    np.testing.assert_array_equal(found[0], found[1])
