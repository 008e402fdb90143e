"""The tensors of a vision tower: their names and shapes, and what of them a checkpoint has."""

from collections.abc import Container

import msgspec

from pipeline.runtime.model.model_config import Layout
from pipeline.runtime.model.vision_config import Projector, VisionConfig
from pipeline.stages.prepare.files import shown
from pipeline.stages.prepare.sources.source import ModelError
from pipeline.stages.prepare.weights.feed_forward_shapes import norm_shapes
from pipeline.stages.prepare.weights.tensors import STORED, Found, Shape, expected_shapes, layer_shapes

PREFIXES = ("model.", "")
"""What may be before the names of the tensors, by the version of transformers that wrote them."""
TOWER = "vision_tower."
TOWERS = (TOWER, f"{TOWER}vision_model.")
"""The prefix of a tower, and that of older versions."""


def tower_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """Name and shape of every tensor of a tower, by the names in `VisionConfig.encoder`."""
    config, projector = vision.encoder, vision.projector
    hidden, size = config.hidden_size, vision.patch_size
    frames = () if vision.frames is None else (vision.frames,)
    shapes: dict[str, Shape] = {"vision.patches.weight": (hidden, vision.num_channels, *frames, size, size)}
    if vision.patch_bias:
        shapes["vision.patches.bias"] = (hidden,)
    if vision.positions != "rope" or vision.interpolates:
        shapes["vision.positions.weight"] = (config.max_position, hidden)
    if vision.class_token:
        shapes["vision.class.weight"] = (hidden,)
    if vision.anyres is not None:
        shapes["vision.newline.weight"] = (vision.hidden_size,)
    if config.embedding_norm:
        shapes |= norm_shapes(config, "model.embed_norm")
    for layer in range(config.num_layers):
        shapes |= layer_shapes(config, layer)
    if vision.final_norm:
        shapes |= norm_shapes(config, "model.norm")
    shapes |= _projector_shapes(projector, hidden, "vision.projector")
    for i, one in enumerate(vision.layer_rows.projectors):
        shapes |= _projector_shapes(one, hidden, f"vision.layer_rows.{i}")
    return shapes


def _projector_shapes(projector: Projector, hidden: int, name: str) -> dict[str, Shape]:
    width = hidden * projector.merge**2
    shapes: dict[str, Shape] = {}
    if projector.norm is not None:
        kinds = ("weight", "bias") if projector.norm == "layer" else ("weight",)
        shapes = {f"{name}.norm.{kind}": (width if projector.norms_squares else hidden,) for kind in kinds}
    for i, matrix in enumerate(projector.matrices):
        shapes[f"{name}.{i}.weight"] = (matrix.num_outputs, width)
        if matrix.bias:
            shapes[f"{name}.{i}.bias"] = (matrix.num_outputs,)
        width = matrix.num_outputs
    return shapes


def stored_shapes(vision: VisionConfig) -> dict[str, Shape]:
    """The same by the names in the files."""
    return expected_shapes(vision.encoder, tower_shapes(vision))


def with_names_of(vision: VisionConfig, names: Container[str]) -> VisionConfig:
    """The config with the prefixes of names that the files have."""
    for prefix in PREFIXES:
        for tower in TOWERS:
            layout = _renamed(vision.encoder.layout, prefix, tower)
            other = msgspec.structs.replace(vision, encoder=msgspec.structs.replace(vision.encoder, layout=layout))
            if layout.find("vision.patches.weight")[0] in names:
                return other
    return vision


def _renamed(layout: Layout, prefix: str, tower: str) -> Layout:
    def named(tensor: str) -> str:
        return prefix + (tower + tensor.removeprefix(TOWER) if tensor.startswith(TOWER) else tensor)

    pieces = {
        name: msgspec.structs.replace(piece, tensor=named(piece.tensor))
        if name.startswith(("vision.", "model."))
        else piece
        for name, piece in layout.pieces.items()
    }
    return Layout(named(layout.layers), pieces)


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
