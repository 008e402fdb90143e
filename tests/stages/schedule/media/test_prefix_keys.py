"""Prefix keys of prompts with images: the same images in the same places hit, and nothing else."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.runtime.messages import MediaItem
from pipeline.stages.schedule.kv_cache import prefix
from tests.stages.schedule.bench import Bench, config, media_item

ROWS = 40
TEXT = [1, 2, 4]
PROMPT = [*TEXT, *[3] * ROWS, *range(100, 120)]
MEDIA = {"num_encoder_rows": 64}


def keys_of(media: list[MediaItem], ids: list[int] = PROMPT) -> list[bytes]:
    keys: list[bytes] = []
    num_blocks = len(ids) // 16
    prefix.extend(keys, np.array(ids, np.int32), num_blocks, 16, extras=prefix.media_extras(media, 16))
    return keys


def test_the_key_of_a_block_says_which_rows_of_which_image_it_has() -> None:
    plain, one, other = (keys_of(media) for media in ([], [media_item("a", (3, ROWS))], [media_item("b", (3, ROWS))]))
    assert len({plain[0], one[0], other[0]}) == 3
    assert one == keys_of([media_item("a", (3, ROWS))])


@given(st.integers(1, ROWS - 1), st.integers(1, ROWS - 1))
def test_adjacent_images_never_collide_however_they_divide_the_run(first: int, second: int) -> None:
    def divided(at: int) -> list[bytes]:
        return keys_of([media_item("a", (3, at)), media_item("b", (3 + at, ROWS - at))])

    one, other = divided(first), divided(second)
    for index in range(len(one)):
        is_same = first == second or 16 * (index + 1) <= 3 + min(first, second)
        assert (one[index] == other[index]) == is_same


def test_runs_of_one_image_count_by_their_rows() -> None:
    one = keys_of([media_item("a", (3, 20), (23, 20))])
    assert one == keys_of([media_item("a", (3, 20), (23, 20))])
    assert one[0] == keys_of([media_item("a", (3, 20), (30, 13))])[0]
    assert one[1] != keys_of([media_item("a", (3, 20), (30, 13))])[1]


def test_the_same_image_hits_and_another_one_with_the_same_text_does_not() -> None:
    bench = Bench(config(**MEDIA), depth=1)
    for name, num_cached in (("a", 0), ("a", 48), ("b", 48), ("", 48), ("", 96)):
        bench.admit(PROMPT, 4, media=[media_item(name, (3, ROWS))] if name else [])
        bench.run()
        assert bench.scheduler.load().num_cached_tokens == num_cached
    bench.check_outputs()
    assert bench.executor.num_encoded == {media_item(name).key: 1 for name in "ab"}


def test_a_tail_is_found_only_with_the_same_image() -> None:
    for name, num_cached in (("a", 40), ("b", 0)):
        bench = Bench(config(max_num_batched_tokens=40, **MEDIA), depth=1)
        bench.admit(PROMPT, 4, media=[media_item("a", (3, ROWS))], request_id=7)
        bench.fill()
        bench = bench.hand_over()
        bench.admit(PROMPT, 4, media=[media_item(name, (3, ROWS))], request_id=7, attempt=2)
        bench.run()
        assert bench.scheduler.load().num_cached_tokens == num_cached
        bench.check_outputs()


def test_keys_that_are_first_needed_for_a_copy_know_the_image() -> None:
    """With logprobs of the prompt, parallel samples share its blocks, and look for none."""
    bench = Bench(config(num_swap_blocks=40, **MEDIA), depth=1)
    for name in "ab":
        bench.admit(PROMPT, 20, 2, num_prompt_logprobs=1, media=[media_item(name, (3, ROWS))])
    while not bench.scheduler.lifecycle.is_idle:
        bench.fill()
        bench.check()
        bench.answer()
        bench.report()
    bench.check_outputs()
