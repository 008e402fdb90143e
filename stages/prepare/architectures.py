"""The supported architectures: how to read their config.json.

`stages/prepare/families/` has a file for each family. A Llama-shaped architecture is one entry in `llama.py` there, and
one in `stages/prepare/gguf/architectures.py` for .gguf files.
"""

from typing import Any

from pipeline.errors import UserError
from pipeline.runtime.model import foreign
from pipeline.runtime.model.architecture_names import Architecture
from pipeline.stages.prepare.encoders import bert, modernbert, mpnet, nomic
from pipeline.stages.prepare.families import (
    alibi,
    cohere,
    experts,
    gemma,
    glm,
    gpt,
    layer_norm,
    llama,
    olmo,
    phi,
)
from pipeline.stages.prepare.families.architecture import HfArchitecture
from pipeline.stages.prepare.families.by_layer import gemma4, laguna, muse_glimmer
from pipeline.stages.prepare.families.keys import ConfigFault, Keys
from pipeline.stages.prepare.families.recurrent import delta_net, short_conv

ENCODERS = (bert, mpnet, modernbert, nomic)

RECURRENT = (delta_net, short_conv)

FAMILIES = (
    *(llama, gemma, gemma4, muse_glimmer, phi, glm, olmo, cohere, layer_norm, gpt, alibi, experts, laguna),
    *(*RECURRENT, *ENCODERS),
)
HF_ARCHITECTURES: dict[Architecture, HfArchitecture] = {
    name: architecture for family in FAMILIES for name, architecture in family.ARCHITECTURES.items()
}


def find_architecture(model_type: object) -> HfArchitecture | None:
    """The architecture with this name: ours, or that of an installed package. Raises UserError if a package is
    broken."""
    for name, ours in HF_ARCHITECTURES.items():
        if name == model_type:
            return ours
    if not isinstance(model_type, str):
        return None
    if (found := foreign.find(model_type)) is None:
        return None
    architecture = found.load(found.config)
    if not isinstance(architecture, HfArchitecture):
        raise UserError(f"{found.config} of model_type {model_type!r} is no HfArchitecture")
    return architecture


def architecture_of(model_type: str) -> HfArchitecture:
    """As `find_architecture`, of a model that was prepared."""
    found = find_architecture(model_type)
    assert found is not None, f"no architecture {model_type}"
    return found


def flags_of(architecture: HfArchitecture, keys: Keys) -> dict[str, Any]:
    """The fields of ModelConfig that the architecture fixes, and flags for biases from config.json.

    Raises ConfigFault if a value is not a bool.
    """
    flags = dict(architecture.always)
    for flag, key in {"qkv_bias": "attention_bias", "out_bias": "attention_bias", "mlp_bias": "mlp_bias"}.items():
        if flag not in flags:
            try:
                flags[flag] = keys.flag(key)
            except ConfigFault:
                raise keys.fault(key, "true or false") from None
    return flags


__all__ = ["HF_ARCHITECTURES", "ConfigFault", "HfArchitecture", "flags_of"]
