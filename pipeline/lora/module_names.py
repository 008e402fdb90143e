"""The names that the modules of a model's layers have in transformers, and so in adapters of PEFT.

They depend on the class and the version that the adapter was trained with, not on the names in the model's files:
`BloomForCausalLM` has `transformer.h.0.mlp`, `BloomModel` has `h.0.mlp`, and so have the files on the hub. The layers
of a text model in one for texts and images are at `language_model.model.layers` before transformers 4.52, at
`model.language_model.layers` since, and at `model.layers` if the text model was loaded alone, and in Qwen2-VL before.
Idefics has `text_model` there.
"""

import re
from collections.abc import Mapping

from pipeline.runtime.model.model_config import Layout, ModelConfig

BASES: Mapping[str, str] = {"layers": "model.", "h": "transformer.", "blocks": "transformer."}
"""What `ForCausalLM` has before the list of layers, by the list's name."""
OTHER_BASES: Mapping[str, tuple[str, ...]] = {
    "gpt_neox": ("gpt_neox.", ""),
    "opt": ("model.decoder.", "decoder."),
}
"""The same, and what the base model has, where that is something else."""
TEXT_MODELS = ("model.language_model.", "language_model.model.", "language_model.", "model.text_model.", "text_model.")
"""The same in models for texts and images; the last two in Idefics."""
TEXT_ARCHITECTURES: frozenset[str] = frozenset({"gemma3_text", "mistral", "ministral3"})
"""Those whose models are also text models of Gemma 3 and Mistral 3; a .gguf file doesn't say whether it was one."""

_LAYER = re.compile(r"(?P<number>0|[1-9][0-9]{0,5})\.(?P<module>.+)", re.DOTALL)


def layout_of(model: ModelConfig) -> Layout:
    """The layout of the model's modules in transformers. A model of a .gguf file has other names in its files."""
    return model.layout if model.modules is None else model.modules


def prefixes_of(model: ModelConfig) -> tuple[str, ...]:
    """What the names of layers may begin with, up to their number."""
    layers = layout_of(model).layers.removesuffix(".{}.")
    container = layers.rpartition(".")[2]
    bases = OTHER_BASES.get(model.architecture) or (BASES.get(container, ""), "")
    is_part = "language_model." in layers or "text_model." in layers or model.rope_axes is not None
    if is_part or model.architecture in TEXT_ARCHITECTURES:
        bases += TEXT_MODELS
    return tuple(f"{base}{container}." for base in bases)


def in_files(module: str, model: ModelConfig) -> str:
    """The name that an adapter's module has in `layout_of`, if it is in a layer; else `module` itself."""
    for prefix in prefixes_of(model):
        if module.startswith(prefix) and (found := _LAYER.fullmatch(module, len(prefix))) is not None:
            return f"{layout_of(model).layers.format(found['number'])}{found['module']}"
    return module
