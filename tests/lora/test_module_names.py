"""Adapters are read by the names that transformers gives the modules, whatever names the model's files have.

PIPELINE_ALL_CASES=1 pytest tests/lora/test_module_names.py      all architectures, in twenty seconds
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModel

from pipeline.config.settings import Settings
from pipeline.lora.adapter_file import AdapterFile, path_of
from pipeline.lora.convert import convert
from pipeline.lora.peft_config import AdapterError
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.prepare.stage import prepare
from tests.stages.execute import tiny_architectures
from tests.stages.prepare import checkpoints, forms

GEMMA, HUB = "language_model.model.", re.compile(r"\A(?:transformer|gpt_neox|model)\.")
LAYER = re.compile(r"(?:layers|h|blocks)\.1\.")
OTHERS = re.compile(r"vision|shared_expert|mlp\.gate\Z")
ALL_CASES = bool(os.environ.get("PIPELINE_ALL_CASES"))
QWEN2_VL = ("qwen2_vl", "qwen2_5_vl")
"""Their files have `model.` before the names of the text model, as do those of a text model alone."""
BY_LAYER = ("gemma4_text", "gemma4_unified_text", "laguna")
"""Kinds of VARIANTS whose layers have different sizes: they have no adapters."""
IN_BRIEF = ("llama", "gemma3", "ministral3", "qwen2_vl", "idefics3", "gpt_neox", "opt", "bloom")
MODELS = forms.MODELS if ALL_CASES else IN_BRIEF


def prepared(source: Path) -> Path:
    return prepare(Settings(model=str(source), cache_dir=str(source.parent / "cache")))


def modules_of(model: Any) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linear modules in the second layer of a model in transformers, by name, without those
    for images and of experts."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and LAYER.search(name) and not OTHERS.search(name)
    }


def write(folder: Path, shapes: dict[str, tuple[int, int]]) -> Path:
    """An adapter of these modules, whose matrices depend on their order alone."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(3)
    tensors = {}
    for name, (outputs, inputs) in shapes.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = random.normal(size=(2, inputs)).astype(np.float32)
        tensors[f"base_model.model.{name}.lora_B.weight"] = random.normal(size=(outputs, 2)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    return folder


def matrices(path: Path, model_dir: Path, shapes: dict[str, tuple[int, int]]) -> dict[tuple[int, str], Any]:
    file = AdapterFile(path_of(model_dir, convert(write(path, shapes), model_dir, "f32", 8)))
    return {(one.layer, one.target): file.matrices(one.layer, one.target) for one in file.header.entries}


def assert_same(one: dict[tuple[int, str], Any], other: dict[tuple[int, str], Any]) -> None:
    assert one.keys() == other.keys()
    for key, pair in one.items():
        assert all((mine == theirs).all() for mine, theirs in zip(pair, other[key], strict=True)), key


def names_of(name: str, shapes: dict[str, tuple[int, int]]) -> Iterator[Callable[[str], str]]:
    """What other versions and classes of transformers call modules that this one calls as in `shapes`."""
    yield lambda module: module
    yield lambda module: HUB.sub("", module)
    if name in ("gemma3", "mistral3", "ministral3", *forms.QWEN_VL):
        assert all(module.startswith("model.language_model.layers.") for module in shapes)
        for prefix in ("language_model.model.layers.", "model.layers.", "layers.", "language_model.layers."):
            yield lambda module, prefix=prefix: module.replace("model.language_model.layers.", prefix)  # type: ignore[misc]
    if name == "idefics3":
        yield lambda module: module.replace("text_model.", "")


@pytest.mark.parametrize("name", MODELS)
def test_modules_have_the_names_of_transformers_in_any_folder(tmp_path: Path, name: str) -> None:
    shapes = modules_of(forms.model(name))
    text = re.compile(rf"\A{re.escape('model.' if name in QWEN2_VL else GEMMA)}")
    hub = partial(text.sub, "language_model.") if name in QWEN2_VL else partial(HUB.sub, "")
    in_memory = partial(text.sub, "model.language_model.")
    folders = [
        prepared(forms.write(tmp_path / "plain", name)),
        prepared(forms.write(tmp_path / "hub", name, lambda folder: folder.rename(hub))),
        prepared(forms.write(tmp_path / "memory", name, lambda folder: folder.rename(in_memory))),
    ]
    if name == "gpt2":  # its modules are transposed, and refused by name
        shapes = {"transformer.h.1.attn.c_proj": (64, 64)}
        with pytest.raises(AdapterError, match=r"changes 'transformer\.h\.1\.attn\.c_proj'"):
            matrices(tmp_path / "adapter", folders[0], shapes)
        return
    expected = matrices(tmp_path / "peft", folders[0], shapes)
    assert expected and all(layer == 1 for layer, _ in expected)
    for i, folder in enumerate(folders):
        for j, change in enumerate(names_of(name, shapes)):
            renamed = {change(module): shape for module, shape in shapes.items()}
            assert_same(matrices(tmp_path / f"peft-{i}-{j}", folder, renamed), expected)


@pytest.mark.parametrize("name", tiny_architectures.VARIANTS if ALL_CASES else ["falcon 7b", "mpt", "phi3", "laguna"])
def test_modules_of_every_architecture_have_the_names_of_transformers(tmp_path: Path, name: str) -> None:
    model = tiny_architectures.make(tiny_architectures.VARIANTS[name])
    shapes = modules_of(model)
    if not shapes:
        return  # modules of another class, in GPT-2 and the first StarCoder
    folder = prepared(checkpoints.save_folder(tmp_path / "source", model))
    if tiny_architectures.VARIANTS[name].kind in BY_LAYER:
        message = r"LoRA adapters are not supported for source \(\w+\): its layers have different sizes\Z"
        with pytest.raises(AdapterError, match=message):
            matrices(tmp_path / "head", folder, shapes)
        return
    base = modules_of(AutoModel.from_config(model.config))
    assert base.keys() != shapes.keys() and list(base.values()) == list(shapes.values())
    assert_same(matrices(tmp_path / "base", folder, base), matrices(tmp_path / "head", folder, shapes))


def test_a_text_model_alone_takes_adapters_of_the_model_for_texts_and_images(tmp_path: Path) -> None:
    """As a .gguf file has it, which does not say what it was part of."""
    variant = tiny_architectures.VARIANTS["gemma3"]
    folder = prepared(checkpoints.save_folder(tmp_path / "source", tiny_architectures.make(variant)))
    prefixes = ("model.layers.1.", "model.language_model.layers.1.", "language_model.model.layers.1.")
    found = [
        matrices(tmp_path / f"{i}", folder, {f"{prefix}mlp.down_proj": (64, 96)}) for i, prefix in enumerate(prefixes)
    ]
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (["model.language_model.layers.1.mlp.up_proj"], "changes 'model.language_model.layers.1.mlp.up_proj'"),
        (["vision_tower.layers.1.mlp.up_proj"], "changes 'vision_tower.layers.1.mlp.up_proj'"),
        (["model.layers.01.mlp.up_proj"], "changes 'model.layers.01.mlp.up_proj'"),
        (["model.layers.7.mlp.up_proj"], "changes 'model.layers.7.mlp.up_proj'"),
        (["transformer.h.1.mlp.up_proj"], "changes 'transformer.h.1.mlp.up_proj'"),
        (["model.layers.1.mlp.up_proj", "layers.1.mlp.up_proj"], "are the same module of this model"),
    ],
)
def test_names_of_other_models_and_two_names_of_a_module_are_refused(
    tmp_path: Path, modules: list[str], words: str
) -> None:
    folder = prepared(forms.write(tmp_path / "plain", "llama"))
    assert ModelConfig.load(folder).architecture == "llama"
    with pytest.raises(AdapterError, match=re.escape(words)):
        convert(write(tmp_path / "peft", dict.fromkeys(modules, (96, 64))), folder, "f32", 8)
