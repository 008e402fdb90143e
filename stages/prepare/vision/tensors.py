"""The tensors of a vision tower: their names and shapes, and what of them a checkpoint has."""

from collections.abc import Container, Iterable

import msgspec

from pipeline.runtime.model.model_config import Layout, Piece
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.tensors import STORED, Found, Shape, expected_shapes, layer_shapes, norm_shapes

PREFIXES = ("model.", "")
"""What may be before the names of the tensors, by the version of transformers that wrote them."""


def tower_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of a tower, by the names in `VisionConfig.encoder`."""
    config, projector = vision.encoder, vision.projector
    hidden, size = config.hidden_size, vision.patch_size
    shapes: dict[str, Shape] = {"vision.patches.weight": (hidden, vision.num_channels, size, size)}
    if vision.patch_bias:
        shapes["vision.patches.bias"] = (hidden,)
    if config.max_position:
        shapes["vision.positions.weight"] = (config.max_position, hidden)
    if vision.class_token:
        shapes["vision.class.weight"] = (hidden,)
    if config.embedding_norm:
        shapes |= norm_shapes(config, "model.embed_norm")
    for layer in range(config.num_layers):
        shapes |= layer_shapes(config, layer)
    if vision.final_norm:
        shapes |= norm_shapes(config, "model.norm")
    if projector.norm is not None:
        kinds = ("weight", "bias") if projector.norm == "layer" else ("weight",)
        shapes |= {f"vision.projector.norm.{kind}": (hidden,) for kind in kinds}
    width = hidden * projector.merge**2
    for i, matrix in enumerate(projector.matrices):
        shapes[f"vision.projector.{i}.weight"] = (matrix.num_outputs, width)
        if matrix.bias:
            shapes[f"vision.projector.{i}.bias"] = (matrix.num_outputs,)
        width = matrix.num_outputs
    return shapes


def stored_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """The same by the names in the files."""
    return expected_shapes(vision.encoder, tower_shapes(vision))


def with_names_of(vision: VisionConfig, names: Container[str]) -> VisionConfig:
    """The config with the prefix of names that the files have."""
    outside = [name for name in vision.encoder.layout.pieces if _is_outside(name)]
    for prefix in PREFIXES:
        layout = _with_prefix(vision.encoder.layout, prefix, outside)
        other = msgspec.structs.replace(vision, encoder=msgspec.structs.replace(vision.encoder, layout=layout))
        if layout.find("vision.patches.weight")[0] in names:
            return other
    return vision


def _is_outside(name: str) -> bool:
    return name.startswith(("vision.", "model."))


def _with_prefix(layout: Layout, prefix: str, outside: Iterable[str]) -> Layout:
    moved = {
        name: msgspec.structs.replace(layout.pieces[name], tensor=prefix + layout.pieces[name].tensor)
        for name in outside
    }
    pieces: dict[str, Piece] = {**layout.pieces, **moved}
    return Layout(prefix + layout.layers, pieces)


def missing_tensor(vision: VisionConfig, found: Found) -> str | None:
    """The first tensor that the files don't have as floats; None if they have all. Raises ModelError if one has another
    shape."""
    for name, shape in stored_shapes(vision).items():
        if name not in found or found[name][1].dtype not in STORED:
            return name
        path, entry = found[name]
        if entry.shape != shape:
            raise ModelError(
                f"{path}: tensor {name!r} has shape {shown(entry.shape)}, vision_config of config.json says {shape}"
            )
    return None
