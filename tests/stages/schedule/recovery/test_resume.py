"""A request with output ids continues exactly where an uninterrupted one would be."""

import numpy as np
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from tests.fakes import expected
from tests.rig import raw
from tests.stages.schedule.bench import Bench, config

PROMPT = list(range(40))
STOP_AT = 23


def resume(
    bench: Bench,
    outputs: list[list[int]],
    finishes: list[Finish],
    max_tokens: int,
    stop: list[int],
    request_id: int = 1,
) -> list[m.Open]:
    """Admit a request with output ids. Returns its openings; the client's ids count as received."""
    options = m.GenerationOptions(n=len(outputs), max_tokens=max_tokens, seed=3, stop_token_ids=stop)
    admit = m.Admit(
        request_id=request_id,
        attempt=1,
        gateway=0,
        arrival_s=0.0,
        prompt_ids=np.array(PROMPT, np.int32).tobytes(),
        options=raw(options),
        outputs=[np.array(ids, np.int32).tobytes() for ids in outputs],
        finishes=bytes(finishes),
    )
    opened = []
    for opening, ids in zip(bench.scheduler.admit(admit), outputs, strict=True):
        assert isinstance(opening, m.Open)
        assert opening.outputs == np.array(ids, np.int32).tobytes()
        bench.opened[opening.seq] = opening
        bench.received[opening.seq] = list(ids)
        bench.token_outputs[opening.seq] = bench.prompts[opening.seq] = b""
        bench.admitted[opening.seq] = admit, options
        opened.append(opening)
    return opened


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("cut", [1, 7, 8, 9, STOP_AT - 1, STOP_AT, 30])
def test_a_sequence_cut_anywhere_resumes_with_the_same_ids(depth: int, stops: bool, cut: int) -> None:
    whole, _ = expected(PROMPT, m.GenerationOptions(seed=3), 0, 30)
    stop = [whole[STOP_AT - 1]] if stops else []
    whole, finish = expected(PROMPT, m.GenerationOptions(seed=3, stop_token_ids=stop), 0, 30)
    known = whole[:cut]
    ended = Finish.STOP if stops and len(known) == len(whole) else Finish.NONE
    bench = Bench(config(), depth)
    (opening,) = resume(bench, [known], [ended], 30, stop)
    steps = bench.run()
    bench.check_outputs()
    assert bench.received[opening.seq] == whole
    assert bench.finished == {opening.seq: finish}
    if len(known) == len(whole):
        assert (steps, opening.finish) == (0, finish), "nothing is computed for an ended sequence"
    else:
        assert opening.finish == Finish.NONE
    bench.close_all()
    bench.check()
    assert not bench.scheduler.requests


def test_each_of_n_sequences_continues_from_its_own_place() -> None:
    wholes = [expected(PROMPT, m.GenerationOptions(seed=3), index, 20)[0] for index in range(3)]
    bench = Bench(config(), depth=2)
    openings = resume(bench, [wholes[0], [], wholes[2][:5]], [Finish.NONE] * 3, 20, [])
    assert [opening.finish for opening in openings] == [Finish.LENGTH, Finish.NONE, Finish.NONE]
    bench.run()
    assert [bench.received[opening.seq] for opening in openings] == wholes
    assert set(bench.finished.values()) == {Finish.LENGTH}


def test_resumed_ids_are_recomputed_after_a_preemption() -> None:
    bench = Bench(config(num_blocks=9, max_num_seqs=4), depth=2)
    bench.admit(range(200, 240), max_tokens=60, arrival_s=-1.0)
    whole, _ = expected(PROMPT, m.GenerationOptions(seed=3), 0, 50)
    (opening,) = resume(bench, [whole[:11]], [Finish.NONE], 50, [], request_id=2)
    bench.run()
    assert bench.scheduler.load().num_preemptions > 0
    assert bench.received[opening.seq] == whole
    bench.check()


def test_resumed_ids_do_not_count_as_prompt_or_cached_tokens() -> None:
    """They are computed like a prompt."""
    bench = Bench(config(), depth=1)
    whole, _ = expected(PROMPT, m.GenerationOptions(seed=3), 0, 30)
    for request_id in (1, 2):
        resume(bench, [whole[:25]], [Finish.NONE], 30, [], request_id)
        bench.run()
    load = bench.scheduler.load()
    assert load.num_prompt_tokens == 2 * len(PROMPT)
    assert load.num_cached_tokens == len(PROMPT), "more of its ids were cached"
    assert load.num_output_tokens == 2 * 5
    bench.check()
