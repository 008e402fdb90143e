"""What the executor tells of ids besides reaches detokenize with them, whatever happens to the sequence; and so does
what it tells of a prompt."""

from collections import deque
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.logprob_records import prompt_record_bytes, record_bytes
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.scheduler import Scheduler
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.fakes import FakeExecutor, expected, inline, record
from tests.rig import raw

LIMITS: dict[str, Any] = {
    "num_blocks": 200,
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
}


class Asks:
    """A scheduler, a fake executor, and what detokenize has been told of each sequence."""

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
        self.records: dict[int, bytes] = {}
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
        """`failing` are ids at which the executor fails."""
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
        for told in self.scheduler.admit(admit):
            assert isinstance(told, m.Open) and told.options == admit.options
            self.seqs[request_id, told.index] = told.seq
            self.ids[told.seq], self.records[told.seq], self.prompts[told.seq] = [], b"", b""
            self._widths[told.seq] = record_bytes(options, hidden_size=0)
            self._prompt_widths[told.seq] = prompt_record_bytes(options)

    def turn(self) -> bool:
        """Plan, and take one result in. Returns whether there was any."""
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
        all_records = inline(message.records)
        for seq, start, records in zip(message.prompt_seqs, message.prompt_starts, message.prompt_records, strict=True):
            assert seq not in self.finishes
            assert start * self._prompt_widths[seq] == len(self.prompts[seq])
            self.prompts[seq] += records
        begin = recorded = 0
        errors = iter(message.errors)
        arrays = (message.seqs, np.uint64), (message.counts, np.int32), (message.finishes, np.uint8)
        for seq, num, finish in zip(
            *(np.frombuffer(inline(array), kind).tolist() for array, kind in arrays), strict=True
        ):
            self.ids[seq] += ids[begin : begin + num]
            self.records[seq] += all_records[recorded : recorded + num * self._widths[seq]]
            begin += num
            recorded += num * self._widths[seq]
            if finish:
                self.finishes[seq] = Finish(finish)
            if finish == Finish.ERROR:
                self.errors[seq] = next(errors)
        assert recorded == len(all_records) and next(errors, None) is None

    def run(self, report_every: int = 1) -> None:
        turns = 0
        while self.turn():
            turns += 1
            assert turns < 5000
            self.report(sent=turns % report_every == 0)
        self.report()


def told_of(ids: list[int], num_top: int) -> bytes:
    return b"".join(record(one, num_top) for one in ids)


def prompt(i: int) -> list[int]:
    return [(7 * i + 3 * place) % 900 for place in range(20 + 3 * i)]


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
def test_every_id_comes_with_its_own(depth: int, report_every: int, memory: dict[str, Any]) -> None:
    """Some ask and some don't; they stop by ids or by length, fork, and are preempted by either means."""
    asks = Asks(depth, **memory)
    for i in range(1, 9):
        stop = [expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)[0][25]] if i % 3 == 0 else []
        asks.admit(i, prompt(i), n=1 + i % 4, stop=stop, num_logprobs=i % 3 if i % 2 == 0 else -1)
    asks.run(report_every)
    load = asks.scheduler.load()
    assert (load.num_preemptions > 0) == ("num_blocks" in memory)
    assert (load.num_blocks_swapped_in > 0) == ("num_swap_blocks" in memory)
    assert load.num_forks > 0
    stopped = [seq for seq, finish in asks.finishes.items() if finish == Finish.STOP]
    assert stopped and len(asks.finishes) == len(asks.seqs)
    for (request_id, _), seq in asks.seqs.items():
        assert len(asks.ids[seq]) >= 10
        assert asks.records[seq] == (told_of(asks.ids[seq], request_id % 3) if request_id % 2 == 0 else b"")
    assert asks.scheduler.rows.num_recorded == 0


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
    """Whatever is cached, forked, put back or computed again; and only by the first sequence."""
    asks = Asks(depth, max_num_batched_tokens=24, **memory)
    for i in range(1, 9):
        asks.admit(
            i, prompt(1 + i // 3), num_logprobs=0 if i % 2 == 0 else -1, n=1 + i % 3, num_prompt_logprobs=i % 4 - 1
        )
    asks.run(report_every)
    load = asks.scheduler.load()
    assert (load.num_preemptions > 0) == ("num_blocks" in memory)
    for (request_id, index), seq in asks.seqs.items():
        num_top = request_id % 4 - 1
        is_told = index == 0 and num_top >= 0
        assert asks.prompts[seq] == (told_of(prompt(1 + request_id // 3)[1:], num_top) if is_told else b"")
        assert (
            asks.ids[seq] == expected(prompt(1 + request_id // 3), m.GenerationOptions(seed=request_id), index, 40)[0]
        )
    assert asks.scheduler.rows.num_recorded == 0


def test_a_prompt_with_records_uses_no_cached_blocks() -> None:
    asks = Asks(1)
    for request_id, num_prompt_logprobs in ((1, -1), (2, 0), (3, -1)):
        asks.admit(request_id, prompt(9), num_prompt_logprobs=num_prompt_logprobs)
        asks.run()
    assert asks.scheduler.load().num_cached_tokens == 32, "only the third finds what the first computed"


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_sequence_ends_with_the_reason_if_no_id_can_be_sampled(depth: int) -> None:
    asks = Asks(depth)
    for i in range(1, 6):
        ids, _ = expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)
        asks.admit(i, prompt(i), num_logprobs=0, failing=[ids[17 + i]] if i % 2 else [])
    asks.run()
    for i in range(1, 6):
        ids, _ = expected(prompt(i), m.GenerationOptions(seed=i), 0, 40)
        seq = asks.seqs[i, 0]
        num_drawn = ids.index(ids[17 + i]) if i % 2 else 40
        assert asks.ids[seq] == ids[:num_drawn]
        assert asks.records[seq] == told_of(asks.ids[seq], 0)
        assert asks.finishes[seq] == (Finish.ERROR if i % 2 else Finish.LENGTH)
        assert asks.errors.get(seq) == (f"{ids[17 + i]} must not be sampled" if i % 2 else None)
    assert asks.scheduler.load().num_blocks_held == 0


def test_without_a_request_for_records_there_are_none() -> None:
    asks = Asks(2)
    for i in range(1, 4):
        asks.admit(i, prompt(i))
    asks.run()
    assert asks.reports and asks.results
    assert all(report.records == b"" for report in asks.reports)
    assert all(result.records == b"" for result in asks.results)


def test_a_row_used_again_has_none_of_who_was_there_before() -> None:
    asks = Asks(1, max_num_seqs=2)
    asks.admit(1, prompt(1), num_logprobs=0, max_tokens=30)
    asks.admit(2, prompt(2), num_logprobs=0, max_tokens=5)
    asks.admit(3, prompt(3), max_tokens=20)
    asks.run()
    assert asks.records[asks.seqs[3, 0]] == b""
    assert asks.records[asks.seqs[2, 0]] == told_of(asks.ids[asks.seqs[2, 0]], 0)


def test_one_that_is_ended_has_those_of_the_ids_that_were_settled() -> None:
    asks = Asks(2)
    asks.admit(1, prompt(1), num_logprobs=0, n=2)
    for _ in range(9):
        assert asks.turn()
    asks.scheduler.abort(m.Abort(1, 1, 1, Finish.STOP))
    asks.run()
    for index in (0, 1):
        seq = asks.seqs[1, index]
        assert asks.records[seq] == told_of(asks.ids[seq], 0)
    assert 0 < len(asks.ids[asks.seqs[1, 1]]) < len(asks.ids[asks.seqs[1, 0]]) == 40


def test_resumed_sequences_have_records_of_new_ids_alone() -> None:
    asks = Asks(1)
    whole, _ = expected(prompt(1), m.GenerationOptions(seed=1), 0, 40)
    asks.admit(1, prompt(1), num_logprobs=0, outputs=[np.array(whole[:13], np.int32).tobytes()], finishes=b"\0")
    asks.run()
    seq = asks.seqs[1, 0]
    assert asks.ids[seq] == whole[13:]
    assert asks.records[seq] == told_of(whole[13:], 0)
