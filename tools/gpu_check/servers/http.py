"""A server of the 135M shape and streaming HTTP clients, all on this machine.

One client process could not keep up, so there are several. The reported rate is the sum of their rates over the time in
which all of them measure.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools.benchmarks import structured
from tools.benchmarks.pairs import compare
from tools.benchmarks.served import ROOT, Served
from tools.gpu_check.child import Context, Item
from tools.gpu_check.models import write_checkpoint
from tools.gpu_check.readings import Reading
from tools.gpu_check.shapes import SMOLLM2_135M, TINY

NUM_BENCHES = 8
STREAMS = 256
PROMPT, OUTPUT = 448, 128
"""Average tokens of a sequence: 512 in the middle of its output."""
STRUCTURED_STREAMS = 32
MAX_MODEL_LEN, MAX_BATCHED_TOKENS = 2048, 2048
PAUSE_S = 6.0
"""Idle time before the first request, in which the server captures graphs."""
SETS = (
    "execute.device=cuda",
    "execute.kv_cache_bytes=8GiB",
    f"schedule.max_num_seqs={STREAMS}",
    f"schedule.max_num_batched_tokens={MAX_BATCHED_TOKENS}",
    "schedule.arena_bytes=64MiB",
    "ingest.arena_bytes=64MiB",
    "execute.arena_bytes=16MiB",
    "gateway.max_open_sequences=4096",
    "gateway.replicas=4",
    "detokenize.replicas=2",
    f"max_model_len={MAX_MODEL_LEN}",
    "quantization=none",
)
SETS_INTERPRETED = ("execute.kernels=torch", "execute.kv_cache_bytes=4MiB", "quantization=none")


def items(context: Context) -> list[Item]:
    return [Item("135M over HTTP", _serve, needs_s=30, limit_s=100)]


def _serve(context: Context) -> Iterator[Reading]:
    config = SMOLLM2_135M
    sets: tuple[str, ...] = SETS
    if context.interpreted:
        # All bytes are tokens.
        config, sets = _with_bytes(), SETS_INTERPRETED
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        folder = Path(name) / "model"
        write_checkpoint(folder, config, seed=7)
        context.say(f"checkpoint written; starting the server with {' '.join(sets)}")
        with Served(f"model={folder}", f"cache_dir={Path(name) / 'cache'}", *sets) as served:
            time.sleep(PAUSE_S if not context.interpreted else 0.0)
            one = _bench(served.url, 1, 1, context, Path(name))
            yield _reading("135M over HTTP, 1 stream", one, None, None)
            num_benches = 1 if context.interpreted else NUM_BENCHES
            streams = 2 if context.interpreted else STREAMS
            many = _bench(served.url, streams // num_benches, num_benches, context, Path(name))
            yield _reading(f"135M over HTTP, {streams} streams", many, 25e3, 50e3)
            yield _structured(served, context)
            yield _of_the_executor(served)


def _with_bytes() -> Any:
    import msgspec

    return msgspec.structs.replace(TINY, vocab_size=256, max_position=2048)


def _bench(url: str, streams: int, num: int, context: Context, folder: Path) -> list[dict[str, Any]]:
    """Run `num` client processes. Returns what each measured."""
    duration_s = 1 if context.interpreted else 5 if context.small or num == 1 else 12
    output = 8 if context.interpreted else OUTPUT
    prompt = 16 if context.interpreted else PROMPT
    command = [sys.executable, "-m", "pipeline", "bench", "--url", url, "--endpoint", "completions"]
    command += ["--concurrency", str(streams), "--prompt-tokens", str(prompt), "--output-tokens", str(output)]
    # The first requests run at batch sizes whose graphs are not captured yet.
    command += ["--temperature", "0", "--duration", f"{duration_s}s", "--warmup", "2", "--json"]
    files = [folder / f"bench-{streams}-{i}.json" for i in range(num)]
    with ExitStack() as stack:
        processes = []
        for file in files:
            process = subprocess.Popen(
                [*command, str(file)], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            code = process.wait(context.wait_s)
            assert code == 0, f"pipeline bench ended with exit code {code}"
    levels: list[dict[str, Any]] = [json.loads(file.read_text())["levels"][0] for file in files]
    errors = sum(level["num_errors"] for level in levels)
    assert not errors, f"{errors} requests failed: {[level['errors'] for level in levels]}"
    return levels


def _reading(case: str, levels: Sequence[dict[str, Any]], must: float | None, goal: float | None) -> Reading:
    per_s = sum(level["output_tokens_per_s"] for level in levels)
    ttft_ms = max(level["ttft_ms"]["p50"] for level in levels)
    itl_ms, worst_ms = (max(level["itl_ms"][which] for level in levels) for which in ("p50", "p99"))
    tokens = levels[0]["prompt_tokens"], levels[0]["completion_tokens"]
    note = (
        f"{tokens[0]:.0f} tokens in, {tokens[1]:.0f} out, {len(levels)} client processes; TTFT "
        f"{ttft_ms:.0f} ms, ITL {itl_ms:.2f} ms (p99 {worst_ms:.1f})"
    )
    return Reading(case, per_s, "tok/s", must=must, goal=goal, note=note, numbers={"levels": list(levels)})


def _structured(served: Served, context: Context) -> Reading:
    """The rate of streams of JSON, against that of the same streams without a schema."""
    streams = 2 if context.interpreted else STRUCTURED_STREAMS
    num_rounds, seconds = (1, 1.0) if context.interpreted else (2, 3.0) if context.small else (4, 3.0)
    errors = Counter[str]()
    measure = structured.measuring(served.url, streams, seconds, 1, structured.PERSON, errors)
    # The first requests prepare the grammar.
    measure(1, -1)
    found = compare(structured.ARMS, num_rounds, measure, context.say)
    assert not errors, f"requests failed: {errors}"
    ratio = found.ratio("output tok/s")
    plain_ms, json_ms = (found.median(arm, "ITL p50 ms") for arm in range(2))
    rates = " and ".join(f"{found.median(arm, 'output tok/s'):,.0f}" for arm in (1, 0))
    return Reading(
        f"135M over HTTP, {streams} streams: structured / unstructured",
        100 * ratio.median if ratio else 0.0,
        "%",
        must=90,
        goal=95,
        note=f"{rates} tok/s, ITL {json_ms:.2f} and {plain_ms:.2f} ms, one client process, {num_rounds} rounds",
        numbers={"readings": found.readings},
    )


def _of_the_executor(served: Served) -> Reading:
    """The executor's own counters."""
    import msgspec

    counts = msgspec.to_builtins(served.execute())
    return Reading("135M over HTTP: the executor's counters", note="in the JSON", numbers={"counts": counts})
