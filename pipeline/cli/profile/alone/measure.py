"""Warms up a stage, measures it, and computes the result."""

import os
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np

from pipeline.cli.out_file import write_output
from pipeline.cli.profile.alone.clock import memory_bytes, used
from pipeline.cli.profile.alone.harness import Harness
from pipeline.cli.profile.alone.loads import StageDriver, load_of
from pipeline.cli.profile.alone.result import Latency, StageProfile, limit_of
from pipeline.cli.profile.flame_graph import write
from pipeline.cli.trace import chrome_trace
from pipeline.config.settings import Settings
from pipeline.runtime import messages as m
from pipeline.runtime.model.model_config import ModelConfig
from pipeline.runtime.process.stack_sampler import Stacks
from pipeline.runtime.tracing import MAX_WINDOW_S, StageTrace
from pipeline.version import VERSION

NUM_BLOCKS = 16384
Progress = Callable[[str, float], None]
"""Receives a description of the current phase, and its completed fraction."""


def measure(
    stage: str,
    settings: Settings,
    model_dir: Path,
    *,
    num_streams: int,
    seconds: float,
    warmup_s: float,
    progress: Progress,
    flame: Path | None = None,
    trace: Path | None = None,
) -> StageProfile:
    """Run `stage` alone and measure it. Raises UserError if it fails."""
    config = ModelConfig.load(model_dir)
    facts = m.ExecuteFacts(NUM_BLOCKS, settings.schedule.block_size, config.max_position, config.vocab_size)
    with Harness(stage, settings, model_dir, listens=stage == "gateway") as harness:
        progress("starting", 0)
        harness.start(facts)
        with closing(load_of(harness, num_streams, settings.served_model_name or config.name)) as load:
            _run(load, warmup_s, lambda share: progress("warming up", share))
            if flame is not None:
                harness.ask(m.Flame(0))
            if trace is not None:
                harness.ask(m.Trace(0, MAX_WINDOW_S))
            pid = harness.child.pid
            num_tokens, num_latencies = load.num_tokens, len(load.latencies_s)
            messages_in, messages_out = dict(harness.num_in), dict(harness.num_out)
            before, load_before, begun = used(pid), used(os.getpid()), time.monotonic()
            _run(load, seconds, lambda share: progress("measuring", share))
            took_s = time.monotonic() - begun
            now, of_load = used(pid).since(before), used(os.getpid()).since(load_before)
            rss_bytes, peak_bytes = memory_bytes(pid)
            result = StageProfile(
                version=VERSION,
                stage=stage,
                model=config.name,
                num_streams=num_streams,
                seconds=took_s,
                messages_in=_since(harness.num_in, messages_in),
                messages_out=_since(harness.num_out, messages_out),
                num_tokens=load.num_tokens - num_tokens,
                cpu_s=now.cpu_s,
                main_cpu_s=now.main_cpu_s,
                waited_s=now.waited_s,
                load_cpu_s=of_load.cpu_s,
                load_waited_s=of_load.waited_s,
                latency=_latency(load.latencies_s[num_latencies:]),
                rss_bytes=rss_bytes,
                peak_rss_bytes=peak_bytes,
                limit=limit_of(took_s, now, of_load),
            )
            if flame is not None:
                stacks = msgspec.msgpack.decode(harness.ask(m.EndFlame(0)).body, type=Stacks)
                write(stacks, flame, f"{stage} alone, {num_streams} streams")
            if trace is not None:
                taken = msgspec.msgpack.decode(harness.ask(m.TakeTrace(0)).body, type=StageTrace)
                write_output(trace, chrome_trace.of_window([taken]))
            return result


def _run(load: StageDriver, seconds: float, progress: Callable[[float], None]) -> None:
    begun = reported_s = time.monotonic()
    while (now := time.monotonic()) - begun < seconds:
        load.turn()
        if now - reported_s > 0.1:
            reported_s = now
            progress((now - begun) / seconds)


def _since(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {kind: num - before.get(kind, 0) for kind, num in now.items() if num > before.get(kind, 0)}


def _latency(latencies_s: list[float]) -> Latency | None:
    if not latencies_s:
        return None
    p50, p90, p99, most = (1e6 * np.percentile(latencies_s, (50, 90, 99, 100))).tolist()
    return Latency(p50, p90, p99, most, len(latencies_s))
