"""Measure speculative decoding: tokens per second with it and without, in alternating rounds of one process.

    tools/part_bench/speculation.py --model FILE.gguf --task extract
    tools/part_bench/speculation.py --model FILE.gguf --task chat --streams 32 --tokens 64

The scheduler and the executor run in this process, without the other stages. Each round computes the same prompts both
ways, in turns, and compares the ids: they must be the same. Prints the ratio of each round and the median.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tokenizers import Tokenizer

from pipeline.cli.bench.tasks import TASKS, prompt_of
from pipeline.config.load import load
from pipeline.runtime import messages as m
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.prepare.drafts import draft
from pipeline.stages.prepare.stage import SILENT, prepare
from pipeline.stages.schedule.kv_cache.manager import ExecutorLoss
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig


def take(array: Any, dtype: Any) -> "np.ndarray[Any, Any]":
    return np.frombuffer(array, dtype)


class Bench:
    """Computes prompts with one runner. The scheduler's cost model and acceptance rates live as long as it."""

    def __init__(self, runner: CpuRunner, settings: Any, *, speculates: bool) -> None:
        config = SchedulerConfig.of(settings.schedule, runner.facts, settings.speculative)
        if not speculates:
            config = msgspec.structs.replace(config, num_speculative_tokens=0, max_num_drafts=0)
        self._runner, self._scheduler, self._next_id = runner, Scheduler(config), 1
        self.step_s: dict[int, list[float]] = {}
        """Times of steps by their number of tokens."""

    def run(self, prompts: list[list[int]], num_tokens: int, temperature: float) -> tuple[list[list[int]], float]:
        """The ids after each prompt, computed together, and the seconds from the first id to the last."""
        runner, scheduler = self._runner, self._scheduler
        runner.drop_all()
        scheduler.executor_lost(ExecutorLoss(2, keeps_swap=False))  # it has no rows to drop
        texts: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompts):
            options = m.GenerationOptions(max_tokens=num_tokens, temperature=temperature, seed=index)
            ids = np.array(prompt, np.int32).tobytes()
            raw = msgspec.Raw(msgspec.msgpack.encode(options))
            for opening in scheduler.admit(m.Admit(self._next_id, 1, 0, float(index), ids, raw)):
                assert isinstance(opening, m.Open)
                texts[opening.seq] = []
            self._next_id += 1
        began_s, num_first = 0.0, 0
        while (step := scheduler.plan()) is not None:
            step_began_s = time.monotonic()
            sampled = runner.step(step, take)
            self.step_s.setdefault(sampled.num_tokens, []).append(time.monotonic() - step_began_s)
            result = m.StepResult(
                step.incarnation, step.step_id, sampled.rows.tobytes(), sampled.generations.tobytes(),
                sampled.ids.tobytes(), sampled.finishes.tobytes(), time.monotonic() - step_began_s, 0.0,
                num_ids=sampled.num_ids.tobytes(), num_drafts=sampled.num_drafts.tobytes(), draft_s=sampled.draft_s,
                draft_pass_s=sampled.draft_pass_s,
            )  # fmt: skip
            scheduler.settle(result)
            settled = scheduler.output_buffer.pending()
            if settled is not None:
                scheduler.output_buffer.mark_sent()
                ids_left = take(settled.ids, np.int32).tolist()
                for seq, count in zip(take(settled.seqs, np.uint64), take(settled.counts, np.int32), strict=True):
                    texts[int(seq)] += ids_left[:count]
                    ids_left = ids_left[count:]
            if not began_s and all(texts.values()):
                began_s, num_first = time.monotonic(), sum(map(len, texts.values()))
        seconds = time.monotonic() - began_s
        for request_id in list(scheduler.requests):
            scheduler.close(m.Closed(request_id, 1))
        scheduler.reset_prefix_cache()
        found = list(texts.values())
        return found, (sum(map(len, found)) - num_first) / seconds

    def note(self) -> str:
        counts = self._scheduler.speculation.counts()
        coefficients = " ".join(f"{1000 * each:.4f}" for each in self._scheduler.cost_model.coefficients)
        return (
            f"drafts {counts.num_drafts}, tokens {counts.num_draft_tokens}, accepted {counts.num_accepted_tokens} "
            f"{counts.num_accepted_per_pos}, cost model in ms: {coefficients}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="as in the settings")
    parser.add_argument("--task", choices=list(TASKS), default="extract")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting")
    args = parser.parse_args()
    method = [] if any(each.startswith("speculative.method=") for each in args.set) else ["speculative.method=ngram"]
    settings = load(sets=[f"model={args.model}", *method, *args.set])
    folder = prepare(settings)
    if settings.speculative.method == "draft_model":
        draft.link(settings, prepare(draft.settings_of_draft(settings)), SILENT)
    runner = CpuRunner(settings, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain, speculating = (Bench(runner, settings, speculates=speculates) for speculates in (False, True))
    ratios = []
    for number in range(-1, args.rounds):  # round -1 warms up
        texts = [prompt_of(args.task, number * args.streams + index) for index in range(args.streams)]
        chats = [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in texts]
        prompts = [tokenizer.encode(chat, add_special_tokens=False).ids for chat in chats]
        benches = [plain, speculating] if number % 2 else [speculating, plain]
        rates = {}
        outputs = []
        for bench in benches:
            output, rates[bench] = bench.run(prompts, args.tokens, args.temperature)
            outputs.append(output)
        assert outputs[0] == outputs[1], "speculation changed a text"
        ratio = rates[speculating] / rates[plain]
        if number >= 0:
            ratios.append(ratio)
        num_tokens = sum(map(len, outputs[0]))
        print(
            f"round {number}: {num_tokens} tokens, without {rates[plain]:.1f}, with {rates[speculating]:.1f} tokens/s, "
            f"ratio {ratio:.3f}",
            flush=True,
        )
    print(f"{args.task}, {args.streams} streams: median ratio {statistics.median(ratios):.3f}")
    print(speculating.note())
    for name, bench in (("without", plain), ("with", speculating)):
        times = {num: statistics.median(each) for num, each in sorted(bench.step_s.items()) if len(each) > 4}
        print(f"median step {name}:", ", ".join(f"{num} tokens {1000 * each:.1f} ms" for num, each in times.items()))
    runner.close()


if __name__ == "__main__":
    main()
