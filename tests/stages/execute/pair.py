"""A scheduler and a runner in one process: schedule and execute together, without messages in between."""

import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pipeline.config.settings import ExecuteSettings, LoraSettings, ScheduleSettings, Settings, SpeculativeSettings
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.stages.execute.cpu.runner import CpuRunner
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig, StateConfig
from tests.rig import raw
from tests.stages.execute.driver import take

NUM_THREADS = 1 if "PIPELINE_TEST_PROCESSES" in os.environ else 2
"""Beside other tests one: a second thread would wait for a core in a loop. Tests of kernels and of NativeProgram have
more."""
MAX_STEPS = 20_000
GREEDY = -1


class Request(msgspec.Struct, frozen=True):
    """A request."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = GREEDY
    n: int = 1
    at_step: int = 0
    """Number of steps planned before its arrival"""
    priority: int = 0
    fields: tuple[tuple[str, Any], ...] = ()
    """Further fields of its options"""
    outputs: tuple[tuple[int, ...], ...] = ()
    """Ids of each sequence that are known already"""

    @property
    def options(self) -> m.GenerationOptions:
        temperature = 0.0 if self.seed == GREEDY else 1.3
        plain = m.GenerationOptions(
            n=self.n,
            max_tokens=self.max_tokens,
            temperature=temperature,
            seed=max(0, self.seed),
            ignore_eos=True,
            priority=self.priority,
        )
        return msgspec.structs.replace(plain, **dict(self.fields))

    def token_output_bytes(self, facts: m.ExecuteFacts) -> int:
        return token_output_bytes(self.options, facts.hidden_size)

    @property
    def prompt_logprob_bytes(self) -> int:
        return prompt_logprob_bytes(self.options)


def make_runner(
    folder: Path,
    block_bytes: int,
    num_blocks: int,
    *,
    num_swap_blocks: int = 0,
    threads: int = NUM_THREADS,
    tokens: int = 0,
    num_speculative_tokens: int = 0,
    **how: Any,
) -> CpuRunner:
    """With memory for exactly this many blocks, and for steps of at most `tokens` tokens, if that is given."""
    lora = how.pop("lora", LoraSettings())
    settings = Settings(
        execute=ExecuteSettings(
            kv_cache_bytes=num_blocks * block_bytes,
            num_threads=threads,
            **{"dtype": "bfloat16", "kernels": "auto", **how},
        ),
        schedule=ScheduleSettings(
            max_num_seqs=16, max_num_batched_tokens=tokens or 256, max_num_prefill_tokens=tokens or 0
        ),
        speculative=SpeculativeSettings(method="ngram", num_speculative_tokens=num_speculative_tokens)
        if num_speculative_tokens
        else SpeculativeSettings(),
        lora=lora,
    )
    swap = memoryview(bytearray(num_swap_blocks * block_bytes)) if num_swap_blocks else None
    runner = CpuRunner(settings, folder, swap)
    assert (runner.facts.num_blocks, runner.facts.num_swap_blocks) == (num_blocks, num_swap_blocks)
    return runner


class Pair:
    """Computes requests, and collects the messages for detokenize. `limits` are scheduler settings in addition to the
    runner's facts."""

    def __init__(self, runner: CpuRunner, depth: int = 1, **limits: Any) -> None:
        facts = runner.facts
        known: dict[str, Any] = {
            "num_blocks": facts.num_blocks,
            "num_swap_blocks": facts.num_swap_blocks,
            "max_model_len": facts.max_model_len,
            "hidden_size": facts.hidden_size,
            "num_speculative_tokens": facts.num_speculative_tokens,
            "max_num_drafts": facts.max_num_drafts,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 256,
            "kv_groups": tuple(facts.kv_groups),
            "waits_for_adapters": bool(limits.get("max_loras")),
            "states": StateConfig.of(facts),
            "generates": facts.generates,
        }
        config = SchedulerConfig(**known | limits)
        self.scheduler = Scheduler(config.of_encoder(config.max_num_batched_tokens) if facts.is_encoder else config)
        self._runner = runner
        self._depth = depth
        self._steps: deque[m.Step] = deque()
        self._submitted: deque[Any] = deque()
        """Of each step, if the runner computes several steps at once (rank_driver.py)."""
        self._next_id = 1
        self._opened: dict[int, tuple[int, int]] = {}
        self._texts: dict[tuple[int, int], list[int]] = {}
        self._finished: dict[tuple[int, int], Finish] = {}
        self.token_outputs: dict[tuple[int, int], bytes] = {}
        """For each sequence of each request, in the order of the requests"""
        self.prompt_logprobs: dict[tuple[int, int], bytes] = {}
        """The same for their prompts"""
        self.errors: dict[tuple[int, int], str] = {}
        """Error messages of sequences that ended with an error"""
        self._widths: dict[int, int] = {}
        self._prompt_widths: dict[int, int] = {}
        # Otherwise the rows that end with a scheduler's last step would be dropped by its next one.
        if hasattr(runner, "drop_rows"):
            runner.drop_rows()
        else:
            runner.rows.drop(np.flatnonzero(runner.rows.taken).astype(np.int32))

    def run(self, requests: Sequence[Request]) -> list[list[list[int]]]:
        """The texts of each request: [requests][n] ids. All requests are closed afterwards."""
        begin_id, begin_step = self._next_id, self.scheduler.load().num_steps
        waiting = deque(sorted(enumerate(requests), key=lambda one: one[1].at_step))
        self._next_id += len(requests)
        for _ in range(MAX_STEPS):
            idle = not self._steps
            while waiting and (idle or begin_step + waiting[0][1].at_step <= self.scheduler.load().num_steps):
                queued_index, request = waiting.popleft()
                self._admit(begin_id + queued_index, request)
                idle = False
            self.scheduler.now_s = time.monotonic()
            if (use := self.scheduler.use_adapters()) is not None:
                loaded = m.AdaptersLoaded(use.incarnation, use.number, use.adapter_ids)
                self.scheduler.adapters_loaded(loaded)
            while len(self.scheduler.in_flight) < self._depth and (step := self.scheduler.plan()) is not None:
                self._steps.append(step)
                if hasattr(self._runner, "submit"):
                    self._submitted.append(self._runner.submit(step, take))
            self._report()
            if self._steps:
                self._compute(self._steps.popleft())
                self.scheduler.check()
            elif not waiting:
                break
        else:
            raise AssertionError("it never ends")
        texts = [[self._texts[begin_id + i, index] for index in range(request.n)] for i, request in enumerate(requests)]
        for i, request in enumerate(requests):
            for index in range(request.n):
                assert (self._finished[begin_id + i, index] == Finish.ERROR) == ((begin_id + i, index) in self.errors)
            self.scheduler.close(m.Closed(begin_id + i, 1))
        return texts

    def _admit(self, request_id: int, request: Request) -> None:
        admit = m.Admit(
            request_id=request_id,
            attempt=1,
            gateway=0,
            arrival_s=float(request_id),
            prompt_ids=np.array(request.prompt, np.int32).tobytes(),
            options=raw(request.options),
            outputs=[np.array(ids, np.int32).tobytes() for ids in request.outputs],
            finishes=bytes(len(request.outputs)),
        )
        openings = self.scheduler.admit(admit)
        if (admitted := self.scheduler.requests.get(request_id)) is not None and admitted.is_pooled:
            self._texts[request_id, 0], self.token_outputs[request_id, 0] = [], b""
        for opening in openings:
            assert isinstance(opening, m.Open), opening
            self._opened[opening.seq] = request_id, opening.index
            self._texts[request_id, opening.index] = list(request.outputs[opening.index]) if request.outputs else []
            self.token_outputs[request_id, opening.index] = self.prompt_logprobs[request_id, opening.index] = b""
            self._widths[opening.seq] = request.token_output_bytes(self._runner.facts)
            self._prompt_widths[opening.seq] = request.prompt_logprob_bytes

    def _compute(self, step: m.Step) -> None:
        began_s = time.monotonic()
        if self._submitted:
            sampled = self._runner.answer(self._submitted.popleft())  # type: ignore[attr-defined]
        else:
            sampled = self._runner.step(step, take)
        result = m.StepResult(
            incarnation=step.incarnation,
            step_id=step.step_id,
            rows=sampled.rows.tobytes(),
            generations=sampled.generations.tobytes(),
            ids=sampled.ids.tobytes(),
            finishes=sampled.finishes.tobytes(),
            compute_s=time.monotonic() - began_s,
            wait_s=0.0,
            copy_s=sampled.copy_s,
            token_outputs=sampled.token_outputs.tobytes(),
            prompt_logprobs=sampled.prompt_logprobs.tobytes(),
            errors=list(sampled.errors),
            num_ids=sampled.num_ids.tobytes(),
            num_drafts=sampled.num_drafts.tobytes(),
        )
        self.scheduler.settle(result)

    def _report(self) -> None:
        self._report_pooled()
        settled = self.scheduler.output_buffer.pending()
        if settled is None:
            return
        self.scheduler.output_buffer.mark_sent()
        seqs, starts, counts = (
            take(array, dtype).tolist()
            for array, dtype in ((settled.seqs, np.uint64), (settled.starts, np.int32), (settled.counts, np.int32))
        )
        ids, finishes = take(settled.ids, np.int32).tolist(), take(settled.finishes, np.uint8).tolist()
        token_outputs, errors = take(settled.token_outputs, np.uint8).tobytes(), list(settled.errors)
        for seq, start, data in zip(settled.prompt_seqs, settled.prompt_starts, settled.prompt_logprobs, strict=True):
            known, num_before = self.prompt_logprobs[self._opened[seq]], start * self._prompt_widths[seq]
            assert len(known) == num_before, "records of a prompt were lost or repeated"
            self.prompt_logprobs[self._opened[seq]] += data
        for seq, start, count, finish in zip(seqs, starts, counts, finishes, strict=True):
            text = self._texts[self._opened[seq]]
            assert start == len(text), "ids were lost or repeated"
            text += ids[:count]
            ids = ids[count:]
            num_bytes = count * self._widths[seq]
            self.token_outputs[self._opened[seq]] += token_outputs[:num_bytes]
            token_outputs = token_outputs[num_bytes:]
            if finish:
                self._finished[self._opened[seq]] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[self._opened[seq]] = errors.pop(0)
        assert not token_outputs and not errors

    def _report_pooled(self) -> None:
        """What schedule sends the gateway itself."""
        pooled = self.scheduler.output_buffer.pooled
        for gateway in list(pooled.pending):
            message = pooled.message(gateway, 0.0)
            pooled.mark_sent(gateway)
            errors = list(message.errors)
            each = zip(message.request_ids, message.indexes, message.finishes, message.token_outputs, strict=True)
            ids = np.split(np.frombuffer(message.ids, np.int32), np.cumsum(message.num_ids)[:-1])
            for (request_id, index, finish, token_outputs), sampled in zip(each, ids, strict=True):
                self._texts[request_id, index] += sampled.tolist()
                self.token_outputs[request_id, index] += token_outputs
                self._finished[request_id, index] = Finish(finish)
                if finish == Finish.ERROR:
                    self.errors[request_id, index] = errors.pop(0)
            assert not errors
