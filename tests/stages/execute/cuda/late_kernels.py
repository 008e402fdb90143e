"""Count the kernels that a GPU would compile before its server is ready, and while it serves.

    python -m tests.stages.execute.cuda.late_kernels [CASE ...]

Nothing is compiled or computed: a launch only notes its variant, as Triton chooses it. Run this without
TRITON_INTERPRET. Prints a line of JSON for each case: the number of variants before, the names of those that came
later, and the number of steps.
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
import triton

from pipeline.config.settings import ExecuteSettings, LoraSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.kernels.step_inputs import IntArray
from pipeline.kernels.triton.launch import compiling
from pipeline.lora.convert import convert
from pipeline.runtime import messages as m
from pipeline.runtime.model.draft_link import draft_link
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.stages.execute.cuda.device import Interpreted
from pipeline.stages.execute.cuda.runner import CudaRunner
from tests.kernels.triton.pretending import pretend, pretend_h100
from tests.lora.random_adapters import write_adapter
from tests.stages.execute import checkpoints, tiny_architectures
from tests.stages.execute.cuda.drafts.test_eagle import settings_of as eagle_settings
from tests.stages.execute.drafts import test_eagle, test_eagle3
from tests.stages.execute.driver import take
from tests.stages.execute.native_driver import write
from tests.stages.execute.pair import Pair, Request
from tools.gpu_check.servers.in_flight import MAX_TOKENS, NUM_ROWS, NUM_SWAP_BLOCKS, FakeMasks, RandomPlan

NUM_STEPS = 150
MODEL: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "head_dim": 64, "intermediate_size": 512}
KV_BYTES = 400 * 64 * 1024

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "bias_ids": [7],
        "bias_values": [2.0],
        "bad_words_ids": [[9], [5, 6]],
    },
    {"temperature": 0.8, "top_k": 3, "min_tokens": 2, "allowed_ids": bytes(range(64)), "num_logprobs": 0},
    {"num_logprobs": 5, "num_prompt_logprobs": 2},
    {"num_logprobs": 20, "compiled_grammar": "of FakeMasks"},
    {"compiled_grammar": "of FakeMasks", "top_p": 0.5, "temperature": 0.8},
    {"logprob_token_ids": [3, 9, 12], "num_logprobs": 3},
    {"pooling": m.Pooling.MEAN},
    {"pooling": m.Pooling.LAST},
]
"""Options of requests."""


class NoDevice(Interpreted):
    """Has its memory on the CPU, and runs no kernels."""

    captures_graphs = True
    launches_early = True

    def __init__(self) -> None:
        self.where = torch.device("cpu")
        self.name = "none"

    def compiling(self) -> AbstractContextManager[None]:
        return compiling(1)


class NothingForced(FakeMasks):
    def forced(self, number: int, known: IntArray) -> IntArray:
        return known[:0]


class Variants:
    """Replaces compilation: a list of the kernels' variants."""

    def __init__(self) -> None:
        self.names: list[str] = []
        pretend()
        pretend_h100()
        self._caches: list[dict[Any, Any]] = []
        triton.JITFunction._do_compile = self._note_of()

    def clear(self) -> None:
        """Forget all variants, as a new process would."""
        for cache in self._caches:
            cache.clear()
        self.names.clear()

    def _note_of(self) -> Any:
        def note(kernel: Any, key: Any, signature: Any, device: int, constexprs: Any, *rest: Any) -> Any:
            self.names.append(f"{kernel.fn.__name__}{sorted(constexprs.items())}{signature}")
            made = SimpleNamespace(
                launch_metadata=lambda *args: None, run=lambda *args: None, function=None, packed_metadata=None
            )
            cache = kernel.device_caches[device][0]
            cache[key] = made
            self._caches.append(cache)
            return made

        return note


def settings_for(folder: Path, cache: Path, **sections: Any) -> Settings:
    return Settings(
        model=str(folder),
        cache_dir=str(cache),
        execute=ExecuteSettings(device="cuda", kv_cache_bytes=KV_BYTES, num_threads=1),
        schedule=ScheduleSettings(max_num_seqs=NUM_ROWS, max_num_batched_tokens=MAX_TOKENS),
        **sections,
    )


def plain(folder: Path, cache: Path) -> Settings:
    return settings_for(folder, cache)


def many_rows(folder: Path, cache: Path) -> Settings:
    settings = plain(folder, cache)
    limits = ScheduleSettings(max_num_seqs=80, max_num_batched_tokens=640)
    return msgspec.structs.replace(settings, schedule=limits)


def int4(folder: Path, cache: Path) -> Settings:
    return msgspec.structs.replace(plain(folder, cache), quantization="int4")


def int8_cache(folder: Path, cache: Path) -> Settings:
    settings = plain(folder, cache)
    return msgspec.structs.replace(settings, execute=msgspec.structs.replace(settings.execute, kv_dtype="int8"))


def of_family(family: str, folder: Path, cache: Path) -> Settings:
    return plain(tiny_architectures.write(folder, tiny_architectures.VARIANTS[family])[0], cache)


def experts(folder: Path, cache: Path) -> Settings:
    return of_family("qwen3_moe", folder, cache)


def gpt_oss(folder: Path, cache: Path) -> Settings:
    return of_family("gpt_oss", folder, cache)


def gemma3(folder: Path, cache: Path) -> Settings:
    return of_family("gemma3", folder, cache)


def ngram(folder: Path, cache: Path) -> Settings:
    return settings_for(folder, cache, speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=3))


def draft_model(folder: Path, cache: Path) -> Settings:
    speculative = SpeculativeSettings(method="draft_model", draft=str(folder), num_speculative_tokens=3)
    settings = settings_for(folder, cache, speculative=speculative)
    link = draft_link(settings)
    link.parent.mkdir(parents=True)
    link.symlink_to(folder)
    return settings


def eagle(folder: Path, cache: Path) -> Settings:
    write(folder, test_eagle.CONFIG)
    return eagle_settings(folder, test_eagle.write_head(cache / "head"), cache)


def eagle3(folder: Path, cache: Path) -> Settings:
    write(folder, test_eagle.CONFIG)
    return eagle_settings(folder, test_eagle3.write_head(cache / "head"), cache)


def lora(folder: Path, cache: Path) -> Settings:
    loading = LoraSettings(runtime_loading=True, max_loras=2, max_cpu_loras=2, max_lora_rank=8)
    return settings_for(folder, cache, lora=loading)


CASES: list[Callable[[Path, Path], Settings]] = [
    *(plain, many_rows, int4, int8_cache, experts, gpt_oss, gemma3),
    *(ngram, draft_model, eagle, eagle3, lora),
]


def main() -> None:
    variants = Variants()
    for case in CASES:
        if sys.argv[1:] and case.__name__ not in sys.argv[1:]:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "model"
            folder.mkdir()
            checkpoints.write(folder, checkpoints.config_of(**MODEL, max_position=2048))
            variants.clear()
            found = _count(variants, case(folder, Path(name)), has_swap=case is plain)
            print(json.dumps({"case": case.__name__, **found}), flush=True)


def _count(variants: Variants, settings: Settings, *, has_swap: bool) -> dict[str, Any]:
    folder = Path(settings.model)
    swap = memoryview(bytearray(NUM_SWAP_BLOCKS * 64 * 1024)) if has_swap else None
    runner: Any = CudaRunner(settings, folder, swap, device=NoDevice())
    masks: Any = NothingForced(runner.masks.words)
    runner.masks.close()
    runner.masks = runner._changes._masks = masks
    if runner.speculator is not None:
        runner.speculator._masks = masks
    runner.capture_graphs()
    num_before = len(variants.names)
    vocab_size = ModelConfig.load(folder).vocab_size
    num_steps = _serve_plan(runner, vocab_size) if has_swap else 0
    num_steps += _serve_requests(runner, settings, folder, vocab_size)
    late = variants.names[num_before:]
    while runner.capture_more():
        pass
    late_in_shapes = variants.names[num_before + len(late) :]
    runner.close()
    return {"before": num_before, "late": late, "late_in_shapes": late_in_shapes, "steps": num_steps}


def _serve_plan(runner: Any, vocab_size: int) -> int:
    """Run random steps with forks and swaps."""
    plan = RandomPlan(3, vocab_size, max_prompt=150, max_output=30)
    for number in range(NUM_STEPS):
        runner.launch(msgspec.structs.replace(plan.step(), step_id=number), take)
        if len(runner.launched_steps) > 1:
            runner.collect()
    runner.drain()
    runner.drop_all()
    assert all(plan.done.values()), plan.done
    return NUM_STEPS


def _serve_requests(runner: Any, settings: Settings, folder: Path, vocab_size: int) -> int:
    """Run requests with all options, several at once, and with adapters where they are loaded."""
    prompt, ways = tuple(3 + index % (vocab_size - 3) for index in range(9)), WAYS
    if settings.lora.runtime_loading:
        adapter = convert(write_adapter(folder / "peft", ModelConfig.load(folder), rank=8), folder, "f32", 8)
        ways = [*WAYS, *({**way, "adapter_id": adapter} for way in WAYS)]
    requests = [
        Request(
            (*prompt, 3 + index),
            1 if "pooling" in way else 12,
            n=2 if index % 5 == 1 else 1,
            at_step=index // 3,
            fields=tuple(way.items()),
        )
        for index, way in enumerate(ways)
    ]
    requests.append(Request(prompt * 8, 4, at_step=2))
    limits = {
        "max_num_seqs": settings.schedule.max_num_seqs,
        "max_num_batched_tokens": settings.schedule.max_num_batched_tokens,
    }
    pair = Pair(runner, 2, adaptive_speculation=False, max_loras=settings.lora.max_loras, **limits)
    num_steps, launch = 0, runner.launch

    def counting(step: m.Step, take: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return launch(step, take)

    runner.launch = counting
    pair.run(requests)
    assert num_steps > 5, num_steps
    return num_steps


if __name__ == "__main__":
    main()
