"""Compile whole steps of whole models for a GPU that need not be present, and count their launches.

    python -m tests.stages.execute.cuda.compile_steps [MODEL ...]

Run this without TRITON_INTERPRET. Tensors have no memory, so a model may have any size.
"""

import argparse
import time
from collections import Counter
from typing import Any

import torch

from pipeline.cli.profile.shapes import SHAPES as SMALL
from pipeline.kernels.matrix import Matrix
from pipeline.kernels.stored_matrix import Format, row_bytes
from pipeline.kernels.triton.gemm import quantize
from pipeline.kernels.triton.launch import compiling
from pipeline.kernels.triton.rows import NUM_FIELDS, RowState
from pipeline.stages.execute.cuda.device import Calls, Interpreted
from pipeline.stages.execute.cuda.graphs.step_graphs import CapturedStepKind, StepGraphs
from pipeline.stages.execute.cuda.graphs.step_shapes import StepShapes
from pipeline.stages.execute.cuda.model.device_model import DeviceModel, allocate_kv
from pipeline.stages.execute.cuda.ranks.collectives import Collectives
from pipeline.stages.execute.cuda.ranks.cut import ShardBuilder, rank_config
from pipeline.stages.execute.cuda.ranks.link import OneShot, RankLink
from pipeline.stages.execute.models.registry import build_program
from pipeline.stages.execute.ranks.share import share_of
from tests.kernels.triton.pretending import pretend, pretend_h100
from tools.gpu_check.shapes import LLAMA_1B, LLAMA_8B

SHAPES = SMALL | {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B}

MAX_ROWS, MAX_TOKENS, MAX_LEN, NUM_BLOCKS = 256, 2048, 4096, 64


class NoWeights:
    """The tensors of any model, without values: in bfloat16, or in the formats of a Q4_K_M file."""

    def __init__(self, *, q4_k_m: bool) -> None:
        self._q4_k_m = q4_k_m

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        if not self._q4_k_m:
            return Matrix("bf16", torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), rows, columns)
        is_finer = any(part in name for part in ("v_proj", "down_proj", "embed_tokens", "lm_head"))
        format: Format = "q6_k" if is_finer else "q4_k"
        data = torch.empty(rows, row_bytes(format, columns), dtype=torch.uint8, device="meta")
        return Matrix(format, data, rows, columns)

    def matrices(self, names: list[str], rows: list[int], columns: int) -> tuple[Matrix, ...]:
        return tuple(self.matrix(name, num, columns) for name, num in zip(names, rows, strict=True))

    def vector(self, name: str, size: int) -> torch.Tensor:
        return torch.ones(size)

    def join_vectors(self, names: list[str], sizes: list[int]) -> torch.Tensor:
        return torch.ones(sum(sizes))


class DeviceWithoutMemory(Interpreted):
    """A device without memory."""

    launches_early = True

    def __init__(self) -> None:
        self.where = torch.device("meta")
        self.name = "none"

    def graph(self, calls: Calls) -> Calls:
        return calls


class NoRanks(Collectives):
    """Counts what ranks would do together."""

    def __init__(self, launches: Counter[str]) -> None:
        self._launches = launches

    def all_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        assert out.numel() % own.numel() == 0
        self._launches.update(["(all_gather)"])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        self._launches.update(["(all_reduce)"])

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._launches.update(["(broadcast)"])

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile whole steps for a Hopper GPU.")
    parser.add_argument("shapes", nargs="*", default=["smollm2-135m"], help=", ".join(SHAPES))
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--q4-k-m", action="store_true", help="the formats of a Q4_K_M file")
    parser.add_argument("--early", action="store_true", help="as with execute.programmatic_dependent_launch")
    parser.add_argument("--tp", type=int, default=1, help="compile the steps of the first rank of so many")
    parser.add_argument("--one-shot", action="store_true", help="as with execute.all_reduce = 'one_shot'")
    parser.add_argument("--ahead", type=int, default=0, help="only compile all steps ahead, in so many threads")
    parser.add_argument("--only", default="", help="only steps whose name begins so, such as 'decode 1'")
    args = parser.parse_args()
    driver = pretend()
    launches: Counter[str] = Counter()
    driver.launched = launches.update
    pretend_h100()
    # There are no values to check.
    quantize._half = lambda numbers: numbers.half()
    for name in args.shapes:
        config, device = SHAPES[name], DeviceWithoutMemory()
        whole, share, link = config, share_of(config, 0, args.tp), None
        if args.tp > 1:
            config = rank_config(config, share)
            one_shot = OneShot([0] * args.tp, 0, device.where, None) if args.one_shot else None
            sizes = whole.vocab_size, whole.hidden_size, MAX_ROWS
            link = RankLink(share, *sizes, device.where, NoRanks(launches), one_shot)
        model = DeviceModel(
            *(device, config, torch.bfloat16, MAX_TOKENS, MAX_ROWS, args.quantization), early=args.early, ranks=link
        )
        weights: Any = NoWeights(q4_k_m=args.q4_k_m)
        build_program(whole, weights, model if link is None else ShardBuilder(model, whole, share, args.quantization))
        model.use(allocate_kv(config, NUM_BLOCKS, torch.bfloat16, device.where), MAX_LEN)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="meta")

        rows = RowState(ints(10**7), ints(257, NUM_FIELDS), ints(257, MAX_LEN), ints(257, 256), ints(257, 130))
        steps = StepGraphs(
            device, model, rows, ints(1 << 16), ints(1 << 14), MAX_ROWS, MAX_TOKENS, MAX_ROWS, ranks=link
        )
        shapes = StepShapes(MAX_ROWS, MAX_TOKENS, MAX_ROWS)
        if args.ahead:
            begun = time.perf_counter()
            with compiling(args.ahead):
                for shape in shapes.compiled():
                    steps.compile(shape, CapturedStepKind.SAMPLE)
            took_s = time.perf_counter() - begun
            print(f"{name}: compiled ahead in {took_s:.1f} s, {args.ahead} threads", flush=True)
            continue
        all_shapes = {f"decode {num}": shapes.decode(num) for num in (1, 2, 4, 8, 16, 24, 32, 128, 256)}
        all_shapes |= {f"mixed {num}": shapes.mix(num, 8, 8) for num in (16, 64, 512, 2048)}
        all_shapes |= {f"verify {num}": shapes.verify(num, 8, num) for num in (8, 64)}
        for what, shape in all_shapes.items():
            if not what.startswith(args.only):
                continue
            for kind in CapturedStepKind:
                launches.clear()
                driver.compiled.clear()
                begun = time.perf_counter()
                steps.get(shape, kind).launch()
                spilled = [one for one in driver.compiled if one.stack_bytes]
                print(
                    f"{name} {what} {kind.value}: {sum(launches.values())} launches, {len(driver.compiled)} compiled"
                    f" in {time.perf_counter() - begun:.1f} s, {len(spilled)} with spills",
                    *spilled,
                    flush=True,
                )
                if kind is CapturedStepKind.SAMPLE:
                    print("   ", dict(launches.most_common()), flush=True)


if __name__ == "__main__":
    main()
