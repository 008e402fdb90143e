"""A vision tower beside torch: CPU seconds of an image, in turns.

    python -m tools.part_bench.towers
    python -m tools.part_bench.towers --kernels avx2 --rounds 7

The tower has SigLIP's shape as in SmolVLM-256M (12 layers of 768, 1,024 patches of an image of 512 × 512) and random
weights. Ours has them in bfloat16, transformers in float32 (its own attention of torch) and in bfloat16. Prints the
median and the least of each, ours by op, and the cosine of the rows. The optimized CPU library is compiled first if
there is none. With one thread, CPU time means something also on a busy machine.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median

import numpy as np
import torch

from pipeline.config.settings import ExecuteSettings, Settings
from pipeline.kernels.cpu import build, native_library
from pipeline.kernels.cpu.isa import NEEDED, available
from pipeline.runtime.model.vision_config import VisionConfig
from pipeline.stages.execute.cpu.backend import Library
from pipeline.stages.execute.cpu.native.tower import NativeTower
from pipeline.stages.execute.cpu.vision import MediaItem, VisionEncoder
from tests.stages.execute.vision.tiny_towers import Variant, make, normalized, prepared, save
from tools.part_bench.attention import count

SIDE = 512
TOWER = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": SIDE,
    "patch_size": 16,
}
MERGE = 4


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", choices=list(NEEDED), default=available()[0])
    parser.add_argument("--threads", type=count, default=1)
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--layers", type=count, default=TOWER["num_hidden_layers"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    variant = Variant("idefics3", TOWER | {"num_hidden_layers": args.layers}, {"scale_factor": MERGE})
    path = build.build(args.kernels, print)
    library = Library(args.kernels, native_library.load(path), build.code_of(args.kernels), is_quick=False)
    with tempfile.TemporaryDirectory() as name:
        model = make(variant)
        with (
            torch.no_grad()
        ):  # numbers as in a trained tower: those of tests are so large that bfloat16 chooses other keys
            for matrix in (each for each in model.parameters() if each.dim() > 1):
                matrix.normal_(0, 0.02)
        folder = prepared(Path(name), save(Path(name), variant, model))
        vision = VisionConfig.load(folder)
        assert vision is not None
        settings = Settings(execute=ExecuteSettings(kernels=args.kernels))
        pixels = np.random.default_rng(0).integers(0, 256, (1, 3, SIDE, SIDE), np.uint8)
        rows = np.empty((vision.num_rows(SIDE, SIDE), vision.hidden_size), np.float32)
        item, given = MediaItem(pixels, (1, 1)), normalized(pixels)
        with closing(VisionEncoder(settings, folder, vision, args.threads, library)) as encoder, torch.inference_mode():
            theirs = model.get_image_features(given[None]).pooler_output[0].numpy()
            tower = model.model.vision_model
            narrow, given_narrow = tower.to(torch.bfloat16), given.bfloat16()
            in_bfloat16 = [seconds_of(lambda: narrow(given_narrow)) for _ in range(2)][1:]
            tower = narrow.float()
            times: dict[str, list[float]] = {"ours, bfloat16": [], "torch, float32": []}
            for _ in range(args.rounds + 1):
                times["ours, bfloat16"].append(seconds_of(lambda: encoder.encode([item], [rows])))
                times["torch, float32"].append(seconds_of(lambda: tower(given)))
            assert isinstance(encoder.program, NativeTower)
            by_op: dict[str, float] = defaultdict(float)
            for op, seconds in encoder.program.profile():
                by_op[op] += seconds
    print(f"{args.kernels}, {args.threads} threads, {args.rounds} rounds, CPU seconds of an image: median (least)")
    for label, found in times.items():
        print(f"{label}   {median(found[1:]):.3f} ({min(found[1:]):.3f})")  # the first one loads
    print(f"torch, bfloat16  {in_bfloat16[0]:.3f} (once)")
    ratio = median(times["torch, float32"][1:]) / median(times["ours, bfloat16"][1:])
    print(f"torch in float32 takes {ratio:.2f} times as long")
    total = sum(by_op.values())
    print(
        "by op: "
        + ", ".join(f"{op} {seconds / total:.0%}" for op, seconds in sorted(by_op.items(), key=lambda one: -one[1])[:5])
    )
    cosine = (rows * theirs).sum(1) / np.linalg.norm(rows, axis=1) / np.linalg.norm(theirs, axis=1)
    print(f"least cosine of a row: {cosine.min():.6f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
