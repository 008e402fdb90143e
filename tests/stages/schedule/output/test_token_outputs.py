"""Logprob records of outputs and prompts reach detokenize with their ids, whatever the scheduler does with the
sequence."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.token_outputs import prompt_logprob_bytes, token_output_bytes
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import FakeExecutor, expected, inline, record
from tests.rig import raw
from tests.stages.schedule.bench import Bench, config

LIMITS: dict[str, Any] = {
    "num_blocks": 200,
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}


class RecordBench:
    """A scheduler, a fake executor, and the records that detokenize has of each sequence."""

    def __init__(self, depth: int, num_swap_blocks: int = 0, **config: Any) -> None:
        known = SchedulerConfig(**LIMITS | {"num_swap_blocks": num_swap_blocks} | config)
        self.scheduler = Scheduler(known)
        self._executor = FakeExecutor(known.num_blocks, num_swap_blocks=num_swap_blocks)
        self._depth = depth
        self._steps: deque[m.Step] = deque()
        self.results: list[m.StepResult] = []
        self.reports: list[m.Settled] = []
        self.seqs: dict[tuple[int, int], int] = {}
        self.ids: dict[int, list[int]] = {}
        self.token_outputs: dict[int, bytes] = {}
        self.prompts: dict[int, bytes] = {}
        self.finishes: dict[int, Finish] = {}
        self.errors: dict[int, str] = {}
        self._widths: dict[int, int] = {}
        self._prompt_widths: dict[int, int] = {}

    def admit(
        self,
        request_id: int,
        prompt: list[int],
        *,
        n: int = 1,
        num_logprobs: int = -1,
        num_prompt_logprobs: int = -1,
        **how: Any,
    ) -> None:
        """The executor fails at the ids `failing`."""
        options = m.GenerationOptions(
            n=n,
            max_tokens=how.pop("max_tokens", 40),
            seed=request_id,
            stop_token_ids=how.pop("stop", []),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=num_prompt_logprobs,
            bias_ids=how.pop("failing", []),
        )
        admit = m.Admit(
            request_id=request_id,
            attempt=1,
            gateway=0,
            arrival_s=float(request_id),
            prompt_ids=np.array(prompt, np.int32).tobytes(),
            options=raw(options),
            **how,
        )
        for opening in self.scheduler.admit(admit):
            assert isinstance(opening, m.Open) and opening.options == admit.options
            self.seqs[request_id, opening.index] = opening.seq
            self.ids[opening.seq], self.token_outputs[opening.seq], self.prompts[opening.seq] = [], b"", b""
            self._widths[opening.seq] = token_output_bytes(options, hidden_size=0)
            self._prompt_widths[opening.seq] = prompt_logprob_bytes(options)

    def turn(self) -> bool:
        """Plan, and handle one result. Returns whether there was one."""
        while len(self._steps) < self._depth and (step := self.scheduler.plan()) is not None:
            self._steps.append(step)
        if not self._steps:
            return False
        self.results.append(self._executor.run(self._steps.popleft()))
        self.scheduler.settle(self.results[-1])
        self.scheduler.check()
        return True

    def report(self, sent: bool = True) -> None:
        message = self.scheduler.output_buffer.pending()
        if message is None or not sent:
            return
        self.scheduler.output_buffer.mark_sent()
        self.reports.append(message)
        ids = np.frombuffer(inline(message.ids), np.int32).tolist()
        all_token_outputs = inline(message.token_outputs)
        for seq, start, token_outputs in zip(
            message.prompt_seqs, message.prompt_starts, message.prompt_logprobs, strict=True
        ):
            assert seq not in self.finishes
            assert start * self._prompt_widths[seq] == len(self.prompts[seq])
            self.prompts[seq] += token_outputs
        begin = recorded = 0
        errors = iter(message.errors)
        arrays = (message.seqs, np.uint64), (message.counts, np.int32), (message.finishes, np.uint8)
        for seq, num, finish in zip(
            *(np.frombuffer(inline(array), kind).tolist() for array, kind in arrays), strict=True
        ):
            self.ids[seq] += ids[begin : begin + num]
            self.token_outputs[seq] += all_token_outputs[recorded : recorded + num * self._widths[seq]]
            begin += num
            recorded += num * self._widths[seq]
            if finish:
                self.finishes[seq] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[seq] = next(errors)
        assert recorded == len(all_token_outputs) and next(errors, None) is None

    def run(self, report_every: int = 1) -> None:
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 5000
            self.report(sent=turns % report_every == 0)
        self.report()


def token_outputs_of(ids: list[int], num_top: int) -> bytes:
    return b"".join(record(one, num_top) for one in ids)


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * index) % 900 for index in range(20 + 3 * i)]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("report_every", [1, 5], ids=["reported at once", "reported late"])
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"num_blocks": 14, "preemption": "recompute"},
        {"num_blocks": 14, "num_swap_blocks": 80, "preemption": "swap"},
    ],
    ids=["enough", "recomputed", "swapped"],
)
def test_every_id_comes_with_its_own_record(depth: int, report_every: int, memory: dict[str, Any]) -> None:
    """Some request records and some do not; they stop by ids or by length, fork, and are preempted in either mode."""
    bench = RecordBench(depth, **memory)
    for i in range(1, 9):
        stop = [expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)[0][25]] if i % 3 == 0 else []
        bench.admit(i, prompt(i), n=1 + i % 4, stop=stop, num_logprobs=i % 3 if i % 2 == 0 else -1)
    bench.run(report_every)
    load = bench.scheduler.load()
    assert (load.num_preemptions > 0) == ("num_blocks" in memory)
    assert (load.num_blocks_swapped_in > 0) == ("num_swap_blocks" in memory)
    assert load.num_forks > 0
    stopped = [seq for seq, finish in bench.finishes.items() if finish == Finish.STOP]
    assert stopped and len(bench.finishes) == len(bench.seqs)
    for (request_id, _), seq in bench.seqs.items():
        assert len(bench.ids[seq]) >= 10
        assert bench.token_outputs[seq] == (
            token_outputs_of(bench.ids[seq], request_id % 3) if request_id % 2 == 0 else b""
        )
    assert bench.scheduler.rows.all_flags == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("report_every", [1, 5], ids=["reported at once", "reported late"])
@pytest.mark.parametrize(
    "memory",
    [
        {},
        {"num_blocks": 16, "preemption": "recompute"},
        {"num_blocks": 16, "num_swap_blocks": 80, "preemption": "swap"},
    ],
    ids=["enough", "recomputed", "swapped"],
)
def test_each_prompt_id_has_one_record(depth: int, report_every: int, memory: dict[str, Any]) -> None:
    """Whatever is cached, forked, preempted or recomputed; only the first sequence has them."""
    bench = RecordBench(depth, max_num_batched_tokens=24, **memory)
    for i in range(1, 9):
        bench.admit(
            i, prompt(1 + i // 3), num_logprobs=0 if i % 2 == 0 else -1, n=1 + i % 3, num_prompt_logprobs=i % 4 - 1
        )
    bench.run(report_every)
    load = bench.scheduler.load()
    assert (load.num_preemptions > 0) == ("num_blocks" in memory)
    for (request_id, index), seq in bench.seqs.items():
        num_top = request_id % 4 - 1
        has_token_outputs = index == 0 and num_top >= 0
        assert bench.prompts[seq] == (
            token_outputs_of(prompt(1 + request_id // 3)[1:], num_top) if has_token_outputs else b""
        )
        assert (
            bench.ids[seq] == expected(prompt(1 + request_id // 3), m.GenerationOptions(seed=request_id), index, 40)[0]
        )
    assert bench.scheduler.rows.all_flags == 0


def test_a_prompt_with_records_uses_no_cached_blocks() -> None:
    bench = RecordBench(1)
    for request_id, num_prompt_logprobs in ((1, -1), (2, 0), (3, -1)):
        bench.admit(request_id, prompt(9), num_prompt_logprobs=num_prompt_logprobs)
        bench.run()
    assert bench.scheduler.load().num_cached_tokens == 32, "only the third uses the blocks of the first"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_sequence_ends_with_the_reason_if_no_id_can_be_sampled(depth: int) -> None:
    bench = RecordBench(depth)
    for i in range(1, 6):
        ids, _ = expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)
        bench.admit(i, prompt(i), num_logprobs=0, failing=[ids[17 + i]] if i % 2 else [])
    bench.run()
    for i in range(1, 6):
        ids, _ = expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)
        seq = bench.seqs[i, 0]
        num_sampled = ids.index(ids[17 + i]) if i % 2 else 40
        assert bench.ids[seq] == ids[:num_sampled]
        assert bench.token_outputs[seq] == token_outputs_of(bench.ids[seq], 0)
        assert bench.finishes[seq] == (Finish.ERROR if i % 2 else Finish.LENGTH)
        assert bench.errors.get(seq) == (f"{ids[17 + i]} must not be sampled" if i % 2 else None)
    assert bench.scheduler.load().num_blocks_held == 0


def test_without_a_request_for_records_there_are_none() -> None:
    bench = RecordBench(2)
    for i in range(1, 4):
        bench.admit(i, prompt(i))
    bench.run()
    assert bench.reports and bench.results
    assert all(report.token_outputs == b"" for report in bench.reports)
    assert all(result.token_outputs == b"" for result in bench.results)


def test_a_reused_row_has_no_records_of_its_predecessor() -> None:
    bench = RecordBench(1, max_num_seqs=2)
    bench.admit(1, prompt(1), num_logprobs=0, max_tokens=30)
    bench.admit(2, prompt(2), num_logprobs=0, max_tokens=5)
    bench.admit(3, prompt(3), max_tokens=20)
    bench.run()
    assert bench.token_outputs[bench.seqs[3, 0]] == b""
    assert bench.token_outputs[bench.seqs[2, 0]] == token_outputs_of(bench.ids[bench.seqs[2, 0]], 0)


def test_an_aborted_sequence_has_the_records_of_its_settled_ids() -> None:
    bench = RecordBench(2)
    bench.admit(1, prompt(1), num_logprobs=0, n=2)
    for _ in range(9):
        assert bench.turn()
    bench.scheduler.abort(m.Abort(1, 1, 1, Finish.STOP))
    bench.run()
    for index in (0, 1):
        seq = bench.seqs[1, index]
        assert bench.token_outputs[seq] == token_outputs_of(bench.ids[seq], 0)
    assert 0 < len(bench.ids[bench.seqs[1, 1]]) < len(bench.ids[bench.seqs[1, 0]]) == 40


def test_resumed_sequences_have_records_only_of_new_ids() -> None:
    bench = RecordBench(1)
    whole, _ = expected(prompt(1), m.GenerationOptions(seed=1), 0, 40)
    bench.admit(1, prompt(1), num_logprobs=0, outputs=[np.array(whole[:13], np.int32).tobytes()], finishes=b"\0")
    bench.run()
    seq = bench.seqs[1, 0]
    assert bench.ids[seq] == whole[13:]
    assert bench.token_outputs[seq] == token_outputs_of(whole[13:], 0)


def test_a_successor_of_detokenize_gets_prompt_logprobs_from_the_first_on_and_once() -> None:
    """Those that waited for the process before would come too early: what is before them died with it."""
    bench = Bench(config(max_num_batched_tokens=16), 1)
    bench.admit(range(60), max_tokens=4, num_prompt_logprobs=0)
    for is_sent in (True, False):
        bench.fill()
        bench.answer()
        bench.report(is_sent)
    output_buffer = bench.scheduler.output_buffer
    waiting = output_buffer.pending()
    assert waiting is not None and waiting.prompt_starts[0] > 0
    bench.scheduler.resend(0, is_removed=False)
    again = output_buffer.pending()
    assert again is not None and again.prompt_starts == [0]
