"""Beam search finds what a search over the whole vocabulary finds, whatever happens to its beams."""

import random
from typing import Any

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.runtime.model.kv_groups import KVGroup
from pipeline.stages.schedule.scheduler_config import StateConfig
from tests.fakes import inline, logprob
from tests.stages.schedule.beam_reference import beam_search
from tests.stages.schedule.bench import Bench, config

STOP = list(range(0, 1000, 9))
LITTLE_MEMORY = {"num_blocks": 22, "max_num_seqs": 12}


def prompt_of(i: int) -> list[int]:
    return [(7 * i + 3 * index) % 900 for index in range(13 + 5 * i)]


def check(bench: Bench) -> None:
    """Every finished beam search has the outputs of the reference, the best first."""
    requests: dict[int, list[int]] = {}
    for seq, opened in bench.opened.items():
        if bench.admitted[seq][1].use_beam_search and bench.finished[seq] != Finish.ABORT:
            requests.setdefault(opened.request_id, []).append(seq)
    assert requests
    for seqs in requests.values():
        message, options = bench.admitted[seqs[0]]
        prompt = np.frombuffer(inline(message.prompt_ids), np.int32).tolist()
        assert options.max_tokens is not None
        found = beam_search(
            prompt,
            options.n,
            options.max_tokens,
            set(options.stop_token_ids),
            options.length_penalty,
            options.early_stopping,
            options.min_tokens,
            options.bad_words_ids,
        )
        given = [bench.given(seq) for seq in seqs]
        outputs = [one.output[num:] for one, num in zip(found, given, strict=True)]
        assert [bench.received[seq] for seq in seqs] == outputs
        assert [bench.finished[seq] for seq in seqs] == [one.finish for one in found]


def check_the_rest(bench: Bench) -> None:
    check(bench)
    beams = {seq for seq, (_, options) in bench.admitted.items() if options.use_beam_search}
    bench.finished = {seq: finish for seq, finish in bench.finished.items() if seq not in beams}
    bench.check_outputs()
    assert bench.scheduler.load().num_blocks_held == 0
    assert bench.scheduler.rows.all_flags == 0


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.5, -1.0])
def test_it_finds_what_a_search_over_all_ids_finds(width: int, early_stopping: Any, length_penalty: float) -> None:
    bench = Bench(config(num_blocks=200), depth=2)
    for i in range(3):
        bench.admit(
            prompt_of(i),
            max_tokens=24,
            n=width,
            stop=STOP[i::3],
            use_beam_search=True,
            early_stopping=early_stopping,
            length_penalty=length_penalty,
        )
    bench.run()
    check_the_rest(bench)


@pytest.mark.parametrize("width", [1, 3, 8])
def test_ids_that_the_model_excludes_are_in_no_beam(width: int) -> None:
    plain = Bench(config(num_blocks=200), depth=2)
    plain.admit(prompt_of(1), max_tokens=8, n=width, stop=STOP[::3], use_beam_search=True)
    plain.run()
    found = list(plain.received.values())
    firsts = sorted({output[0] for output in found})
    runs = [[m.BEGIN, one] for one in firsts] + [[one] for one in found[0][2:5:2]] + [found[-1][1:3], found[-1][:4]]
    bench = Bench(config(num_blocks=200), depth=2)
    bench.admit(prompt_of(1), max_tokens=24, n=width, stop=STOP[::3], use_beam_search=True, bad_words_ids=runs)
    for i in range(3):  # each id of the vocabulary is excluded at some place
        excluded = [[one] for one in range(i, 900, 7)] + [[m.BEGIN, one] for one in range(0, 900, 2)]
        excluded += [[one, one + 1] for one in range(600)]
        bench.admit(prompt_of(i), max_tokens=24, n=width, stop=STOP[i::3], use_beam_search=True, bad_words_ids=excluded)
    bench.run()
    check_the_rest(bench)
    assert not {
        bench.received[seq][0] for seq, (_, options) in bench.admitted.items() if options.bad_words_ids == runs
    } & {*firsts}


def test_min_tokens_keeps_hypotheses_from_ending() -> None:
    bench = Bench(config(num_blocks=200), depth=2)
    bench.admit(prompt_of(1), max_tokens=20, n=4, stop=STOP, use_beam_search=True, min_tokens=9)
    bench.run()
    check_the_rest(bench)
    assert min(map(len, bench.received.values())) > 9


def test_the_models_own_end_ids_end_hypotheses_unless_they_are_ignored() -> None:
    ends = tuple(range(0, 1000, 5))
    for ignore_eos in (False, True):
        bench = Bench(config(num_blocks=200, eos_ids=ends), depth=1)
        bench.admit(prompt_of(1), max_tokens=12, n=4, use_beam_search=True, ignore_eos=ignore_eos)
        bench.run()
        found = beam_search(prompt_of(1), 4, 12, set() if ignore_eos else set(ends))
        assert list(bench.received.values()) == [one.output for one in found]
        assert (Finish.STOP in bench.finished.values()) != ignore_eos


def test_one_token_and_a_search_that_ends_with_its_first_step() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(prompt_of(2), max_tokens=1, n=4, use_beam_search=True)
    bench.run()
    check_the_rest(bench)
    assert bench.scheduler.load().num_steps == 1


@pytest.mark.parametrize("num_logprobs", [0, 2, 30])
def test_records_are_those_of_the_hypotheses(num_logprobs: int) -> None:
    bench = Bench(config(num_blocks=200), depth=2)
    bench.admit(prompt_of(1), max_tokens=20, n=3, stop=STOP, use_beam_search=True, num_logprobs=num_logprobs)
    bench.run()
    found = beam_search(prompt_of(1), 3, 20, set(STOP))
    width = 4 + 8 * num_logprobs
    for one, (seq, ids) in zip(found, bench.received.items(), strict=True):
        token_outputs = bench.token_outputs[seq]
        assert len(token_outputs) == width * len(ids)
        logprobs = np.frombuffer(token_outputs, np.uint8).reshape(len(ids), width)[:, :4].copy().view(np.float32)
        assert logprobs.sum() / len(ids) == pytest.approx(one.score, abs=1e-4)
        if num_logprobs:
            tops = np.frombuffer(token_outputs[4 : 4 + 4 * num_logprobs], np.int32)
            assert logprobs[0, 0] == pytest.approx(logprob(int(tops[0])) - (ids[0] - tops[0]))


def test_beams_share_all_full_blocks_and_copy_the_last_one() -> None:
    bench = Bench(config(num_blocks=200, max_num_batched_tokens=256), depth=1)
    bench.admit(range(160), max_tokens=60, n=4, use_beam_search=True)
    pool, most = bench.scheduler.kv_cache_manager.pool, 0
    bench.fill()
    while bench.steps:
        copies = len(inline(bench.steps[0].copy_sources)) // 4
        assert copies <= 3, "one for each beam that is taken over"
        bench.answer()
        bench.fill()
        most = max(most, pool.num_held)
    # 10 blocks of the prompt, and 4 of each beam if they had nothing in common.
    assert most < 10 + 2 * 4
    assert bench.scheduler.load().num_forks > 20
    bench.report()
    check_the_rest(bench)


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_with_too_little_memory_beams_are_preempted_and_find_the_same(depth: int, prefix_caching: bool) -> None:
    bench = Bench(config(**LITTLE_MEMORY, prefix_caching=prefix_caching, max_model_len=128), depth)
    for i in range(4):
        bench.admit(range(i, 20 + i), max_tokens=90)
        bench.admit(prompt_of(i), max_tokens=50, n=3, stop=STOP[i::20], use_beam_search=True)
    bench.run()
    assert bench.scheduler.load().num_preemptions > 0
    check_the_rest(bench)


GROUPS = (KVGroup(0, 1), KVGroup(20, 1), KVGroup(20, 1))


def memory_of(choice: random.Random) -> dict[str, Any]:
    memory: dict[str, Any] = {
        "num_blocks": choice.choice([36, 60, 200]),
        "max_num_seqs": choice.choice([4, 6, 9]),
        "max_model_len": 128,
        "max_num_batched_tokens": choice.choice([16, 64]),
        "prefix_caching": choice.random() < 0.7,
        "policy": choice.choice(["fcfs", "priority", "longest-prefix-match"]),
        "num_speculative_tokens": (drafts := choice.choice([0, 3])),
        "max_num_drafts": 2 * drafts,
        "adaptive_speculation": False,
    }
    if choice.random() < 0.5:
        memory |= {"num_swap_blocks": 40, "preemption": choice.choice(["auto", "swap"])}
    if choice.random() < 0.3:
        memory |= {"kv_groups": GROUPS, "num_blocks": memory["num_blocks"] * 4}
    if choice.random() < 0.3:
        slots = choice.choice([memory["max_num_seqs"] + 1, 30])
        states = StateConfig(slots, choice.choice([0, 4]), interval=32, decode_interval=16, min_interval=16)
        memory |= {"states": states, "num_speculative_tokens": 0, "max_num_drafts": 0}
    return memory


@pytest.mark.parametrize("seed", range(60))
def test_histories(seed: int) -> None:
    """Searches and other requests come and are aborted, the executor dies, the prefix cache is emptied."""
    choice = random.Random(seed)
    bench = Bench(config(**memory_of(choice)), depth=choice.randint(1, 3))
    bench.plans_early = choice.random() < 0.5
    ids: list[int] = []
    for _ in range(120):
        action = choice.random()
        if action < 0.1 and len(ids) < 9:
            i = len(ids)
            beams: dict[str, Any] = {"use_beam_search": True, "early_stopping": choice.choice([True, False, "never"])}
            ids.append(
                bench.admit(
                    prompt_of(i % 5),
                    max_tokens=choice.randint(1, 40),
                    n=choice.randint(1, 4),
                    stop=STOP[i::3],
                    priority=choice.randint(0, 2),
                    **(beams if i == 0 or choice.random() < 0.6 else {}),
                )
            )
        elif action < 0.12 and len(ids) > 1:
            bench.abort(choice.choice(ids[1:]))
        elif action < 0.14:
            bench.lose_executor(choice.randint(0, len(bench.steps)), has_crashed=False)
        elif action < 0.16:
            bench.scheduler.reset_prefix_cache()
        elif bench.steps:
            bench.answer()
        bench.fill()
        bench.report(sent=choice.random() < 0.7)
        bench.check()
    bench.run()
    check_the_rest(bench)


def test_an_error_of_one_beam_fails_the_request() -> None:
    bench = Bench(config(), depth=2)
    bench.admit(prompt_of(1), max_tokens=8, n=3, use_beam_search=True)
    bench.fill()
    bench.answer()
    bench.fill()
    step = bench.steps[-1]
    rows = np.frombuffer(inline(step.rows), np.int32)
    bench.executor.rows[int(rows[0])].options = m.GenerationOptions(num_logprobs=4, bias_ids=list(range(1000)))
    bench.run()
    assert list(bench.finished.values()) == [Finish.ERROR] * 3
    assert bench.scheduler.load().num_blocks_held == 0


def test_the_error_of_a_beam_reaches_no_other_request() -> None:
    """The other beams of its search are in the same result, with those of another search and a plain row."""
    bench = Bench(config(), depth=1)
    bench.admit(prompt_of(1), max_tokens=8, n=3, use_beam_search=True)
    bench.admit(prompt_of(2), max_tokens=8, n=3, use_beam_search=True)
    bench.admit(prompt_of(3), max_tokens=8)
    while sum(sequence is not None for sequence in bench.scheduler.rows.sequences) < 7:
        bench.fill()
        bench.answer()
    failing: list[int] = []
    while not failing:  # a beam that goes on in its row
        bench.fill()
        rows = [row for row, one in enumerate(bench.scheduler.rows.sequences) if one and one.request.request_id == 1]
        failing = [row for row in rows if row not in [add.row for add in bench.steps[0].adds]]
        if not failing:
            bench.answer()
    bench.executor.rows[failing[0]].options = m.GenerationOptions(num_logprobs=4, bias_ids=list(range(1000)))
    bench.run()
    assert [bench.finished[seq] for seq in (1, 2, 3)] == [Finish.ERROR] * 3
    bench.finished |= dict.fromkeys((1, 2, 3), Finish.ABORT)  # they are checked
    check_the_rest(bench)


def test_a_search_whose_beams_can_not_run_at_once_is_refused() -> None:
    bench = Bench(config(max_num_seqs=4), depth=1)
    bench.admit(range(10), n=5, use_beam_search=True)
    bench.admit(range(10), n=4, max_tokens=240, use_beam_search=True)
    assert [refused.failure.param for refused in bench.refused] == ["n", "max_tokens"]
    assert "schedule.max_num_seqs = 4" in bench.refused[0].failure.message
    assert "KV blocks, but this server has 64" in bench.refused[1].failure.message


def test_a_search_that_needs_more_logprobs_than_the_executor_returns_is_refused() -> None:
    bench = Bench(config(max_num_top=5, eos_ids=(1, 2)), depth=1)
    bench.admit(range(10), n=3, use_beam_search=True)
    bench.admit(range(10), n=4, use_beam_search=True)
    assert [refused.request_id for refused in bench.refused] == [2]
    assert "needs the 6 likeliest ids" in bench.refused[0].failure.message
    assert "limits.max_logprobs" in bench.refused[0].failure.message


def test_after_a_death_of_schedule_the_search_begins_again_and_adds_to_what_the_client_has() -> None:
    first = Bench(config(num_blocks=200), depth=2)
    how: dict[str, Any] = {"max_tokens": 20, "n": 3, "stop": STOP, "use_beam_search": True, "num_logprobs": 1}
    first.admit(prompt_of(1), **how)
    first.run()
    message, options = first.admitted[1]
    outputs = [np.array(first.received[seq], np.int32).tobytes() for seq in (1, 2, 3)]
    bench = Bench(config(num_blocks=200), depth=2)
    # The client has got the second sequence only.
    again = m.Admit(
        request_id=message.request_id,
        attempt=2,
        gateway=0,
        arrival_s=1.0,
        prompt_ids=message.prompt_ids,
        options=message.options,
        outputs=[b"", outputs[1], b""],
        finishes=bytes([Finish.NONE, first.finished[2], Finish.NONE]),
    )
    for opened in bench.scheduler.admit(again):
        assert isinstance(opened, m.Open)
        bench.opened[opened.seq], bench.admitted[opened.seq] = opened, (again, options)
        bench.received[opened.seq] = np.frombuffer(inline(opened.outputs), np.int32).tolist()
        bench.token_outputs[opened.seq] = bench.prompts[opened.seq] = b""
    bench.run()
    assert bench.received == first.received
    assert bench.finished == first.finished
    assert [bench.token_outputs[seq] for seq in (1, 3)] == [first.token_outputs[seq] for seq in (1, 3)]


def test_a_successor_of_detokenize_gets_all_output_of_a_search_again() -> None:
    bench = Bench(config(num_blocks=200), depth=2)
    bench.admit(prompt_of(1), max_tokens=20, n=3, stop=STOP, use_beam_search=True, num_logprobs=1)
    bench.fill()
    for _ in range(2):
        bench.answer()
        bench.fill()
    bench.scheduler.resend(0)
    bench.report()
    assert not any(bench.received.values()), "beams have no output before the search is over"
    bench.run()
    received, token_outputs = dict(bench.received), dict(bench.token_outputs)
    bench.scheduler.resend(0)
    bench.received = {seq: [] for seq in received}
    bench.token_outputs = dict.fromkeys(received, b"")
    bench.finished, bench.begun = {}, set()
    bench.report()
    assert (bench.received, bench.token_outputs) == (received, token_outputs)
    check(bench)
